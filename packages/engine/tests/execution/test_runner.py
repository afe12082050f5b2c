from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.grammar import Constraint, GrammarSpec
from headrace_core.sampling.params import SamplingParams
from headrace_engine.worker.settings import SamplingSettings

PROMPTS = {
    "a": [3, 1, 4, 1, 5, 9, 2, 6, 5],
    "b": [7],
    "c": [1, 2, 3, 4, 5, 6, 7, 8, 9, 10, 11, 12, 13, 14, 15, 16, 17, 18, 19, 20, 21],
    "d": [30, 31, 32, 33],
}
WINDOWS: dict[str, tuple[int | None, ...]] = {
    "full": (None, None),
    "sliding": (6, 6),
    "hybrid": (None, 6, 6, None),
    "uneven": (None, 5, None),
}


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_a_prompt_and_its_decoding_equal_the_dense_model(harness: Any, windows: Any) -> None:
    h = harness(windows)
    for name, prompt in PROMPTS.items():
        assert h.generate(h.new(name, prompt), 12) == h.model.dense_greedy(prompt, 12)


@pytest.mark.parametrize("windows", WINDOWS.values(), ids=WINDOWS)
def test_chunked_and_mixed_steps_equal_the_dense_model(harness: Any, windows: Any) -> None:
    """c arrives in chunks while a and b decode; d joins later; b leaves and its row is reused."""
    h = harness(windows)
    got: dict[str, list[int]] = {name: [] for name in PROMPTS}

    def run(scheduled: dict[str, int], new: Any = (), gone: Any = ()) -> None:
        result = h.step(scheduled, new, gone)
        assert list(result.requests) == list(scheduled)
        for name, r in result.requests.items():
            assert r.error is None
            got[name] += r.token_ids

    run({"a": 9, "b": 1}, [h.new("a", PROMPTS["a"]), h.new("b", PROMPTS["b"])])
    run({"a": 1, "b": 1, "c": 5}, [h.new("c", PROMPTS["c"], first=5)])
    run({"c": 7, "a": 1, "b": 1})
    assert got["c"] == []
    run({"a": 1, "c": 8}, gone=["b"])
    assert got["c"] == []
    run({"c": 1, "d": 4, "a": 1}, [h.new("d", PROMPTS["d"])])
    run({"c": 1, "d": 1, "a": 1})
    for name, tokens in got.items():
        assert tokens == h.model.dense_greedy(PROMPTS[name], len(tokens)), name
    assert [len(got[name]) for name in "abcd"] == [6, 3, 2, 2]


def test_a_physical_cache_order_of_the_backend_s_own(harness: Any, tiny: Any) -> None:
    h = harness(backend=tiny.BlocksFirst)
    cache = h.model.layers[0].cache
    assert cache.shape == (2, 400, tiny.BLOCK_SIZE, 2, 4)
    assert cache.stride(0) < cache.stride(1)
    assert h.generate(h.new("a", PROMPTS["a"]), 6) == h.model.dense_greedy(PROMPTS["a"], 6)


def test_a_cached_prefix_is_not_computed_again(harness: Any) -> None:
    h = harness()
    prompt = PROMPTS["c"]
    first = h.new("c", prompt)
    want = h.generate(first, 4)
    again = h.new("again", prompt)
    shared = first.block_ids[0][:4]
    again.block_ids = (shared + again.block_ids[0][4:],)
    again.num_computed_tokens = 16
    h.model.forwards.clear()
    h.computed["again"] = 16
    result = h.step({"again": len(prompt) - 16}, [again])
    assert h.model.forwards == [len(prompt) - 16]
    assert result.requests["again"].token_ids == want[:1]


def test_a_preempted_request_goes_on_as_if_nothing_had_happened(harness: Any) -> None:
    h = harness()
    want = h.model.dense_greedy(PROMPTS["a"], 10)
    first = h.generate(h.new("a", PROMPTS["a"]), 4)
    resumed = h.new("a", PROMPTS["a"], output=first, first=6)
    assert h.step({"a": 6}, [resumed]).requests["a"].token_ids == []
    tokens = list(first)
    tokens += h.step({"a": 7}).requests["a"].token_ids
    while len(tokens) < 10:
        tokens += h.step({"a": 1}).requests["a"].token_ids
    assert tokens == want


