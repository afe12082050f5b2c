"""Text in pieces equals text at once."""

from __future__ import annotations

import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from make_tokenizers import folder

from headrace_core.sampling.params import SamplingParams
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.tokenizer import load_tokenizer
from headrace_engine.output_processing.detokenizer import (
    ByteDetokenizer,
    BytePieces,
    WindowDetokenizer,
    make_detokenizer,
    token_texts,
)

BYTE_KINDS = ["byte-level", "llama", "gemma", "metaspace"]
KINDS = [*BYTE_KINDS, "word"]
TOKENIZERS: dict[str, Tokenizer] = {}


def tokenizer_of(kind: str) -> Tokenizer:
    if kind not in TOKENIZERS:
        TOKENIZERS[kind] = load_tokenizer(folder(kind))
    return TOKENIZERS[kind]


def feed(tokenizer: Tokenizer, pieces: list[list[int]], skip: bool, prompt: list[int]) -> list[str]:
    params = SamplingParams(skip_special_tokens=skip)
    detokenizer = make_detokenizer(tokenizer, params, prompt)
    return [*(detokenizer.feed(piece) for piece in pieces), detokenizer.finish()]


def cut(ids: list[int], seed: int) -> list[list[int]]:
    rng, pieces, at = random.Random(seed), [], 0
    while at < len(ids):
        size = rng.randint(1, 4)
        pieces.append(ids[at : at + size])
        at += size
    return pieces


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", KINDS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=60), seed=st.integers(0, 999))
def test_pieces_of_a_text_join_to_the_whole(kind: str, text: str, seed: int) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(feed(tokenizer, cut(ids, seed), skip, [])) == whole


@pytest.mark.req("REL-16")
@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=80, deadline=None)
@given(data=st.data(), seed=st.integers(0, 999))
def test_any_tokens_join_to_the_whole(kind: str, data: st.DataObject, seed: int) -> None:
    tokenizer = tokenizer_of(kind)
    ids = data.draw(st.lists(st.integers(-1, tokenizer.vocab_size + 2), max_size=40))
    for skip in (True, False):
        whole = tokenizer.decode(ids, skip_special_tokens=skip)
        assert "".join(feed(tokenizer, cut(ids, seed), skip, [])) == whole


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=80, deadline=None)
@given(text=st.text(max_size=60))
def test_decoding_equals_the_library_s_for_text(kind: str, text: str) -> None:
    tokenizer = tokenizer_of(kind)
    ids = tokenizer.encode(text)
    backend = tokenizer._backend  # type: ignore[attr-defined]
    for skip in (True, False):
        ours = tokenizer.decode(ids, skip_special_tokens=skip)
        assert ours == backend.decode(ids, skip_special_tokens=skip)


@settings(max_examples=100, deadline=None)
@given(data=st.data())
def test_byte_level_decoding_equals_the_library_s_for_any_tokens(data: st.DataObject) -> None:
    tokenizer = tokenizer_of("byte-level")
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size - 1), max_size=40))
    backend = tokenizer._backend  # type: ignore[attr-defined]
    assert tokenizer.decode(ids) == backend.decode(ids, skip_special_tokens=False)


@pytest.mark.parametrize("kind", KINDS)
def test_no_piece_ends_inside_a_character(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    text = "ab 你好 😀👩‍👩‍👧 ñandú"
    ids = tokenizer.encode(text, add_special_tokens=False)
    pieces = feed(tokenizer, [[i] for i in ids], True, [])
    if kind != "word" and kind != "metaspace":
        assert "".join(pieces) == text
    assert not any("�" in piece for piece in pieces[:-1])


@pytest.mark.parametrize("kind", ["llama", "gemma", "metaspace"])
def test_the_space_after_a_prompt_is_kept(kind: str) -> None:
    tokenizer = tokenizer_of(kind)
    whole = tokenizer.encode("Hello world and more")
    text = tokenizer.decode(whole, skip_special_tokens=True)
    spaces = 0
    for border in range(2, len(whole)):
        prompt, ids = whole[:border], whole[border:]
        rest = text[len(tokenizer.decode(prompt, skip_special_tokens=True)) :]
        assert "".join(feed(tokenizer, [[i] for i in ids], True, prompt)) == rest
        spaces += rest.startswith(" ")
    assert spaces, "no token begins with a space: the test proves nothing"


def test_only_the_first_space_of_a_text_is_dropped() -> None:
    tokenizer = tokenizer_of("llama")
    ids = tokenizer.encode("Hello world")
    assert "".join(feed(tokenizer, [[i] for i in ids], True, [])) == "Hello world"
    # A prompt that shows nothing is no beginning.
    assert "".join(feed(tokenizer, [[i] for i in ids[1:]], True, ids[:1])) == "Hello world"


def test_spaces_between_special_tokens() -> None:
    tokenizer = tokenizer_of("word")
    ids = [*tokenizer.encode("Hello world"), 2, 2]
    assert tokenizer.decode(ids).endswith("world </s> </s>")
    assert tokenizer.decode(ids, spaces_between_special_tokens=False).endswith("world </s></s>")


def test_kinds() -> None:
    params = SamplingParams()
    for kind in BYTE_KINDS:
        assert isinstance(tokenizer_of(kind), BytePieces)
        assert isinstance(make_detokenizer(tokenizer_of(kind), params), ByteDetokenizer)
    assert isinstance(make_detokenizer(tokenizer_of("word"), params), WindowDetokenizer)


def test_token_texts_keep_spaces() -> None:
    tokenizer = tokenizer_of("llama")
    text_of = token_texts(tokenizer)
    ids = tokenizer.encode("Hello world", add_special_tokens=False)
    assert "".join(map(text_of, ids)) == " Hello world"


@pytest.mark.parametrize("kind", ["byte-level", "word"])
def test_cost_per_token_does_not_grow(kind: str) -> None:
    """Counted, not timed: how many ids the tokenizer decodes for one more token."""
    tokenizer = tokenizer_of(kind)
    looked_at = 0
    if kind == "word":
        decode = tokenizer.decode

        def counting(ids: list[int], **options: bool) -> str:
            nonlocal looked_at
            looked_at += len(ids)
            return decode(ids, **options)

        detokenizer = WindowDetokenizer(tokenizer)
        detokenizer._tokenizer = type("Counting", (), {"decode": staticmethod(counting)})()
    else:
        detokenizer = ByteDetokenizer(tokenizer)  # type: ignore[arg-type, assignment]
    ids = tokenizer.encode("the quick brown fox ", add_special_tokens=False) * 200
    for token_id in ids:
        detokenizer.feed([token_id, 1])  # a special token must not lengthen the window
    assert looked_at < 16 * len(ids)
