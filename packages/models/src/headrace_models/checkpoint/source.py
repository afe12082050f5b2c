"""Source of a checkpoint's files: a local folder, or the Hugging Face hub."""

from __future__ import annotations

import logging
import os
import re
from collections.abc import Mapping, Sequence
from fnmatch import fnmatch
from pathlib import Path

from headrace_core.errors import ConfigError, NetworkError
from headrace_models.formats.mistral_config import has_params

logger = logging.getLogger(__name__)

WANTED_FILES = ("*.json", "*.model", "*.txt", "*.jinja", "*.tiktoken", "tokenization_*.py")
"""Files of a repository that are downloaded besides weights: configs, tokenizers, chat templates."""
WEIGHT_FILES: Mapping[str, tuple[str, ...]] = {
    "auto": ("*.safetensors", "*.bin"),
    "pt": ("*.bin", "*.pt"),
    "mistral": ("consolidated*.safetensors",),
    "tensorizer": ("*.tensors",),
    "dummy": (),
}
"""Weights by load format, what is preferred first; :data:`_SAFETENSORS` for all other formats."""
_SAFETENSORS = ("*.safetensors",)
UNWANTED_FILES = ("original/**/*", "consolidated*", "onnx/*", "openvino/*", "coreml/*")
"""Files that hold the same weights in other layouts."""
_MOST_PARTS = 4
"""Most parts of a hub name with a file: owner, repository, folder, file."""

_NOT_THERE = ("RepositoryNotFoundError", "RevisionNotFoundError", "GatedRepoError",
              "HFValidationError")  # fmt: skip
"""Errors of the hub's library that say: asked, and refused."""


def fetch(
    name: str,
    *,
    revision: str | None = None,
    token: str | None = None,
    download_dir: str | None = None,
    load_format: str = "auto",
    code: bool = False,
    offline: bool = False,
) -> Path:
    """The folder that holds the checkpoint ``name``, or a GGUF file; downloads what is not there yet.

    Weights in Mistral's own layout come from a repository with ``auto`` only where it has no other.
    Of a hub repository one GGUF file may be named, which may lie in a folder:
    ``owner/name/file.gguf``. Of several parts it is the first, and the others come along.

    ``HF_HOME`` moves the cache, ``HF_HUB_OFFLINE=1`` forbids the network; both are the hub
    library's.

    Args:
        code: Python files are wanted, too.
        offline: the hub is not asked: what is in its cache counts, whatever the environment says.

    Raises:
        ConfigError: no such folder, and the hub does not have it; names the id and the cache
            directory. NetworkError: the hub cannot be reached, or may not be asked.
    """
    folder = Path(name).expanduser()
    if folder.is_dir():
        return folder.resolve()
    if folder.suffix.lower() == ".gguf" and folder.is_file():
        return folder.absolute()  # not resolved: the hub's cache has links to files without names
    if not _looks_like_hub_name(name):
        raise ConfigError(
            f"model {name!r}: no such folder or GGUF file, and no hub name (owner/name, or "
            "owner/name/file.gguf)",
            field="model.model",
        )
    if os.environ.get("HEADRACE_USE_MODELSCOPE", "").lower() in ("1", "true"):
        raise ConfigError(
            "HEADRACE_USE_MODELSCOPE is set, but downloads from ModelScope are not implemented: "
            "download the model with ModelScope's own tool and pass its folder"
        )
    repository, file = _file_of(name)
    if load_format.lower() == "gguf" and file is None:
        raise ConfigError(
            f"model {name!r}: load_format gguf needs the name of a file, as a hub repository may hold "
            f"several: {name}/FILE.gguf",
            field="model.model",
        )
    preferred: list[tuple[str, ...]] = [(kind,) for kind in _weights_of(load_format)]
    others = (*WANTED_FILES, "*.py") if code else WANTED_FILES
    for patterns in [(_all_parts(file),)] if file else preferred or [()]:
        found = _download(repository, (*others, *patterns), revision, token, download_dir, offline)
        if any(next(found.glob(pattern), None) for pattern in patterns):
            break
    else:
        if load_format.lower() == "auto" and has_params(found, "auto"):  # it has no other layout
            wanted = (*others, *_weights_of("mistral"))
            found = _download(repository, wanted, revision, token, download_dir, offline)
    return found / file if file else found


def _looks_like_hub_name(name: str) -> bool:
    parts = name.split("/")
    most = _MOST_PARTS if name.lower().endswith(".gguf") else 2
    return len(parts) <= most and all(part and part[0] not in ".~" for part in parts)


def _file_of(name: str) -> tuple[str, str | None]:
    """``owner/name/file.gguf`` in two."""
    owner, _, rest = name.partition("/")
    repository, _, file = rest.partition("/")
    return (f"{owner}/{repository}", file) if file else (name, None)


def _all_parts(file: str) -> str:
    """The pattern of a file and, if it is the first of several parts, of the others."""
    return re.sub(r"-00001-of-(\d{5}\.gguf)$", r"-*-of-\1", file)


def _weights_of(load_format: str) -> tuple[str, ...]:
    return WEIGHT_FILES.get(load_format.lower(), _SAFETENSORS)


def _download(
    name: str,
    wanted: Sequence[str],
    revision: str | None,
    token: str | None,
    download_dir: str | None,
    offline: bool,
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
            ignore_patterns=[
                kind for kind in UNWANTED_FILES if not any(fnmatch(w, kind) for w in wanted)
            ],
            local_files_only=offline,
        )
    except Exception as error:  # the library's errors share no base with the network's
        kind = ConfigError if type(error).__name__ in _NOT_THERE else NetworkError
        if offline:
            raise NetworkError(
                f"model {name!r}: offline = True, no such local folder, and not in the cache {cache}: "
                f"`hf download {name}` on a machine with a network fills one, or name a folder",
                field="model.model",
            ) from error
        said = " (HF_HUB_OFFLINE is set)" if constants.HF_HUB_OFFLINE else ""
        raise kind(
            f"model {name!r}: no such local folder, not complete in the cache {cache}, and cannot "
            f"be downloaded from the hub{said}: {type(error).__name__}: {_first_line(error)}",
            field="model.model",
        ) from error
    logger.info("model %s: files in %s", name, folder)
    return Path(folder)


def _first_line(error: Exception) -> str:
    return str(error).strip().splitlines()[0] if str(error).strip() else "no details"