def test_gone_then_new_then_blocks(harness: Any) -> None:
    """One step may say that a request is gone and bring it again."""
    h = harness()
    tokens = h.step({"a": 9}, [h.new("a", PROMPTS["a"])]).requests["a"].token_ids
    again = h.new("a", PROMPTS["a"], output=tokens)
    tokens += h.step({"a": 10}, [again], gone=["a"]).requests["a"].token_ids
    assert tokens == h.model.dense_greedy(PROMPTS["a"], 2)
    assert len(h.worker._runner.requests) == 1


def test_only_wanted_rows_get_logits(harness: Any) -> None:
    h = harness()
    h.model.logit_rows.clear()
    h.step({"a": 4, "c": 21}, [h.new("a", PROMPTS["a"], first=4), h.new("c", PROMPTS["c"])])
    h.step({"a": 3})
    h.step({"a": 2, "c": 1})
    assert h.model.logit_rows == [1, 2]


def test_rows_and_tables_grow(harness: Any) -> None:
    """More requests, tokens and blocks than the tables begin with."""
    h = harness()
    names = [f"r{i}" for i in range(40)]
    prompts = {name: [(7 * i + j) % 37 for j in range(3)] for i, name in enumerate(names)}
    got: dict[str, list[int]] = {}
    for name in names:
        got[name] = h.step({name: 3}, [h.new(name, prompts[name])]).requests[name].token_ids
    for _ in range(3):
        for name, r in h.step(dict.fromkeys(names, 1)).requests.items():
            got[name] += r.token_ids
    for name in names:
        assert got[name] == h.model.dense_greedy(prompts[name], 4)


