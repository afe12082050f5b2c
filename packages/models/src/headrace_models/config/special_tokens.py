"""Special tokens of a checkpoint's tokenizer, by name. No torch."""

from __future__ import annotations

import functools
import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel


def refuse_special_tokens(path: Path, text: str) -> None:
    """Raises: RequestError if a client's text spells a token that would end its part of the prompt."""
    found = [name for name in special_tokens(path) if name in text]
    if found:
        raise RequestError(
            f"prompt: {found[0]!r} is a special token of the model and cannot be part of a prompt",
            param="prompt",
        )


def text_ids(path: Path, text: str) -> list[int]:
    """Tokens of a word and what follows it, by the checkpoint's ``tokenizer.json``.

    Raises:
        RequestError: see :func:`refuse_special_tokens`.
    """
    refuse_special_tokens(path, text)
    ids: list[int] = _tokenizer(path).encode(" " + text.strip(), add_special_tokens=False).ids
    return ids


@functools.lru_cache(maxsize=4)
def _tokenizer(path: Path) -> Any:
    from tokenizers import Tokenizer

    return Tokenizer.from_file(str(path / "tokenizer.json"))


@functools.lru_cache(maxsize=16)
def special_tokens(path: Path) -> Mapping[str, int]:
    """Name -> id of the checkpoint's added tokens.

    Raises:
        UnsupportedModel: a file is unreadable.
    """
    try:
        if (path / "tokenizer.json").is_file():
            entries = json.loads((path / "tokenizer.json").read_text(encoding="utf-8"))
            return {entry["content"]: int(entry["id"]) for entry in entries["added_tokens"]}
        if (path / "added_tokens.json").is_file():
            entries = json.loads((path / "added_tokens.json").read_text(encoding="utf-8"))
            return {str(name): int(token) for name, token in entries.items()}
    except (OSError, ValueError, KeyError, TypeError, AttributeError, RecursionError) as error:
        raise UnsupportedModel(
            f"{path}: the tokenizer's added tokens are unreadable: {type(error).__name__}: {error}"
        ) from error
    return {}
