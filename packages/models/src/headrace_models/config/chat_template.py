"""A checkpoint's chat template, unread. No torch."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

_ALONE = "chat_template.jinja"
_KEYED = ("chat_template.json", "tokenizer_config.json")


def template_text(path: Path) -> str:
    """The template's text, of several templates all; "" where a checkpoint has none that can be read.

    Args:
        path: folder of the checkpoint.
    """
    try:
        return (path / _ALONE).read_text(encoding="utf-8")
    except (OSError, ValueError):
        pass
    for name in _KEYED:
        try:
            settings: Any = json.loads((path / name).read_text(encoding="utf-8"))
        except (OSError, ValueError, RecursionError):
            continue
        found = settings.get("chat_template") if isinstance(settings, dict) else None
        if found:
            return found if isinstance(found, str) else json.dumps(found)
    return ""