@pytest.mark.req("REL-01")
class TestOneRequestFailsAlone:
    def run_with_bad_one(
        self, h: Any, scheduled: dict[str, int], new: Any, *, computed: bool = True
    ) -> str:
        """'good' must decode on as the dense model does; returns the error of 'bad'."""
        tokens: list[int] = (
            h.step({"good": 9}, [h.new("good", PROMPTS["a"])]).requests["good"].token_ids
        )
        result = h.step({"good": 1, **scheduled}, new)
        tokens += result.requests["good"].token_ids
        tokens += h.step({"good": 1}).requests["good"].token_ids
        assert tokens == h.model.dense_greedy(PROMPTS["a"], 3)
        bad = result.requests["bad"]
        assert bad.token_ids == []
        assert bad.not_computed is not computed
        reason = bad.error or bad.dead_end
        assert reason is not None
        return str(reason)

    def test_nan_logits(self, harness: Any) -> None:
        h = harness(poison=30)
        error = self.run_with_bad_one(h, {"bad": 2}, [h.new("bad", [1, 30])])
        assert "not finite (nan)" in error
        # Steps that were scheduled before the failure was known fail too, and nothing else.
        later = h.step({"bad": 1, "good": 1})
        assert "not finite" in str(later.requests["bad"].error)
        assert later.requests["good"].error is None
        # The same id may come back.
        h.computed["bad"] = 0
        again = h.step({"bad": 2}, [h.new("bad", [1, 2])], gone=["bad"])
        assert again.requests["bad"].token_ids == h.model.dense_greedy([1, 2], 1)

    def test_nan_prompt_logprobs(self, harness: Any) -> None:
        h = harness(poison=30)
        params = SamplingParams(temperature=0.0, prompt_logprobs=1)
        new = h.new("bad", [1, 30, 2, 3], params, first=3)
        assert "prompt are not finite" in self.run_with_bad_one(h, {"bad": 3}, [new])
        assert "prompt are not finite" in str(h.step({"bad": 1}).requests["bad"].error)

    def test_an_unknown_id(self, harness: Any) -> None:
        assert "not held" in self.run_with_bad_one(harness(), {"bad": 1}, [], computed=False)

    def test_more_tokens_than_are_known(self, harness: Any) -> None:
        h = harness()
        error = self.run_with_bad_one(h, {"bad": 3}, [h.new("bad", [1, 2])], computed=False)
        assert "3 tokens were scheduled after 0 computed ones, but 2 tokens are known" in error

    def test_fewer_blocks_than_tokens(self, harness: Any) -> None:
        h = harness()
        error = self.run_with_bad_one(
            h, {"bad": 9}, [h.new("bad", [1] * 9, first=4)], computed=False
        )
        assert "9 tokens do not fit" in error

    def test_a_token_outside_the_vocabulary(self, harness: Any) -> None:
        h = harness()
        error = self.run_with_bad_one(h, {"bad": 2}, [h.new("bad", [1, 37])], computed=False)
        assert "token id 37 is outside the vocabulary of 37" in error

    def test_tables_for_another_number_of_groups(self, harness: Any) -> None:
        h = harness()
        new = h.new("bad", [1, 2])
        new.block_ids = ([1], [2])
        assert "2 cache groups" in self.run_with_bad_one(h, {"bad": 2}, [new], computed=False)

    def test_no_possible_token(self, harness: Any) -> None:
        h = harness()
        params = SamplingParams(temperature=0.0, allowed_token_ids=[5])
        new = h.new("bad", [1, 2], params, bad_words=[[5]])
        reason = self.run_with_bad_one(h, {"bad": 2}, [new])
        assert reason == "no token is possible with allowed_token_ids and bad_words"

    def test_its_tokens_are_computed(self, harness: Any) -> None:
        """Others may have found them in the cache before anybody knew that it fails."""
        h = harness()
        prompt = PROMPTS["c"]
        bad, good = h.new("bad", prompt), h.new("good", prompt)
        # This worker knows no grammars.
        bad.request.constraint = Constraint(GrammarSpec("none", "regex", "a"), ())
        good.block_ids = (bad.block_ids[0][:4] + good.block_ids[0][4:],)
        good.num_computed_tokens = h.computed["good"] = 16
        result = h.step({"bad": len(prompt), "good": len(prompt) - 16}, [bad, good])
        assert "without it" in str(result.requests["bad"].error)
        assert result.requests["bad"].token_ids == []
        assert result.requests["good"].token_ids == h.model.dense_greedy(prompt, 1)

    def test_a_step_of_bad_requests_only(self, harness: Any) -> None:
        h = harness()
        result = h.step({"x": 1, "y": 2})
        assert all(r.error for r in result.requests.values())
        assert h.model.forwards == []


def test_results_do_not_depend_on_the_batch_for_random_requests(harness: Any) -> None:
    params = {
        "a": SamplingParams(temperature=0.9, top_p=0.8, seed=1),
        "b": SamplingParams(temperature=1.3, top_k=7, seed=1),
        "c": SamplingParams(temperature=1.0, min_p=0.05, seed=2, presence_penalty=1.0),
        "d": SamplingParams(temperature=1.0),
    }
    h = harness(sampling=SamplingSettings(seed=11))
    alone = {n: h.generate(h.new(n, PROMPTS[n], params[n]), 8) for n in PROMPTS}
    together: dict[str, list[int]] = {name: [] for name in PROMPTS}
    news = [h.new(n, PROMPTS[n], params[n]) for n in PROMPTS]
    for name, r in h.step({n: len(p) for n, p in PROMPTS.items()}, news).requests.items():
        together[name] += r.token_ids
    for _ in range(7):
        for name, r in h.step(dict.fromkeys(reversed(PROMPTS), 1)).requests.items():
            together[name] += r.token_ids
    assert together == alone


