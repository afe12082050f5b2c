"""Spelling bytes in a model's tokens."""

from __future__ import annotations

from headrace_core.grammar import Vocabulary


def spell(vocabulary: Vocabulary, text: bytes) -> list[int]:
    """Tokens whose bytes, joined, are ``text``: the tokenizer's if it has an opinion, else the longest
    possible one after the other.

    Raises:
        ValueError: no tokens spell it.
    """
    return _own_spelling(vocabulary, text) or _greedy_spelling(vocabulary, text)


def _own_spelling(vocabulary: Vocabulary, text: bytes) -> list[int]:
    if vocabulary.encode is None:
        return []
    try:
        ids = vocabulary.encode(text.decode())
    except UnicodeDecodeError:
        return []
    known = all(i < vocabulary.size and i not in vocabulary.special_token_ids for i in ids)
    return ids if known and b"".join(vocabulary.tokens[i] for i in ids) == text else []


def _greedy_spelling(vocabulary: Vocabulary, text: bytes) -> list[int]:
    ids, at = [], 0
    while at < len(text):
        for end in range(min(len(text), at + vocabulary.longest), at, -1):
            token_id = vocabulary.text_ids.get(text[at:end])
            if token_id is not None:
                ids.append(token_id)
                at = end
                break
        else:
            raise ValueError(f"no token spells byte {text[at]:#04x}")
    return ids
