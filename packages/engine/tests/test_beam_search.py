"""Beam search against brute force, and over an engine."""

from __future__ import annotations

import asyncio
import itertools
import math
import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_core.engine import TokenizedPrompt
from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import CompletionOutput, Logprob, PositionLogprobs, RequestOutput
from headrace_core.sampling.params import BeamSearchParams, SamplingParams
from headrace_engine.beam_search import BeamSearch, BeamSearchTask, check_beam_search
from headrace_engine.pooling.bounded import run_bounded
from headrace_testing.fakes.engine import fake_served_model

END = 0


def distribution(seed: int, tokens: Sequence[int], size: int) -> list[float]:
    """Log-probabilities of the next token: a function of everything before it."""
    rng = random.Random(f"{seed} {list(tokens)}")
    weights = [rng.random() ** 2 + 1e-3 for _ in range(size)]
    total = sum(weights)
    return [math.log(weight / total) for weight in weights]


def best(seed: int, tokens: Sequence[int], size: int, count: int) -> PositionLogprobs:
    values = distribution(seed, tokens, size)
    order = sorted(range(size), key=lambda token: -values[token])[:count]
    return {token: Logprob(values[token]) for token in order}


def run(search: BeamSearch, seed: int, size: int) -> Any:
    while not search.done:
        count = search.num_candidates
        search.advance([best(seed, tokens, size, count) for tokens in search.sequences()])
    return search.output()


def reference(
    prompt: list[int], params: BeamSearchParams, ends: set[int], seed: int, size: int
) -> list[tuple[float, list[int]]]:
    """The same rules over whole tables of scores, written as they are told."""
    width = params.beam_width
    live: list[tuple[float, list[int]]] = [(0.0, [])]
    done: list[tuple[float, list[int]]] = []
    for length in range(1, params.max_tokens + 1):
        table = [
            (total + value, [*tokens, token])
            for total, tokens in live
            for token, value in enumerate(distribution(seed, [*prompt, *tokens], size))
        ]
        table.sort(key=lambda item: -item[0])
        table = table[: width * max(2, 1 + len(ends))]
        last = length == params.max_tokens
        for total, tokens in table[:width]:
            if tokens[-1] in ends or last:
                done.append((total / length**params.length_penalty, tokens))
        done = sorted(done, key=lambda item: -item[0])[:width]
        live = [item for item in table if item[1][-1] not in ends][:width]
        if len(done) == width:
            goal = length
            if params.early_stopping == "never" and params.length_penalty > 0:
                goal = params.max_tokens
            hopeless = live[0][0] / goal**params.length_penalty <= done[-1][0]
            if hopeless or params.early_stopping is True or width == 1:
                break
    return done


@settings(max_examples=150, deadline=None)
@given(
    st.integers(0, 10**6),
    st.integers(1, 5),
    st.integers(1, 7),
    st.sampled_from([-0.5, 0.0, 0.6, 1.0, 2.0]),
    st.sampled_from([False, True, "never"]),
    st.sets(st.integers(0, 3), max_size=2),
)
def test_it_equals_the_rules_over_whole_tables(
    seed: int, width: int, length: int, penalty: float, stopping: Any, ends: set[int]
) -> None:
    size = 12
    params = BeamSearchParams(width, length, length_penalty=penalty, early_stopping=stopping)
    found = run(BeamSearch([5, 6], params, ends), seed, size)
    wanted = reference([5, 6], params, ends, seed, size)
    assert [one.output_token_ids for one in found.sequences] == [tokens for _, tokens in wanted]
    for one, (score, tokens) in zip(found.sequences, wanted):
        assert one.score == pytest.approx(score)
        assert one.tokens == [5, 6, *tokens]
        assert one.finish_reason == ("stop" if tokens[-1] in ends else "length")
        assert one.stop_reason == (tokens[-1] if tokens[-1] in ends else None)
        assert one.cum_logprob == pytest.approx(
            sum(
                position[token].logprob
                for token, position in zip(tokens, one.logprobs, strict=True)
            )
        )
        assert [next(iter(position)) for position in one.logprobs] == tokens


@pytest.mark.parametrize("seed", range(8))
def test_a_beam_as_wide_as_everything_is_an_exhaustive_search(seed: int) -> None:
    """Three tokens, four steps: every sequence is a beam, so the best is the best of all."""
    params = BeamSearchParams(81, 4, ignore_eos=True)
    found = run(BeamSearch([1], params, {END}), seed, 3)
    totals = {
        tokens: sum(
            distribution(seed, [1, *tokens[:i]], 3)[token] for i, token in enumerate(tokens)
        )
        for tokens in itertools.product(range(3), repeat=4)
    }
    ranked = sorted(totals, key=lambda tokens: -totals[tokens])
    assert [tuple(one.output_token_ids) for one in found.sequences] == ranked


@pytest.mark.parametrize("seed", range(8))
def test_width_one_is_greedy(seed: int) -> None:
    found = run(BeamSearch([3], BeamSearchParams(1, 9), {END}), seed, 9)
    tokens = [3]
    while len(tokens) < 10 and (len(tokens) == 1 or tokens[-1] != END):
        values = distribution(seed, tokens, 9)
        tokens.append(values.index(max(values)))
    assert [one.tokens for one in found.sequences] == [tokens]


