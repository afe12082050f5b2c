"""Ids of single tokens, looked up in a checkpoint's ``tokenizer.json``. No torch.

Format: Hugging Face tokenizers' JSON (``added_tokens``; ``model.vocab`` as a mapping, or for Unigram
as a list of pieces with their scores).
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import ConfigError, UnsupportedModel


def token_ids(folder: Path, tokens: Sequence[str | int], *, setting: str) -> list[int]:
    """Id of each of ``tokens``, spelled as the vocabulary spells them; of ids, these.

    Args:
        folder: of the checkpoint.
        setting: what named the tokens; for messages.

    Raises:
        ConfigError: a string is no single token; names it.
        UnsupportedModel: there is no ``tokenizer.json``, or it is unreadable.
    """
    spelled = [token for token in tokens if isinstance(token, str)]
    known = read_vocabulary(folder / "tokenizer.json") if spelled else {}
    for token in spelled:
        if token not in known:
            raise ConfigError(
                f"{setting}: {token!r} is not one token of the model's vocabulary (upper and lower "
                "case matter, and so does a leading space, which vocabularies write as \u0120 or \u2581)",
                field=setting,
            )
    return [known[token] if isinstance(token, str) else token for token in tokens]


def read_vocabulary(path: Path) -> Mapping[str, int]:
    """Token -> id.

    Raises:
        UnsupportedModel: see :func:`token_ids`.
    """
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
        return _vocabulary(content)
    except FileNotFoundError:
        raise UnsupportedModel(f"{path}: not found; tokens are looked up in it") from None
    except (OSError, ValueError, TypeError, KeyError, RecursionError) as error:
        raise UnsupportedModel(f"{path}: unreadable: {type(error).__name__}: {error}") from error


def _vocabulary(content: Any) -> dict[str, int]:
    pieces = content["model"]["vocab"]
    if isinstance(pieces, list):
        pieces = {piece: index for index, (piece, _) in enumerate(pieces)}
    added = {entry["content"]: entry["id"] for entry in content.get("added_tokens") or ()}
    known = {**pieces, **added}
    if any(type(index) is not int for index in known.values()):
        raise TypeError("a token's id is not a number")
    return known
