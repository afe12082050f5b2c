"""Each token's own bytes, joined, are the text, wherever tokens cut its characters."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from trained_tokenizers import EXACT, TRAINED, Load, anything

from headrace_core.output import CompletionOutput, Logprobs
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.step import TokenLogprobs
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput
from headrace_engine.output_processing.detokenizer import BytePieces, own_bytes, token_texts
from headrace_engine.output_processing.logprobs import num_bytes
from headrace_engine.output_processing.output import StreamState

BYTE_KINDS = (*EXACT, "demo")
EMOJI = "ab é 你好 😀👩‍👩‍👧 e\u0301 Z͑ͫ"


def outputs_of(
    tokenizer: Tokenizer, ids: list[int], others: list[int] | None = None, **how: Any
) -> list[CompletionOutput]:
    """A completion of these tokens, one a step, each with these others as its rivals; every output
    that is ready after a step."""
    params = SamplingParams(max_tokens=len(ids) + 1, logprobs=len(others or []), **how)
    core = CoreRequest("r#0", [0], params, frozenset(), 9, 0.0)
    request = PreparedRequest("r", None, [tokenizer.bos_token_id or 0], params, [core], 0.0)
    state = StreamState(request, tokenizer, 1, token_texts(tokenizer), own_bytes(tokenizer))
    found = []
    for number, token_id in enumerate(ids):
        rivals = [i for i in others or [] if i != token_id]
        entry = TokenLogprobs(
            [token_id, *rivals], [-1.0] * (1 + len(rivals)), list(range(1, 2 + len(rivals)))
        )
        ended = "length" if number == len(ids) - 1 else None
        state.update(CoreOutput("r#0", [token_id], [entry], finish_reason=ended), 0.0)
        if (output := state.take()) is not None:
            found += output.outputs
    return found


def pieces(logprobs: Logprobs | None) -> list[bytes]:
    """Bytes of each position's chosen token."""
    found = [next(iter((entries or {}).values())).token_bytes for entries in logprobs or []]
    assert None not in found
    return [piece for piece in found if piece is not None]


def joined(completion: CompletionOutput) -> bytes:
    return b"".join(pieces(completion.logprobs))


@pytest.mark.parametrize("kind", EXACT)
@pytest.mark.parametrize("flat", [False, True])
def test_parts_of_characters(kind: str, flat: bool, folders: Load) -> None:
    tokenizer = folders(kind)
    ids = tokenizer.encode(EMOJI, add_special_tokens=False)
    [completion] = outputs_of(
        tokenizer, ids, output_kind=RequestOutputKind.FINAL_ONLY, flat_logprobs=flat
    )
    assert completion.text == EMOJI
    assert joined(completion) == EMOJI.encode()
    found = pieces(completion.logprobs)
    assert isinstance(tokenizer, BytePieces)
    assert found[1:] == [tokenizer.token_bytes(i) for i in ids[1:]]
    cut = [p for p in found if p.decode("utf-8", "replace") != p.decode("utf-8", "ignore")]
    assert cut, "no token is a part of a character: the test proves nothing"
    entries = (completion.logprobs or [])[found.index(cut[0])] or {}
    assert "�" in (next(iter(entries.values())).decoded_token or "")


@pytest.mark.parametrize("kind", EXACT)
def test_rivals_have_their_own(kind: str, folders: Load) -> None:
    """Each has what it would have added there."""
    tokenizer = folders(kind)
    assert isinstance(tokenizer, BytePieces)
    ids = tokenizer.encode("x 😀", add_special_tokens=False)
    rivals = tokenizer.encode("😀 é", add_special_tokens=False)
    special = min(tokenizer.special_token_ids)
    [completion] = outputs_of(
        tokenizer, ids, [*rivals, special], output_kind=RequestOutputKind.FINAL_ONLY
    )
    for number, entries in enumerate(completion.logprobs or []):
        own = tokenizer.token_bytes if number else tokenizer.first_token_bytes
        for token_id, entry in (entries or {}).items():
            wanted = b"" if token_id == special else own(token_id)
            assert entry.token_bytes == wanted


@pytest.mark.parametrize("kind", BYTE_KINDS)
@settings(max_examples=60, deadline=None)
@given(data=st.data())
def test_any_tokens(kind: str, folders: Load, data: st.DataObject) -> None:
    """Also halves of characters, bytes that are none, and special tokens, skipped or not."""
    tokenizer = folders(kind)
    ids = data.draw(st.lists(st.integers(0, tokenizer.vocab_size + 1), min_size=1, max_size=30))
    skip = data.draw(st.booleans())
    outputs = outputs_of(
        tokenizer, ids, output_kind=RequestOutputKind.DELTA, skip_special_tokens=skip
    )
    text = "".join(o.text for o in outputs)
    assert b"".join(map(joined, outputs)).decode("utf-8", "replace") == text
    assert sum(len(o.logprobs or ()) for o in outputs) == len(ids)


