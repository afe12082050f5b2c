"""Prompts that are embeddings give the bits that their tokens would give."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.errors import ConfigError
from headrace_core.model import INPUT_EMBEDS
from headrace_core.request import PromptEmbeds
from headrace_core.sampling.params import SamplingParams

PROMPT = [3, 1, 4, 1, 5, 9, 2, 6, 5, 3, 5]
PARAMS: dict[str, Any] = {"temperature": 0.7, "seed": 11, "logprobs": 37}


@pytest.fixture
def make(tiny: Any) -> Any:
    class EmbedsLM(tiny.LM):  # type: ignore[misc, name-defined]
        def input_vectors(self, batch: ForwardBatch) -> Tensor:
            return self.embed[batch.input_ids]

        def forward(self, batch: ForwardBatch) -> Tensor:
            self.given = getattr(self, "given", [])
            given = batch.extra.get(INPUT_EMBEDS)
            self.given.append(0 if given is None else len(given.rows))
            x = self.embed[batch.input_ids]
            if given is not None:
                x = x.index_copy(0, given.rows, given.values)
            x = x + self.place[batch.positions]
            for layer in self.layers:
                x = layer(x, batch)
            return x if batch.logits_rows is None else x[batch.logits_rows]

    return lambda **settings: tiny.Harness(EmbedsLM(), prompt_embeds=True, **settings)


def embedded(h: Any, name: str, prompt: list[int], **settings: Any) -> Any:
    """A request whose prompt is the tokens' vectors."""
    params = SamplingParams(**PARAMS, **settings.pop("params", {}))
    new = h.new(name, prompt, params, **settings)
    rows = h.model.embed[torch.tensor(prompt)].detach().contiguous()
    new.request.prompt_embeds = PromptEmbeds.of(
        "float32", len(prompt), rows.shape[1], rows.view(torch.uint8).numpy().tobytes()
    )
    new.token_ids[: len(prompt)] = [0] * len(prompt)
    return new


def result(h: Any, *args: Any, **kwargs: Any) -> Any:
    [found] = h.step(*args, **kwargs).requests.values()
    assert found.error is None
    return found.token_ids, found.logprobs


@pytest.mark.parametrize("chunks", [[11], [4, 7], [1, 1, 9], [10, 1]])
def test_bit_for_bit_as_the_tokens_in_any_chunks(make: Any, chunks: list[int]) -> None:
    h, plain = make(), make()
    params = SamplingParams(**PARAMS)
    got, wanted = [], []
    for step, count in enumerate([*chunks, 1, 1, 1]):
        first = {"first": chunks[0]}
        new = [embedded(h, "a", PROMPT, **first)] if step == 0 else []
        other = [plain.new("a", PROMPT, params, **first)] if step == 0 else []
        got.append(result(h, {"a": count}, new))
        wanted.append(result(plain, {"a": count}, other))
    assert got == wanted
    assert len(got[-1][0]) == 1
    assert h.model.given[-len(chunks) - 3 :] == [*chunks, 0, 0, 0]


def test_beside_requests_of_tokens_and_after_a_preemption(make: Any) -> None:
    h, plain = make(), make()
    params = SamplingParams(**PARAMS)

    def play(h: Any, one: Any, two: Any) -> list[Any]:
        """a and c are the same prompt; b's is of tokens; a is preempted after two tokens."""
        found = []
        b = h.new("b", [7, 8, 9], params)
        steps: list[Any] = [({"a": 11, "b": 3}, [one(h), b], ()), ({"b": 1, "a": 1}, (), ())]
        for scheduled, new, gone in steps:
            found.append(h.step(scheduled, new, gone).requests)
        tokens = [r["a"].token_ids[0] for r in found]
        found.append(h.step({"b": 1, "c": 11}, [two(h)], ["a"]).requests)
        again = one(h, output=tokens, first=8)
        found.append(h.step({"a": 8, "b": 1, "c": 1}, [again]).requests)
        found.append(h.step({"c": 1, "a": 5}, (), ["b"]).requests)
        found.append(h.step({"a": 1, "c": 1}).requests)
        return found

    got = play(
        h,
        lambda h, **s: embedded(h, "a", PROMPT, **s),
        lambda h: embedded(h, "c", PROMPT),
    )
    wanted = play(
        plain,
        lambda h, **s: h.new("a", PROMPT, params, **s),
        lambda h: h.new("c", PROMPT, params),
    )
    assert got == wanted
    assert all(one.error is None for step in got for one in step.values())


def test_a_row_that_is_used_again_has_its_own_prompt(make: Any) -> None:
    h = make()
    other = [1, 2, 3]
    result(h, {"a": 11}, [embedded(h, "a", PROMPT)])
    tokens = result(h, {"b": 3}, [h.new("b", other, SamplingParams(**PARAMS))], gone=["a"])
    assert h.model.given[-1] == 0
    plain = make()
    assert tokens == result(plain, {"b": 3}, [plain.new("b", other, SamplingParams(**PARAMS))])


def test_a_prompt_of_vectors_holds_no_tokens_that_were_seen(make: Any) -> None:
    """A repetition penalty works on the output alone: token 0 is no token of the prompt."""
    h, plain = make(), make()
    for penalty in (1.0, 1.9):
        name = f"a{penalty}"
        new = embedded(h, name, PROMPT, params={"repetition_penalty": penalty})
        got = result(h, {name: 11}, [new])
        wanted = result(plain, {name: 11}, [plain.new(name, PROMPT, SamplingParams(**PARAMS))])
        assert got[0] == wanted[0]


def test_steps_with_vectors_do_not_fit_a_captured_step(make: Any) -> None:
    h = make()
    new = embedded(h, "a", PROMPT)
    runner = h.worker._runner
    runner.requests.add(new)
    batch = runner.inputs.build({"a": 11}).batch
    assert batch.extra, "graphs refuse batches with extra inputs"


def test_a_model_that_takes_tokens_only_is_refused_at_start(tiny: Any) -> None:
    with pytest.raises(ConfigError, match="takes tokens only"):
        tiny.Harness(tiny.LM(), prompt_embeds=True)
