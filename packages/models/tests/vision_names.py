"""Other spellings of the names of a checkpoint's tensors: a mixin of vision conformance classes."""

from __future__ import annotations

import re
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file

PUBLISHED = ((r"^(model\.)?vision_tower\.", r"\1vision_tower.vision_model."),)
"""A tower as transformers wrote it before 5."""
NESTED = (
    (r"^language_model\.lm_head", "lm_head"),
    (r"^language_model\.model", "model.language_model"),
    (r"^(vision_tower|multi_modal_projector|image_newline)", r"model.\1"),
)
"""From those of transformers before 4.52 to those since."""


class OtherNames:
    """Before the conformance class in the MRO."""

    spellings: ClassVar[Sequence[Sequence[tuple[str, str]]]] = (
        PUBLISHED, NESTED, (*PUBLISHED, *NESTED),
    )  # fmt: skip
    """Regular expressions of names that transformers saves -> what takes their place."""

    def test_other_names_are_read(self: Any, model: Any, folder: Path, tmp_path: Path) -> None:
        tensors = load_file(folder / "model.safetensors")
        shutil.copy(folder / "config.json", tmp_path)
        for spelling in self.spellings:
            renamed = dict(tensors)
            for pattern, instead in spelling:
                renamed = {re.sub(pattern, instead, name): t for name, t in renamed.items()}
            if renamed.keys() == tensors.keys():
                pytest.fail(f"{spelling} changes no name")
            save_file(renamed, tmp_path / "model.safetensors")
            other = self.load(tmp_path)
            for own, found in zip(
                self.embed(model, self.images()), self.embed(other, self.images()), strict=True
            ):
                torch.testing.assert_close(found, own, atol=0, rtol=0)
            text = self.forward(other, [5, 6, 7], [], [], [3])
            torch.testing.assert_close(text, self.forward(model, [5, 6, 7], [], [], [3]))
