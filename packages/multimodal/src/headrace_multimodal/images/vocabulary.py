"""Ids of a checkpoint's special tokens, for placeholders of several tokens."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel

_FIRST_TEKKEN = {"[IMG]": 10, "[IMG_BREAK]": 12, "[IMG_END]": 13}
"""Special tokens of a ``tekken.json`` that lists none."""


def special_token_id(path: Path, token: str) -> int:
    """A token's id, as ``tokenizer_config.json``, ``tokenizer.json`` or Mistral's ``tekken.json`` has it.

    Raises:
        UnsupportedModel: none does; names the token.
    """
    for found in (_decoder_tokens(path), _added_tokens(path), _tekken_tokens(path)):
        for name, number in found:
            if name == token and type(number) is int:
                return number
    raise UnsupportedModel(
        f"{path}: tokenizer_config.json, tokenizer.json and tekken.json name no token {token!r}, which "
        "stands in the prompt where an image is"
    )


def named_token(path: Path, key: str, default: str) -> str:
    """Spelling of a token, as ``tokenizer_config.json`` says it."""
    stated = _read(path / "tokenizer_config.json")
    for place in (stated, stated.get("extra_special_tokens")):
        value = place.get(key) if isinstance(place, dict) else None
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str) and value:
            return value
    return default


def begins_texts(path: Path) -> bool | None:
    """``add_bos_token`` of ``tokenizer_config.json``; None: the file does not say it, and ``tokenizer.json``
    decides."""
    stated = _read(path / "tokenizer_config.json").get("add_bos_token")
    return stated if isinstance(stated, bool) else None


def _decoder_tokens(path: Path) -> Iterator[tuple[Any, Any]]:
    found = _read(path / "tokenizer_config.json").get("added_tokens_decoder")
    for number, entry in found.items() if isinstance(found, dict) else ():
        if isinstance(entry, dict) and number.isdecimal():
            yield entry.get("content"), int(number)


def _added_tokens(path: Path) -> Iterator[tuple[Any, Any]]:
    whole = _read(path / "tokenizer.json")
    found = whole.get("added_tokens")
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict):
            yield entry.get("content"), entry.get("id")
    model = whole.get("model")
    pieces = model.get("vocab") if isinstance(model, dict) else None
    yield from pieces.items() if isinstance(pieces, dict) else ()


def _tekken_tokens(path: Path) -> Iterator[tuple[Any, Any]]:
    whole = _read(path / "tekken.json")
    found = whole.get("special_tokens")
    if whole and found is None:
        yield from _FIRST_TEKKEN.items()
    for entry in found if isinstance(found, list) else ():
        if isinstance(entry, dict):
            yield entry.get("token_str"), entry.get("rank")


def _read(file: Path) -> dict[str, Any]:
    """A file's object; {} if there is none.

    Raises: UnsupportedModel: it is unreadable.
    """
    try:
        found = json.loads(file.read_text(encoding="utf-8"))
    except FileNotFoundError:
        return {}
    except (OSError, ValueError, RecursionError) as error:
        raise UnsupportedModel(f"{file}: cannot be read: {error}") from error
    return found if isinstance(found, dict) else {}
