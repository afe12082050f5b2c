"""Adapters in a worker's steps: what is placed, which slots rows choose, which recording runs."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from test_capture import FakeGraph
from torch import Tensor

from headrace_core.errors import UnsupportedModel
from headrace_core.lora import LoRARequest
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import ScheduledStep
from headrace_engine.execution.capture import Capture
from headrace_engine.lora.store import AdapterStore
from headrace_engine.worker.settings import AdapterSettings, WeightSettings

NUM_SLOTS = 2
PROMPT = [1, 2, 3, 4, 5]


class ShiftSlots:
    """Slots whose adapters make token 7 the likeliest, or the unlikeliest if their path is an odd number."""

    num_slots, num_bytes, runs_eagerly = NUM_SLOTS, 1 << 20, False

    def __init__(self) -> None:
        self.held = [0.0] * NUM_SLOTS
        self.tokens: list[int] | None = None
        self.logits: list[int] | None = None

    def read(self, path: str) -> Any:
        number = -1000.0 if int(path) % 2 else 1000.0
        return SimpleNamespace(digest=path, changes_media=False, number=number)

    def place(self, slot: int, adapter: Any) -> None:
        self.held[slot] = adapter.number

    def choose_media(self, slot: int | None) -> None:
        raise AssertionError("there are no media")

    def choose(self, tokens: Tensor | None, logits: Tensor | None = None) -> None:
        self.tokens = None if tokens is None else tokens.tolist()
        self.logits = None if logits is None else logits.tolist()

    def shift(self, rows: int) -> Tensor:
        """[rows]; by the rows' slots, which must have been chosen for so many."""
        if self.logits is None:
            return torch.zeros(rows)
        assert len(self.logits) >= rows
        return torch.tensor([0.0 if s < 0 else self.held[s] for s in self.logits[:rows]])


def adapter(number: int) -> LoRARequest:
    return LoRARequest(f"adapter {number}", number, str(number))


class Shifted:
    """A worker whose model adds what rows' slots hold, and the store behind it."""

    def __init__(self, tiny: Any, **settings: Any) -> None:
        self.made: list[ShiftSlots] = []
        self.store = AdapterStore(NUM_SLOTS)
        model = tiny.LM()
        compute, forward = model.compute_logits, model.forward

        def compute_logits(hidden: Tensor) -> Tensor:
            logits = compute(hidden)
            logits[:, 7] += self.slots.shift(len(logits))
            return logits

        def checked(batch: Any) -> Tensor:
            assert self.slots.tokens is None or len(self.slots.tokens) >= batch.num_tokens
            return forward(batch)

        model.compute_logits, model.forward = compute_logits, checked
        self.harness = tiny.Harness(
            model, adapters=AdapterSettings(make_slots=self._make, store=self.store), **settings
        )

    def _make(self) -> ShiftSlots:
        self.made.append(ShiftSlots())
        return self.made[-1]

    @property
    def slots(self) -> ShiftSlots:
        return self.made[-1]

    def new(self, name: str, number: int = 0, params: SamplingParams | None = None) -> Any:
        new = self.harness.new(name, PROMPT, params)
        if number:
            self.store.add(adapter(number)).first_read.result(10)
            new.request.lora_request = adapter(number)
        return new

    def step(self, scheduled: Any, new: Any = (), placed: Any = (), gone: Any = ()) -> Any:
        execute = self.harness.worker.execute

        def placing(step: ScheduledStep) -> Any:
            placed_adapters = {slot: adapter(number) for slot, number in dict(placed).items()}
            return execute(dataclasses.replace(step, placed_adapters=placed_adapters))

        self.harness.worker.execute = placing
        try:
            return self.harness.step(scheduled, new, gone).requests
        finally:
            self.harness.worker.execute = execute


@pytest.fixture
def shifted(tiny: Any) -> Shifted:
    return Shifted(tiny)


def test_each_row_has_its_own_adapter(shifted: Shifted) -> None:
    news = [shifted.new("a", 20), shifted.new("b"), shifted.new("c", 30)]
    found = shifted.step(dict.fromkeys("abc", 5), news, {0: 20, 1: 30})
    assert [found[name].token_ids == [7] for name in "abc"] == [True, False, True]
    assert shifted.slots.tokens == [0] * 5 + [-1] * 5 + [1] * 5
    assert shifted.slots.logits == [0, -1, 1]
    shifted.step(dict.fromkeys("ca", 1))
    assert (shifted.slots.tokens, shifted.slots.logits) == ([1, 0], [1, 0])
    shifted.step({"b": 1})
    assert shifted.slots.tokens is None


