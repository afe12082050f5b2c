"""Offsets of tokens in a text, and the bytes that they add to it."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.output import Logprob
from headrace_server.protocols.openai.logprobs import (
    CompletionFormat,
    TextPlace,
    chat_logprobs,
    pieces_in,
)

EMOJI = "é你😀e\u0301".encode()


def offsets(pieces: list[bytes]) -> list[int]:
    place = TextPlace()
    return [place.add(piece) for piece in pieces]


def test_a_token_inside_a_character_has_that_characters_place() -> None:
    one_byte_each = [bytes([byte]) for byte in EMOJI]
    assert offsets(one_byte_each) == [0, 0, 1, 1, 1, 2, 2, 2, 2, 3, 4, 4]
    assert offsets([b"a\xc3", b"\xa9b", b"", b"c"]) == [0, 1, 3, 3]


def test_bytes_that_are_no_character_count_as_it_is_shown() -> None:
    # "\xf0\x9f" is broken off by "a": one U+FFFD, behind which "a" stands.
    assert offsets([b"\xf0", b"\x9f", b"a", b"\xff", b"b"]) == [0, 0, 1, 2, 3]
    assert offsets([b"\xe2\x82", b"\xf0\x9f", b"\x98\x80", b"x"]) == [0, 1, 1, 2]
    assert offsets([b"\xef\xbf", b"\xbd", b"x"]) == [0, 0, 1]  # U+FFFD itself
    # Half a surrogate begins no character: U+FFFD for each byte, wherever tokens are cut.
    assert offsets([b"\xed\xa0", b"", b"x"]) == [0, 2, 2]
    assert offsets([b"\xed", b"\xa0", b"\x80", b"x"]) == [0, 1, 2, 3]


@given(st.lists(st.one_of(st.binary(max_size=5), st.text(max_size=2).map(str.encode)), max_size=12))
def test_offsets_rise_within_the_text(pieces: list[bytes]) -> None:
    """Any bytes do: each offset is the end of what was there before, or of its last character."""
    text = b"".join(pieces).decode("utf-8", "replace")
    found = offsets(pieces)
    assert found == sorted(found)
    assert not found or (found[0] == 0 and found[-1] <= len(text))
    before = b""
    for piece, offset in zip(pieces, found, strict=True):
        # The text before the piece, with or without its last character.
        whole = before.decode("utf-8", "replace")
        assert offset in (len(whole), len(whole) - 1)
        assert whole[:offset] == text[:offset]
        before += piece


@given(st.text(max_size=10), st.lists(st.integers(0, 60), max_size=10))
def test_offsets_of_characters_cut_anywhere(text: str, cuts: list[int]) -> None:
    data, at, pieces = text.encode(), 0, []
    for cut in sorted(cuts):
        pieces.append(data[at:cut])
        at = max(at, min(cut, len(data)))
    for index, offset in enumerate(offsets(pieces)):
        begin = len(b"".join(pieces[:index]))
        assert offset == len(data[:begin].decode("utf-8", "ignore"))


@pytest.mark.parametrize(
    ("text", "pieces", "special", "wanted"),
    [
        # of tokens, shown as they decode
        ("<s>é", [b"<s>", b"\xc3", b"\xa9"], {b"<s>"}, [b"<s>", b"\xc3", b"\xa9"]),
        # of text, with a special token in front that the text lacks
        ("é", [b"<s>", b"\xc3", b"\xa9"], {b"<s>"}, [b"", b"\xc3", b"\xa9"]),
        # the first token is known only as it is shown
        ("😀!", ["�".encode(), b"\x98\x80", b"!"], (), [b"\xf0\x9f", b"\x98\x80", b"!"]),
        # a vocabulary that begins with a space
        ("Hi é", [b"<s>", b" Hi", b" ", b"\xc3", b"\xa9"], {b"<s>"},
         [b"", b"Hi", b" ", b"\xc3", b"\xa9"]),
        # words without their spaces, and special tokens around
        ("two words", [b"[CLS]", b"two", b"word", b"s", b"[SEP]"], {b"[CLS]", b"[SEP]"},
         [b"", b"two", b" word", b"s", b""]),
        # lower case
        ("Two Words", [b"[CLS]", b"two", b"words"], {b"[CLS]"}, [b"", b"Two", b" Words"]),
        # bytes that are not a character
        ("a�", [b"a", b"\xf0"], (), [b"a", b"\xf0"]),
    ],
)  # fmt: skip
def test_a_prompt(text: str, pieces: list[bytes], special: Any, wanted: list[bytes]) -> None:
    assert pieces_in(text, pieces, special) == wanted


@given(st.text(max_size=8), st.lists(st.binary(max_size=4), max_size=8))
def test_a_prompts_pieces_never_leave_its_text(text: str, pieces: list[bytes]) -> None:
    whole = text.encode()
    assert b"".join(pieces_in(text, pieces)) == whole[: len(b"".join(pieces_in(text, pieces)))]


def entry(piece: bytes | None, text: str | None = None) -> Logprob:
    shown = piece.decode("utf-8", "replace") if piece is not None else text
    return Logprob(-0.5, 1, shown, piece)


def test_a_repeated_prompt_stands_before_the_completion() -> None:
    form = CompletionFormat(0, False)
    prompt = [None, {7: entry(b"\xc3")}, {8: entry(b"\xa9")}]
    block = form.build_prompt([1, 7, 8], prompt, "<s>", "é", {b"<s>"})
    assert (block.tokens, block.text_offset) == (["<s>", "�", "�"], [0, 0, 0])
    block = form.build([7, 8, 9], [{7: entry(b"\xc3")}, {8: entry(b"\xa9")}, {9: entry(b"x")}])
    assert block.text_offset == [1, 1, 2]


def test_tokens_as_ids_have_bytes() -> None:
    positions = [
        {7: entry(b"\xc3"), 9: entry(b"\xf0\x9f")},
        {8: entry(None, "é")},
        {1: entry(None)},
    ]
    found = chat_logprobs([7, 8, 1], positions, 2, True).content
    assert [e.token for e in found] == ["token_id:7", "token_id:8", "token_id:1"]
    assert [e.bytes for e in found] == [[0xC3], [0xC3, 0xA9], None]
    assert [e.bytes for e in found[0].top_logprobs] == [[0xC3], [0xF0, 0x9F]]
