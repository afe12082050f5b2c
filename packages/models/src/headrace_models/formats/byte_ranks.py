"""Tokenizers whose tokens are byte strings with ranks, as the ``tokenizer.json`` that does the same.

A piece of text is merged two neighbours at a time, those first whose merger has the lowest rank, as tiktoken
does.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

AddedToken = Mapping[str, Any]
"""An entry of ``added_tokens``."""


def byte_level(
    pattern: str,
    vocabulary: Mapping[str, int],
    merges: list[list[str]],
    added: list[AddedToken],
) -> dict[str, Any]:
    """The content of ``tokenizer.json``.

    Args:
        pattern: cuts text into pieces.
        vocabulary: spelling -> id, of all tokens.
        merges: two spellings each, in their order.
        added: tokens that are found in text before it is cut.
    """
    bytes_ = {"type": "ByteLevel", "add_prefix_space": False, "trim_offsets": True}
    cut = {"type": "Split", "pattern": {"Regex": pattern}, "behavior": "Isolated", "invert": False}
    return {
        "version": "1.0",
        "added_tokens": added,
        "normalizer": None,
        "pre_tokenizer": {
            "type": "Sequence", "pretokenizers": [cut, {**bytes_, "use_regex": False}],
        },
        "decoder": {**bytes_, "use_regex": True},
        "model": {
            "type": "BPE", "vocab": vocabulary, "merges": merges, "byte_fallback": False,
            "fuse_unk": False, "ignore_merges": True,
        },
    }  # fmt: skip


def added_token(index: int, content: str, *, special: bool = True) -> AddedToken:
    """A token that nothing around it changes."""
    return {
        "id": index, "content": content, "single_word": False, "lstrip": False, "rstrip": False,
        "normalized": False, "special": special,
    }  # fmt: skip


def merges_of(ranks: Mapping[bytes, int]) -> list[list[str]]:
    """Every way to make a token of two, lowest rank first, spelled."""
    found = []
    for token, rank in ranks.items():
        for cut in range(1, len(token)):
            left, right = ranks.get(token[:cut]), ranks.get(token[cut:])
            if left is not None and right is not None:
                found.append((rank, left, right, cut, token))
    return [[spelled(token[:cut]), spelled(token[cut:])] for _, _, _, cut, token in sorted(found)]


def spelled(token: bytes) -> str:
    """A token in characters, one for each byte."""
    return token.decode("latin-1").translate(_ALPHABET)


def _alphabet() -> dict[int, int]:
    """The character that stands for each byte: itself if printable, else one from U+0100 on."""
    printable = {*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)}
    others = iter(range(0x100, 0x200))
    return {byte: byte if byte in printable else next(others) for byte in range(256)}


_ALPHABET = _alphabet()