def test_a_slot_has_another_adapter_later(shifted: Shifted) -> None:
    shifted.step({"a": 5}, [shifted.new("a", 20)], {0: 20})
    shifted.step({"b": 5}, [shifted.new("b", 21)], {0: 21}, gone=["a"])
    assert shifted.slots.held == [-1000.0, 0.0]
    assert shifted.step({"b": 1})["b"].token_ids != [7]


def test_a_request_whose_adapter_is_in_no_slot_fails_alone(shifted: Shifted) -> None:
    found = shifted.step({"a": 5, "b": 5}, [shifted.new("a", 20), shifted.new("b")])
    assert "adapter 'adapter 20' is in no slot" in found["a"].error
    assert found["b"].token_ids


def test_an_adapter_that_went_meanwhile_harms_nobody_else(shifted: Shifted) -> None:
    """It was removed, and the request that it was placed for aborted, while their step was on its way."""
    shifted.step({"c": 5}, [shifted.new("c", 30)], {0: 30})
    news = [shifted.new("a", 20), shifted.new("b")]
    shifted.store.remove(20)
    found = shifted.step({"a": 5, "b": 5}, news, {0: 20}, gone=["c"])
    assert found["b"].token_ids
    assert found["b"].error is None
    assert "adapter 'adapter 20' is in no slot" in found["a"].error


def test_prompt_logprobs_are_of_the_requests_adapter(shifted: Shifted) -> None:
    params = SamplingParams(temperature=0, max_tokens=2, prompt_logprobs=36)
    news = [shifted.new("a", 20, params), shifted.new("b", 0, params), shifted.new("c", 30)]
    found = shifted.step(dict.fromkeys("abc", 5), news, {0: 20, 1: 30})
    ranks = {
        name: [entry.token_ids[1] == 7 for entry in found[name].prompt_logprobs] for name in "ab"
    }
    assert ranks == {"a": [True] * 4, "b": [False] * 4}
    assert [found[name].token_ids == [7] for name in "abc"] == [True, False, True]


def test_steps_with_adapters_have_a_recording_of_their_own(tiny: Any) -> None:
    graphs: list[FakeGraph] = []

    def make() -> FakeGraph:
        graphs.append(FakeGraph())
        return graphs[-1]

    shifted = Shifted(tiny, capture=Capture(lambda: make, (8,)))
    shifted.harness.worker.warm_up()
    base, adapted = graphs
    shifted.step({"a": 5}, [shifted.new("a", 20)], {0: 20})
    shifted.step({"b": 5}, [shifted.new("b")])
    assert shifted.step({"a": 1, "b": 1})["a"].token_ids == [7]
    shifted.step({"b": 1})
    assert (adapted.replayed, base.replayed) == ([(5, 1), (2, 2)], [(5, 1), (1, 1)])
    shifted.slots.runs_eagerly = True
    assert shifted.step({"a": 1, "b": 1})["a"].token_ids == [7]
    assert len(adapted.replayed) == 2


def test_slots_count_as_weights_and_are_warmed_up(tiny: Any) -> None:
    shifted = Shifted(tiny)
    worker = shifted.harness.worker
    assert worker.report()["weights_bytes"] >= (1 << 20) + 4 * tiny.VOCAB * 16
    seen: list[Any] = []
    choose = shifted.slots.choose
    shifted.slots.choose = lambda tokens, logits=None: (
        seen.append(None if tokens is None else set(tokens.tolist())),
        choose(tokens, logits),
    )[1]
    worker.warm_up()
    assert seen[0] == {0}
    assert seen[-1] is None


def test_weights_read_again_have_empty_slots(tiny: Any) -> None:
    weights = WeightSettings(rebuild_model=lambda changes, slots: shifted.harness.model)
    shifted = Shifted(tiny, weights=weights)
    shifted.step({"a": 5}, [shifted.new("a", 20)], {0: 20})
    shifted.step({}, gone=["a"])
    known = shifted.store.find(20)
    assert known is not None
    shifted.harness.worker.reload_weights()
    assert (shifted.slots.held, known.content) == ([0.0, 0.0], None)
    while not shifted.store.ready(known):
        known.reading and known.reading.exception(10)
    assert shifted.step({"a": 5}, [shifted.new("a", 20)], {1: 20})["a"].token_ids == [7]


def test_a_model_that_takes_none_is_refused_at_the_start(tiny: Any) -> None:
    def refuse(slots: Any) -> Any:
        raise UnsupportedModel("TinyLM takes no low-rank adapters (LoRA)")

    worker = Shifted(tiny).harness.worker
    worker._build_model = refuse
    with pytest.raises(UnsupportedModel, match="TinyLM takes no low-rank adapters"):
        worker.load()
