"""Folders with adapters: whether one is there, where it may lie, and what it says of its base model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnknownModel

CONFIG = "adapter_config.json"
WEIGHTS = ("adapter_model.safetensors", "adapter_model.bin", "adapter_model.pt")
MAX_CONFIG_BYTES = 1 << 20


def lies_within(folder: Path, root: Path) -> bool:
    """True if a folder, and all that is read of an adapter in it, lies in another one, links followed.

    Raises:
        OSError, RuntimeError, ValueError: links go round, or it is no path.
    """
    read = (folder / name for name in (CONFIG, *WEIGHTS))
    return all(path.resolve().is_relative_to(root.resolve()) for path in (folder, *read))


def check_folder(path: str, root: str | None, field: str = "lora_path") -> str:
    """An adapter's folder as the engine is to open it.

    Args:
        root: folder that it, and its files, must lie in, links followed; None: any.

    Raises:
        RequestError: it lies elsewhere, or its path cannot be one.
        UnknownModel: there is no adapter.
    """
    try:
        folder = Path(path).expanduser() if root is None else Path(path).resolve()
        if root is not None and not lies_within(folder, Path(root)):
            raise RequestError(
                f"{field} = {path[:256]!r}: must lie in the folder that the operator allows "
                "(--allowed-lora-path)",
                param=field,
            )
        there = folder.is_dir() and (folder / CONFIG).is_file()
    except (ValueError, OSError, RuntimeError) as error:
        if isinstance(error, RequestError):
            raise
        raise RequestError(f"{field} = {path[:256]!r}: is not a path", param=field) from error
    if not there:
        raise UnknownModel(
            f"{field} = {path[:256]!r}: no adapter found: must be a folder with {CONFIG}",
            param=field,
        )
    return str(folder)


def read_config(folder: Path) -> dict[str, Any]:
    """``adapter_config.json``.

    Raises:
        RequestError: it is too large, no JSON object, or of another kind of adapter.
    """
    file = folder / CONFIG
    try:
        with file.open("rb") as opened:
            text = opened.read(MAX_CONFIG_BYTES + 1)
        given = json.loads(text) if len(text) <= MAX_CONFIG_BYTES else None
    except (OSError, ValueError, RecursionError) as error:
        raise RequestError(f"adapter {folder.name!r}: {CONFIG} is not valid JSON") from error
    if not isinstance(given, dict):
        raise RequestError(f"adapter {folder.name!r}: {CONFIG} must hold a JSON object")
    kind = given.get("peft_type")
    if kind != "LORA":
        raise RequestError(f"adapter {folder.name!r}: peft_type = {kind!r:.64}: must be 'LORA'")
    return given
