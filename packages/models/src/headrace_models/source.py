"""Where a checkpoint's files come from: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import logging
import os
from pathlib import Path

from headrace_core.errors import ConfigError, NetworkError

logger = logging.getLogger(__name__)

WANTED_FILES = ("*.json", "*.safetensors", "*.model", "*.txt", "*.jinja", "*.tiktoken")
"""What is downloaded of a repository: configs, weights, tokenizers, chat templates."""
UNWANTED_FILES = ("original/**/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*")
"""The same weights in other layouts."""


_NOT_THERE = ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError",
              "HFValidationError")  # fmt: skip
"""Errors of the hub's library that say: asked, and refused."""


def fetch(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    code: bool = False,
) -> Path:
    """The folder that holds the checkpoint ``name``; downloads what is not there yet.

    ``HF_HOME`` moves the cache, ``HF_HUB_OFFLINE=1`` forbids the network; both are the hub
    library's.

    Args:
        code: Python files are wanted, too.

    Raises:
        ConfigError: no such folder, and the hub does not have it; names the id and the cache
            directory. NetworkError: the hub cannot be reached, or may not be asked.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if not _looks_like_hub_name(name):
        raise ConfigError(
            f"model {name!r}: no such folder, and no hub name (owner/name)", field="model.model"
        )
    if os.environ.get("HEADRACE_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise ConfigError(
            "HEADRACE_USE_MODELSCOPE is set, but downloads from ModelScope are not implemented: "
            "download the model with ModelScope's own tool and pass its folder"
        )
    wanted = (*WANTED_FILES, "*.py") if code else WANTED_FILES
    return _download(name, revision, token, download_dir, wanted)


def _looks_like_hub_name(name: str) -> bool:
    parts = name.split("/")
    return len(parts) <= 2 and all(part and part[0] not in ".~" for part in parts)


def _download(
    name: str,
    revision: str | None,
    token: str | None,
    download_dir: str | None,
    wanted: tuple[str, ...],
) -> Path:
    import huggingface_hub
    from huggingface_hub import constants

    cache = download_dir or constants.HF_HUB_CACHE
    try:
        folder = huggingface_hub.snapshot_download(
            name,
            revision=revision,
            token=token,
            cache_dir=cache,
            allow_patterns=list(wanted),
            ignore_patterns=list(UNWANTED_FILES),
        )
    except Exception as error:  # the library's errors share no base with the network's
        offline = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        kind = ConfigError if type(error).__name__ in _NOT_THERE else NetworkError
        raise kind(
            f"model {name!r}: no such local folder, not complete in the cache {cache}, and not to be "
            f"had from the hub{offline}: {type(error).__name__}: {_first_line(error)}",
            field="model.model",
        ) from error
    logger.info("model %s: files in %s", name, folder)
    return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no details"
