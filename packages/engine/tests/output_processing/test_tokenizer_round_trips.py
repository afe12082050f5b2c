"""Text of all scripts through vocabularies of every kind: there and back, at once and in pieces."""

from __future__ import annotations

import re
from collections.abc import Iterator

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_tokenizers import EXACT, KINDS, SCRIPTS, SPECIALS, Load, anything

from headrace_core.sampling.params import SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine.output_processing.detokenizer import make_detokenizer


def in_pieces(tokenizer: Tokenizer, ids: list[int], cuts: set[int], *, skip: bool) -> Iterator[str]:
    """As a stream gives it, tokens handed over between the cuts."""
    detokenizer = make_detokenizer(tokenizer, SamplingParams(skip_special_tokens=skip))
    start = 0
    for end in [*sorted(cut for cut in cuts if cut < len(ids)), len(ids)]:
        yield detokenizer.feed(ids[start:end])
        start = end
    yield detokenizer.finish()


@pytest.mark.parametrize("kind", EXACT)
@settings(max_examples=150, deadline=None)
@given(text=anything)
def test_text_comes_back(kind: str, folders: Load, text: str) -> None:
    text = text.replace("▁", "_")  # stands for a space in half of the kinds
    tokenizer = folders(kind)
    assert tokenizer.decode(tokenizer.encode(text, add_special_tokens=False)) == text
    with_special = tokenizer.encode(text)
    if not any(special in text for special in SPECIALS):
        assert tokenizer.decode(with_special, skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("text", SCRIPTS)
def test_each_script_comes_back(kind: str, folders: Load, text: str) -> None:
    tokenizer = folders(kind)
    assert tokenizer.decode(tokenizer.encode(text), skip_special_tokens=True) == text


@pytest.mark.parametrize("kind", ["word-piece", "minilm"])
@settings(max_examples=60, deadline=None)
@given(words=st.lists(st.sampled_from(SCRIPTS), max_size=4))
def test_words_come_back(kind: str, folders: Load, words: list[str]) -> None:
    """Of word pieces, what is decoded is encoded to the same tokens again."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(" ".join(words), add_special_tokens=False)
    text = tokenizer.decode(ids)
    assert tokenizer.encode(text, add_special_tokens=False) == ids


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=120, deadline=None)
@given(data=st.data(), text=anything)
def test_pieces_are_the_whole(kind: str, folders: Load, data: st.DataObject, text: str) -> None:
    """Wherever a text ends, however its tokens are handed over, special ones among them."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(text)
    specials = sorted(tokenizer.special_token_ids)
    for place, special in data.draw(
        st.lists(st.tuples(st.integers(0, 40), st.sampled_from(specials)), max_size=3)
    ):
        ids.insert(place, special)
    ids = ids[: data.draw(st.integers(0, len(ids)))]
    cuts = data.draw(st.sets(st.integers(0, 60), max_size=20))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(in_pieces(tokenizer, ids, cuts, skip=skip)) == whole


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", [*EXACT, "demo"])
@settings(max_examples=80, deadline=None)
@given(data=st.data())
def test_any_tokens_are_the_whole(kind: str, folders: Load, data: st.DataObject) -> None:
    """Also tokens that no text has in that order: halves of characters, bytes that are none."""
    tokenizer = folders(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=30))
    cuts = data.draw(st.sets(st.integers(0, 30), max_size=10))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        pieces = list(in_pieces(tokenizer, ids, cuts, skip=skip))
        assert "".join(pieces) == whole
        assert re.search("[\ud800-\udfff]", whole) is None


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("text", SCRIPTS)
def test_no_piece_ends_within_a_character(kind: str, folders: Load, text: str) -> None:
    """Streamed one token at a time, what was sent is a beginning of the text at every moment."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(text, add_special_tokens=False)
    sent = ""
    for piece in in_pieces(tokenizer, ids, set(range(len(ids))), skip=True):
        sent += piece
        assert text.startswith(sent)
    assert sent == text