def test_seeded_output_survives_preemption(harness: Any) -> None:
    params = SamplingParams(temperature=1.2, seed=5, frequency_penalty=0.5, repetition_penalty=1.2)
    h = harness()
    want = h.generate(h.new("x", PROMPTS["a"], params), 10)
    assert want != h.generate(h.new("y", PROMPTS["a"], SamplingParams(seed=6)), 10)
    tokens = h.generate(h.new("x", PROMPTS["a"], params), 3)
    tokens += (
        h.step({"x": 12}, [h.new("x", PROMPTS["a"], params, output=tokens)]).requests["x"].token_ids
    )
    while len(tokens) < 10:
        tokens += h.step({"x": 1}).requests["x"].token_ids
    assert tokens == want


@pytest.mark.parametrize(
    "mode", ["raw_logprobs", "raw_logits", "processed_logprobs", "processed_logits"]
)
def test_logprobs_modes(harness: Any, mode: str) -> None:
    h = harness(sampling=SamplingSettings(logprobs_mode=mode))
    params = SamplingParams(temperature=0.5, seed=3, logprobs=4, top_k=10)
    result = h.step({"a": 9}, [h.new("a", PROMPTS["a"], params)]).requests["a"]
    logits = h.model.dense_logits(PROMPTS["a"])[-1]
    if mode.startswith("processed"):
        logits = logits / 0.5
        logits[logits < logits.topk(10).values[-1]] = -torch.inf
    values = logits.log_softmax(-1) if mode.endswith("logprobs") else logits
    (entry,) = result.logprobs
    assert entry.token_ids[0] == result.token_ids[0]
    torch.testing.assert_close(torch.tensor(entry.logprobs), values[entry.token_ids])
    top = values.topk(4).indices.tolist()
    assert entry.token_ids[1:] == [t for t in top if t != entry.token_ids[0]]
    order = values.argsort(descending=True).tolist()
    assert entry.ranks == [order.index(t) + 1 for t in entry.token_ids]


@pytest.mark.parametrize("chunks", [[21], [1, 20], [5, 7, 8, 1], [20, 1]], ids=str)
@pytest.mark.parametrize("wanted", [0, 3, -1])
def test_prompt_logprobs_of_chunked_prompts(harness: Any, chunks: list[int], wanted: int) -> None:
    h = harness()
    prompt = PROMPTS["c"]
    params = SamplingParams(temperature=0.0, prompt_logprobs=wanted, logprobs=1)
    new = [h.new("c", prompt, params, first=chunks[0])]
    h.step({"a": 9}, [h.new("a", PROMPTS["a"])])
    entries = []
    for count in chunks:
        result = h.step({"a": 1, "c": count}, new)
        entries += result.requests["c"].prompt_logprobs or []
        assert result.requests["a"].prompt_logprobs is None
        new = []
    assert len(entries) == len(prompt) - 1
    values = h.model.dense_logits(prompt).log_softmax(-1)
    for position, entry in enumerate(entries):
        assert entry.token_ids[0] == prompt[position + 1]
        got = torch.tensor(entry.logprobs)
        torch.testing.assert_close(got, values[position, entry.token_ids], atol=1e-4, rtol=1e-4)
        own = values[position, prompt[position + 1]]
        assert entry.ranks[0] == 1 + int((values[position] > own + 1e-5).sum())
        assert len(entry.token_ids) in ({37} if wanted < 0 else {wanted, wanted + 1})
    # Decoding goes on, and prompt log-probabilities are over.
    after = h.step({"c": 1}).requests["c"]
    assert after.prompt_logprobs is None
    assert after.logprobs is not None
    assert result.requests["c"].token_ids + after.token_ids == h.model.dense_greedy(prompt, 2)


def test_a_resumed_request_repeats_its_prompt_logprobs_only(harness: Any) -> None:
    h = harness()
    params = SamplingParams(temperature=0.0, prompt_logprobs=0)
    result = h.step({"d": 6}, [h.new("d", PROMPTS["d"], params, output=[1, 2])])
    entries = result.requests["d"].prompt_logprobs
    assert entries is not None
    assert [entry.token_ids for entry in entries] == [[31], [32], [33]]
