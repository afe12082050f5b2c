"""The token that ends an output: its text is never sought in for stop strings, and nobody's by accident."""

from __future__ import annotations

from typing import Any

import pytest
from trained_tokenizers import Load

from headrace_core.output import CompletionOutput
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_core.step import TokenLogprobs
from headrace_core.text import Tokenizer
from headrace_engine.input_processing.prepared import PreparedRequest
from headrace_engine.messages import CoreOutput
from headrace_engine.output_processing.detokenizer import own_bytes, token_texts
from headrace_engine.output_processing.output import StreamState

END = "<|end|>"
KINDS = ("byte-level", "llama", "word-piece")


def outputs_of(
    tokenizer: Tokenizer, steps: list[list[int]], *, logprobs: bool, **how: Any
) -> list[CompletionOutput]:
    """A completion of these steps' tokens, which the last token ends; every output that is ready after
    a step."""
    params = SamplingParams(max_tokens=99, logprobs=0 if logprobs else None, **how)
    core = CoreRequest("r#0", [0], params, frozenset(), 9, 0.0)
    prompt = [tokenizer.bos_token_id or 0]
    request = PreparedRequest("r", None, prompt, params, [core], 0.0)
    state = StreamState(request, tokenizer, 1, token_texts(tokenizer), own_bytes(tokenizer))
    found = []
    for number, ids in enumerate(steps):
        entries = [TokenLogprobs([i], [-1.0], [1]) for i in ids] if logprobs else None
        output = CoreOutput("r#0", ids, entries)
        if number == len(steps) - 1:
            output.finish_reason, output.stop_token_id = "stop", ids[-1]
        state.update(output, 0.0)
        if (taken := state.take()) is not None:
            found += taken.outputs
    return found


def joined(outputs: list[CompletionOutput]) -> bytes:
    """Bytes of all entries' chosen tokens."""
    entries = [next(iter((e or {}).values())) for o in outputs for e in o.logprobs or []]
    return b"".join(entry.token_bytes or b"" for entry in entries)


def steps_of(ids: list[int], cut: str) -> list[list[int]]:
    return [[i] for i in ids] if cut == "one by one" else [ids]


@pytest.mark.parametrize("cut", ["one by one", "at once"])
@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("stop", ["|", "<", END, "end", "g<"])
def test_no_stop_string_is_found_in_it(
    folders: Load, kind: str, stop: str, logprobs: bool, cut: str
) -> None:
    tokenizer = folders(kind)
    ids = tokenizer.encode("lazy dog", add_special_tokens=False)
    [end] = tokenizer.encode(END, add_special_tokens=False)
    for skip in (True, False):
        how: dict[str, Any] = {"stop": [stop], "skip_special_tokens": skip, "logprobs": logprobs}
        plain = outputs_of(tokenizer, [[*ids, end]], logprobs=logprobs, skip_special_tokens=skip)[0]
        deltas = outputs_of(
            tokenizer, steps_of([*ids, end], cut), output_kind=RequestOutputKind.DELTA, **how
        )
        whole = outputs_of(
            tokenizer, steps_of([*ids, end], cut), output_kind=RequestOutputKind.FINAL_ONLY, **how
        )[-1]
        assert whole.text == plain.text == "".join(o.text for o in deltas)
        assert whole.text.replace(" ", "") == "lazydog" + END * (not skip)
        for last in (whole, deltas[-1]):
            assert (last.finish_reason, last.stop_reason) == ("stop", None)
        assert [i for o in deltas for i in o.token_ids] == whole.token_ids == [*ids, end]
        if logprobs:
            assert joined([whole]) == joined(deltas) == whole.text.encode()


@pytest.mark.parametrize("logprobs", [False, True])
def test_what_is_held_back_comes_before_it(folders: Load, logprobs: bool) -> None:
    """Text that a stop string might have begun with, and half a character."""
    tokenizer = folders("byte-level")
    [end] = tokenizer.encode(END, add_special_tokens=False)
    ids = tokenizer.encode("ab😀", add_special_tokens=False)
    half = ids[: len(tokenizer.encode("ab", add_special_tokens=False)) + 1]
    for skip in (True, False):
        outputs = outputs_of(
            tokenizer, steps_of([*half, end], "one by one"), logprobs=logprobs, stop=["b�" + END],
            skip_special_tokens=skip, output_kind=RequestOutputKind.DELTA,
        )  # fmt: skip
        text = "".join(o.text for o in outputs)
        assert text == "ab�" + END * (not skip)
        assert outputs[-1].stop_reason is None
        if logprobs:
            assert joined(outputs).decode("utf-8", "replace") == text


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_a_named_token_that_is_a_word_stays(folders: Load, kind: str, logprobs: bool) -> None:
    """As the specification has it: named tokens stay in the text, unless they are special."""
    tokenizer = folders(kind)
    *ids, last = tokenizer.encode("lazy dog", add_special_tokens=False)
    [output] = outputs_of(
        tokenizer, [[*ids, last]], logprobs=logprobs, stop_token_ids=[last], stop=["g"],
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    assert output.text.replace(" ", "") == "lazydog"
    assert (output.finish_reason, output.stop_reason) == ("stop", last)
    if logprobs:
        assert joined([output]) == output.text.encode()


@pytest.mark.parametrize("logprobs", [False, True])
@pytest.mark.parametrize("kind", KINDS)
def test_an_end_token_that_is_not_special_is_left_out_too(
    folders: Load, kind: str, logprobs: bool
) -> None:
    """A model may end with a token that its vocabulary does not call special."""
    tokenizer = folders(kind)
    *ids, last = tokenizer.encode("lazy dog x", add_special_tokens=False)
    for how, shown in (
        ({}, False), ({"skip_special_tokens": False}, True),
        ({"include_stop_str_in_output": True}, True),
    ):  # fmt: skip
        [output] = outputs_of(
            tokenizer, [[*ids, last]], logprobs=logprobs,
            output_kind=RequestOutputKind.FINAL_ONLY, **how,
        )  # fmt: skip
        assert output.text.replace(" ", "") == "lazydog" + "x" * shown
        if logprobs:
            assert joined([output]) == output.text.encode()


def test_a_stop_string_before_it_still_counts(folders: Load) -> None:
    tokenizer = folders("byte-level")
    [end] = tokenizer.encode(END, add_special_tokens=False)
    ids = tokenizer.encode("lazy dog", add_special_tokens=False)
    [output] = outputs_of(
        tokenizer, [[*ids, end]], logprobs=True, stop=["do"], skip_special_tokens=False,
        output_kind=RequestOutputKind.FINAL_ONLY,
    )  # fmt: skip
    assert (output.text, output.stop_reason) == ("lazy ", "do")
    assert joined([output]) == b"lazy "