def test_parameters_are_checked() -> None:
    with pytest.raises(TypeError):
        BeamSearchParams(max_tokens=3)  # type: ignore[call-arg]
    for field, value in (
        ("beam_width", 0), ("beam_width", 257), ("max_tokens", 0), ("temperature", -1.0),
        ("length_penalty", math.nan), ("early_stopping", "now"),
    ):  # fmt: skip
        with pytest.raises(RequestError, match=field):
            BeamSearchParams(**{"beam_width": 2, "max_tokens": 3, field: value})
    params = BeamSearchParams(11, 3)
    with pytest.raises(RequestError, match="max_logprobs = 20"):
        check_beam_search(params, fake_served_model())
    check_beam_search(params, fake_served_model(max_logprobs=22))
    with pytest.raises(UnsupportedFeature, match="raw_logits"):
        check_beam_search(BeamSearchParams(2, 3), fake_served_model(logprobs_mode="raw_logits"))


class TableEngine:
    """The part of an engine that beam search uses, over :func:`distribution`."""

    def __init__(self, seed: int = 0, hold: int = 10**9, fail: int = 10**9) -> None:
        self.model = fake_served_model(vocab_size=12, eos_token_ids=(END,), max_model_len=64)
        self.seed, self.hold, self.fail = seed, hold, fail
        self.seen: list[tuple[dict[str, Any], SamplingParams, str, int]] = []
        self.running: set[str] = set()
        self.most = 0

    async def tokenize(self, prompt: Any, **_: Any) -> TokenizedPrompt:
        given = prompt["prompt_token_ids"] if isinstance(prompt, dict) else prompt
        return TokenizedPrompt(list(given))

    async def detokenize(self, token_ids: Any, *, skip_special_tokens: bool = False) -> str:
        skipped = {END} if skip_special_tokens else set()
        return "".join(chr(ord("a") + i) for i in token_ids if i not in skipped)

    async def results(self, work: Any, at_once: int) -> list[Any]:
        found: dict[int, Any] = {}
        await run_bounded(work, at_once, found.__setitem__)
        return [found[index] for index in range(len(found))]

    async def complete(
        self, prompt: Any, params: SamplingParams, request_id: str, *, priority: int = 0, **_: Any
    ) -> RequestOutput:
        assert request_id not in self.running
        self.seen.append((prompt, params, request_id, priority))
        self.running.add(request_id)
        self.most = max(self.most, len(self.running))
        try:
            await asyncio.sleep(0)
            if len(self.seen) > self.hold:
                await asyncio.Event().wait()  # until it is cancelled
            if len(self.seen) > self.fail:
                raise GenerateError("failed as told")
            ids = prompt["prompt_token_ids"]
            entries = best(self.seed, ids, 12, params.logprobs or 0)
            token = next(iter(entries))
            completion = CompletionOutput(
                0, "", [token], logprobs=[entries], finish_reason="length"
            )
            return RequestOutput(request_id, None, ids, [completion], True, num_cached_tokens=2)
        finally:
            self.running.discard(request_id)


async def search(engine: Any, prompt: Any, params: BeamSearchParams, priority: int = 0) -> Any:
    task = BeamSearchTask(engine, prompt, params, "r", priority)
    await task.prepare()
    return await task.run()


def test_over_an_engine_all_beams_of_a_step_run_at_once() -> None:
    engine: Any = TableEngine(seed=4)
    params = BeamSearchParams(3, 6)
    prompt = {"prompt_token_ids": [5, 6], "cache_salt": "pepper"}
    output = asyncio.run(search(engine, prompt, params, priority=2))
    wanted = run(BeamSearch([5, 6], params, {END}), 4, 12)
    assert [s.tokens for s in output.sequences] == [s.tokens for s in wanted.sequences]
    assert engine.most == 3
    assert output.num_cached_tokens == 2
    ids = [request_id for _, _, request_id, _ in engine.seen]
    assert len(set(ids)) == len(ids)
    for given_prompt, step, request_id, priority in engine.seen:
        assert given_prompt["cache_salt"] == "pepper"
        assert (step.max_tokens, step.logprobs, priority) == (1, 6, 2)
        assert request_id.startswith("r-beam-")
    for one in output.sequences:
        shown = one.tokens[:-1] if one.finish_reason == "stop" else one.tokens
        letters = "".join(chr(ord("a") + token) for token in shown)
        assert (one.text, one.output_text) == (letters, letters[2:].replace("a", ""))


def test_the_end_token_is_shown_if_asked_for() -> None:
    engine: Any = TableEngine(seed=1)
    params = BeamSearchParams(2, 12, include_stop_str_in_output=True, early_stopping=True)
    output = asyncio.run(search(engine, [5], params))
    ended = [one for one in output.sequences if one.finish_reason == "stop"]
    assert ended
    for one in ended:
        assert one.text is not None
        assert one.output_text is not None
        assert one.text.endswith("a")
        assert one.output_text.endswith("a")


def test_a_cancelled_search_leaves_nothing_running() -> None:
    engine: Any = TableEngine(hold=1)

    async def cancel() -> None:
        task = asyncio.create_task(search(engine, [5], BeamSearchParams(4, 6)))
        while len(engine.running) < 4:
            await asyncio.sleep(0)
        task.cancel()
        with pytest.raises(asyncio.CancelledError):
            await task

    asyncio.run(cancel())
    assert engine.running == set()


def test_a_failed_step_ends_the_search_with_its_error() -> None:
    engine: Any = TableEngine(fail=2)
    with pytest.raises(GenerateError, match="failed as told"):
        asyncio.run(search(engine, [5], BeamSearchParams(4, 6)))
    assert engine.running == set()


def test_what_cannot_be_searched_is_refused_before_anything_runs() -> None:
    engine: Any = TableEngine()
    with pytest.raises(PromptTooLong, match="length is 64 tokens"):
        asyncio.run(search(engine, [5] * 60, BeamSearchParams(2, 6)))
    with pytest.raises(UnsupportedFeature, match="prompt_embeds"):
        asyncio.run(search(engine, {"prompt_embeds": b""}, BeamSearchParams(2, 6)))
    assert engine.seen == []
