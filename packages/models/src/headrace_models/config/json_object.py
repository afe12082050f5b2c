"""Reading one of a checkpoint's JSON files."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.checkpoint.regular_file import check_regular


def read_object(path: Path, *, required: bool) -> dict[str, Any]:
    """The JSON object in a file; {} if there is no file and none is required.

    Raises:
        UnsupportedModel: it cannot be read, or holds something else.
    """
    value = read_json(path) if required or path.is_file() else {}
    if not isinstance(value, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object, holds {type(value).__name__}")
    return value


def read_json(path: Path) -> Any:
    """The JSON value that a file holds.

    Raises:
        UnsupportedModel: it cannot be read.
    """
    try:
        check_regular(path)
        return json.loads(path.read_text(encoding="utf-8"))
    except FileNotFoundError:
        raise UnsupportedModel(f"{path}: not found; is {path.parent} a checkpoint?") from None
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: unreadable: {type(error).__name__}: {error}") from error