@pytest.mark.parametrize("kind", TRAINED)
@settings(max_examples=60, deadline=None)
@given(data=st.data(), text=anything)
def test_any_text_and_stop_string(kind: str, folders: Load, data: st.DataObject, text: str) -> None:
    """A stream's entries never tell of bytes that a stop string then takes from the text."""
    tokenizer = folders(kind)
    ids = tokenizer.encode(text + ".", add_special_tokens=False)
    whole = tokenizer.decode(ids)
    at = data.draw(st.integers(0, max(0, len(whole) - 1)))
    stop = whole[at : at + data.draw(st.integers(1, 6))] or "."
    include = data.draw(st.booleans())
    how: dict[str, Any] = {"stop": [stop, "zz"], "include_stop_str_in_output": include}
    outputs = outputs_of(tokenizer, ids, output_kind=RequestOutputKind.DELTA, **how)
    told, said = b"", ""
    for output in outputs:
        told, said = told + joined(output), said + output.text
        assert len(output.logprobs or ()) == len(output.token_ids)
        assert said.encode().startswith(told)
    assert told.decode("utf-8", "replace") == said
    [last] = outputs_of(tokenizer, ids, output_kind=RequestOutputKind.FINAL_ONLY, **how)
    assert (last.text, joined(last), last.token_ids) == (
        said, told, [i for o in outputs for i in o.token_ids]
    )  # fmt: skip


@pytest.mark.parametrize("flat", [False, True])
@pytest.mark.parametrize("stop", ["😀", "bé", "é"])
def test_a_stop_string_cuts(stop: str, flat: bool, folders: Load) -> None:
    tokenizer = folders("byte-level")
    ids = tokenizer.encode("ab bé😀", add_special_tokens=False)
    outputs = outputs_of(
        tokenizer, ids, stop=[stop], output_kind=RequestOutputKind.DELTA, flat_logprobs=flat
    )
    text = "ab bé😀".partition(stop)[0]
    assert "".join(o.text for o in outputs) == text
    assert b"".join(map(joined, outputs)) == text.encode()
    assert outputs[-1].stop_reason == stop


def test_words_have_what_they_add(folders: Load) -> None:
    """The space before a word belongs to the word's token."""
    tokenizer = folders("word-piece")
    ids = tokenizer.encode("The quick brown fox", add_special_tokens=False)
    [completion] = outputs_of(tokenizer, ids, output_kind=RequestOutputKind.FINAL_ONLY)
    assert joined(completion) == completion.text.encode()
    assert b" " in joined(completion)


def test_bytes_among_words() -> None:
    """A vocabulary whose decoder is not known as one of bytes, but falls back to them."""

    class Odd:
        special_token_ids = frozenset[int]()
        bos_token_id = None
        strings = ("a", "<0xF0>", "<0x9F>", "<0x98>", "<0x80>", "<0xZZ>")

        def token_string(self, token_id: int) -> str:
            return self.strings[token_id]

        def decode(self, token_ids: list[int], **_: bool) -> str:
            found = b""
            for token in (self.strings[i] for i in token_ids):
                byte = token[:3] == "<0x" and "Z" not in token
                found += bytes([int(token[3:5], 16)]) if byte else token.encode()
            return found.decode("utf-8", "replace")

    tokenizer: Any = Odd()
    for ids, wanted in (
        ([0, 1, 2, 3, 4, 5], [b"a", b"\xf0", b"\x9f", b"\x98", b"\x80", b"<0xZZ>"]),
        ([1, 2, 0, 1], [b"\xf0", b"\x9f", b"a", b"\xf0"]),
    ):
        outputs = outputs_of(tokenizer, ids, output_kind=RequestOutputKind.DELTA)
        assert [piece for o in outputs for piece in pieces(o.logprobs)] == wanted
        assert b"".join(wanted).decode("utf-8", "replace") == "".join(o.text for o in outputs)


def test_without_text(folders: Load) -> None:
    """Nothing is detokenized: the tokens' own bytes, special ones included; without a tokenizer
    none are known."""
    tokenizer = folders("llama")
    special = tokenizer.encode("")
    [completion] = outputs_of(
        tokenizer, special, output_kind=RequestOutputKind.FINAL_ONLY, detokenize=False
    )
    assert (completion.text, joined(completion)) == ("", b"<s>")


@given(data=st.binary(max_size=20), count=st.integers(0, 25))
def test_bytes_of_characters(data: bytes, count: int) -> None:
    text = data.decode("utf-8", "replace")
    size = num_bytes(data, count)
    assert data[:size].decode("utf-8", "replace") == text[:count]
