"""The vision demo model of headrace: a checkpoint that is data in a wheel, and the path to it.

It is a distribution of its own because it is megabytes of weights, which an installation that serves
real models does not want. It depends on nothing, so that finding the path imports nothing.
"""

from __future__ import annotations

import pathlib
from importlib import resources

__all__ = ["__version__", "model_path"]

__version__ = "0.1.0"


def model_path() -> pathlib.Path:
    """The folder of the checkpoint, in the Hugging Face layout of LLaVA's class.

    It is a real folder, because weights are memory-mapped from files: an installation that keeps
    packages in a zip archive is refused with `FileNotFoundError`.
    """
    folder = resources.files(__name__) / "model"
    if not isinstance(folder, pathlib.Path) or not folder.is_dir():
        raise FileNotFoundError(
            f"the vision demo model needs an unpacked installation, not {folder}"
        )
    return folder
