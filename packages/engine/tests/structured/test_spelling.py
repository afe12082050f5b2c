"""Bytes in tokens."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.grammar import Vocabulary
from headrace_engine.structured.spelling import spell

TOKENS = [*(bytes([i]) for i in range(256)), b"ab", b"abc", "é".encode(), b"<s>", b""]


@given(st.binary(max_size=30))
def test_every_text_has_a_spelling(text):
    vocabulary = Vocabulary(TOKENS, frozenset({259}))
    ids = spell(vocabulary, text)
    assert b"".join(TOKENS[i] for i in ids) == text
    assert 259 not in ids


def test_the_tokenizers_spelling_wins_if_it_is_one():
    right = Vocabulary(TOKENS, frozenset({259}), encode=lambda text: [97, 98, 99])
    assert spell(right, b"abc") == [97, 98, 99]
    assert spell(right, b"ab") == [256], "it spells something else"
    assert spell(right, b"\xff") == [255], "it cannot know parts of characters"
    with pytest.raises(ValueError, match="0x78"):
        spell(Vocabulary([b"a"]), b"ax")
