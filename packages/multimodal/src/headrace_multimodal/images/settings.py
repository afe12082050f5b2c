"""Settings of a checkpoint's image and video processors: files of their own, or parts of
``processor_config.json``."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel

_FILES = (("preprocessor_config.json", None), ("processor_config.json", "image_processor"))
_VIDEO_FILES = (
    ("processor_config.json", "video_processor"),
    ("video_preprocessor_config.json", None),
    ("preprocessor_config.json", None),
)
"""Checkpoints of the first models that took videos have one file for both."""


def image_settings(path: Path) -> Mapping[str, Any]:
    """The stated settings of images; {} if no file has any.

    Raises:
        UnsupportedModel: a file is unreadable.
    """
    return _first(path, _FILES)


def video_settings(path: Path) -> Mapping[str, Any]:
    """The stated settings of videos; {} if no file has any.

    Raises:
        UnsupportedModel: a file is unreadable.
    """
    return _first(path, _VIDEO_FILES)


def _first(path: Path, files: Sequence[tuple[str, str | None]]) -> Mapping[str, Any]:
    """
    Args:
        files: names, each with the part of the file that is meant; None: the whole.
    """
    for name, part in files:
        file = path / name
        if not file.is_file():
            continue
        try:
            found = json.loads(file.read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError) as error:
            raise UnsupportedModel(f"{file}: cannot be read: {error}") from error
        stated = found.get(part, {}) if part is not None and isinstance(found, dict) else found
        if not isinstance(stated, dict):
            raise UnsupportedModel(f"{file}: must hold an object of settings")
        if stated:
            return stated
    return {}


def processor_settings(path: Path) -> Mapping[str, Any]:
    """What ``processor_config.json`` says beside the image processor; {}: nothing."""
    file = path / "processor_config.json"
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError):
        return {}
    return found if isinstance(found, dict) else {}
