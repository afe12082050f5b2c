"""Users' logits processors in a worker: who they see, when they are called, what they change."""

from __future__ import annotations

import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, EngineError
from headrace_core.sampling.logits_processor import (
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    process_dict_updates,
)
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import EngineConfig
from headrace_engine.logits_adapter import AdapterLogitsProcessor
from headrace_engine.sampling.processors import make_processors
from headrace_engine.worker.settings import SamplingSettings

PROMPT = [3, 1, 4, 1, 5]


class Target(LogitsProcessor):
    """Only ``extra_args["target"]`` is possible: the vectorised form."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.targets: dict[int, int] = {}

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(self.targets, batch_update, lambda p, _, __: target_of(p))

    def apply(self, logits: Tensor) -> Tensor:
        if not self.targets:
            return logits
        slots, tokens = list(self.targets), list(self.targets.values())
        kept = logits[slots, tokens]
        logits[slots] = -torch.inf
        logits[slots, tokens] = kept
        return logits


class AdaptedTarget(AdapterLogitsProcessor):
    """The same for one request at a time."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: SamplingParams) -> Any:
        target = target_of(params)
        if target is None:
            return None

        def force(output: list[int], row: Tensor) -> Tensor:
            forced = torch.full_like(row, -torch.inf)
            forced[target] = row[target]
            return forced

        return force


def target_of(params: SamplingParams) -> int | None:
    return (params.extra_args or {}).get("target")


class Recorder(LogitsProcessor):
    """Changes nothing; replays the updates and remembers what it was given."""

    invariant = False

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.slots: dict[int, tuple[str, list[int], list[int]]] = {}
        self.num_updates = self.num_applied = 0
        self.rows: list[int] = []

    def is_argmax_invariant(self) -> bool:
        return self.invariant

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        self.num_updates += 1
        if batch_update is None:
            return
        for slot in batch_update.removed:
            del self.slots[slot]
        for slot, params, prompt, output in batch_update.added:
            assert prompt is not None
            self.slots[slot] = ((params.extra_args or {})["name"], prompt, output)
        for source, target, kind in batch_update.moved:
            assert kind is MoveDirectionality.UNIDIRECTIONAL
            self.slots[target] = self.slots.pop(source)
        assert sorted(self.slots) == list(range(batch_update.batch_size))

    def apply(self, logits: Tensor) -> Tensor:
        self.num_applied += 1
        assert logits.dtype == torch.float32
        assert logits.shape[0] == len(self.slots)
        return logits


class InvariantRecorder(Recorder):
    invariant = True


def made(*classes: type[LogitsProcessor]) -> tuple[list[Any], Callable[..., Any]]:
    processors: list[Any] = [cls(EngineConfig(), torch.device("cpu"), False) for cls in classes]
    return processors, lambda device: processors


def greedy(**extra: Any) -> SamplingParams:
    return SamplingParams(temperature=0.0, extra_args=extra or None)


@pytest.mark.parametrize("cls", [Target, AdaptedTarget])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_a_forced_token_and_untouched_neighbours(
    harness: Any, cls: type[LogitsProcessor], temperature: float
) -> None:
    """Four requests; the first and third have targets, one of which is token 0."""
    settings: dict[str, Any] = {"temperature": temperature, "seed": 5, "logprobs": 3}
    targets = {"a": 0, "c": 7}

    def run(h: Any, with_targets: bool) -> dict[str, list[Any]]:
        got: dict[str, list[Any]] = {name: [] for name in "abcd"}
        new = []
        for i, name in enumerate("abcd"):
            extra = {"target": targets[name]} if with_targets and name in targets else None
            params = SamplingParams(**settings, extra_args=extra)
            new.append(h.new(name, [*PROMPT, i], params, first=6))
        for step in range(6):
            counts = dict.fromkeys("abcd", 6 if step == 0 else 1)
            for name, result in h.step(counts, new if step == 0 else ()).requests.items():
                assert result.error is None
                got[name].append((result.token_ids, result.logprobs))
        return got

    processors, make = made(cls)
    alone = run(harness(), with_targets=False)
    got = run(harness(sampling=SamplingSettings(make_processors=make)), with_targets=True)
    for name, target in targets.items():
        assert [tokens for tokens, _ in got[name]] == [[target]] * 6
    # Bit for bit, also the log-probabilities.
    assert {name: got[name] for name in "bd"} == {name: alone[name] for name in "bd"}
    assert (
        run(harness(sampling=SamplingSettings(make_processors=made(cls)[1])), with_targets=False)
        == alone
    )
    assert processors


def test_raw_logprobs_are_those_before_the_processors(harness: Any) -> None:
    params = SamplingParams(temperature=0.0, logprobs=-1, extra_args={"target": 9})
    plain = SamplingParams(temperature=0.0, logprobs=-1)
    _, make = made(Target)
    forced = harness(sampling=SamplingSettings(make_processors=make))
    [a] = forced.step({"a": 5}, [forced.new("a", PROMPT, params)]).requests.values()
    h = harness()
    [b] = h.step({"a": 5}, [h.new("a", PROMPT, plain)]).requests.values()
    assert a.token_ids == [9]
    as_map = [dict(zip(e.token_ids, e.logprobs)) for e in (a.logprobs[0], b.logprobs[0])]
    assert as_map[0] == as_map[1]
    processed = harness(
        sampling=SamplingSettings(
            make_processors=made(Target)[1], logprobs_mode="processed_logprobs"
        )
    )
    [c] = processed.step({"a": 5}, [processed.new("a", PROMPT, params)]).requests.values()
    assert c.logprobs[0].token_ids[0] == 9
    assert c.logprobs[0].logprobs[0] == 0.0


class SharpenTail(LogitsProcessor):
    """Argmax-invariant: everything but the largest logit of its requests becomes impossible."""

    def __init__(self, config: Any, device: torch.device, is_pin_memory: bool) -> None:
        self.users: dict[int, bool] = {}
        self.seen: list[Tensor] = []

    def is_argmax_invariant(self) -> bool:
        return True

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        process_dict_updates(
            self.users, batch_update, lambda p, _, __: (p.extra_args or {}).get("sharp")
        )

    def apply(self, logits: Tensor) -> Tensor:
        self.seen.append(logits.clone())
        for slot in self.users:
            row = logits[slot]
            row[row < row.max()] = -torch.inf
        return logits


def test_invariant_processors_work_after_temperature_and_min_p(harness: Any) -> None:
    [sharpen], make = made(SharpenTail)
    params = {
        "a": SamplingParams(temperature=2.0, seed=1, extra_args={"sharp": True}),
        "b": SamplingParams(temperature=2.0, seed=2, min_p=0.5),
        "c": SamplingParams(temperature=0.0),
    }

    def run(h: Any) -> dict[str, list[int]]:
        got: dict[str, list[int]] = {name: [] for name in params}
        new = [h.new(name, [*PROMPT, i], p) for i, (name, p) in enumerate(params.items())]
        for step in range(8):
            counts = dict.fromkeys(params, 6 if step == 0 else 1)
            for name, result in h.step(counts, new if step == 0 else ()).requests.items():
                got[name] += result.token_ids
        return got

    h = harness(sampling=SamplingSettings(make_processors=make))
    got, plain = run(h), run(harness())
    assert got["a"] == h.model.dense_greedy([*PROMPT, 0], 8)
    assert plain["a"] != got["a"]
    assert (got["b"], got["c"]) == (plain["b"], plain["c"])
    with torch.inference_mode():
        first = h.model.dense_logits([*PROMPT, 0])[-1]
    torch.testing.assert_close(sharpen.seen[0][0], first * 0.5)
    kept = sharpen.seen[0][1] > -torch.inf
    assert 0 < int(kept.sum()) < 37, "min_p has worked"


def test_only_invariant_processors_are_left_out_of_greedy_steps(harness: Any) -> None:
    processors, make = made(Recorder, InvariantRecorder)
    changing, invariant = processors
    h = harness(sampling=SamplingSettings(make_processors=make))
    drawn = SamplingParams(temperature=1.0, seed=3, extra_args={"name": "b"})
    h.step({"a": 5}, [h.new("a", PROMPT, greedy(name="a"))])
    h.step({"a": 1})
    assert (changing.num_applied, invariant.num_applied) == (2, 0)
    h.step({"a": 1, "b": 5}, [h.new("b", PROMPT, drawn)])
    assert (changing.num_applied, invariant.num_applied) == (3, 1)
    h.step({"a": 1}, gone=["b"])
    assert (changing.num_applied, invariant.num_applied) == (4, 1)
    assert changing.num_updates == invariant.num_updates == 4


def test_prompts_under_way_have_no_slot_and_no_call(harness: Any) -> None:
    [recorder], make = made(Recorder)
    h = harness(sampling=SamplingSettings(make_processors=make))
    h.step({"a": 2}, [h.new("a", PROMPT, greedy(name="a"), first=2)])
    assert (recorder.num_updates, recorder.num_applied, recorder.slots) == (1, 0, {})
    [token] = h.step({"a": 3}).requests["a"].token_ids
    assert recorder.slots == {0: ("a", PROMPT, [token])}, "the output list is live"
    [again] = h.step({"a": 1}).requests["a"].token_ids
    assert recorder.slots == {0: ("a", PROMPT, [token, again])}


@pytest.mark.parametrize("seed", range(6))
def test_replaying_the_updates_gives_every_steps_batch(harness: Any, seed: int) -> None:
    """Arrivals, chunks, finishes, aborts and preemptions at random; greedy tokens stay the same."""
    rng = random.Random(seed)
    [recorder], make = made(Recorder)
    h = harness(sampling=SamplingSettings(make_processors=make))
    prompts: dict[str, list[int]] = {}
    outputs: dict[str, list[int]] = {}
    left: dict[str, int] = {}
    gone: list[str] = []
    preempted: list[str] = []
    for step in range(60):
        new, counts = [], {}
        for name in [*preempted]:
            if rng.random() < 0.5:
                preempted.remove(name)
                first = rng.randint(1, len(prompts[name]) + len(outputs[name]))
                new.append(
                    h.new(name, prompts[name], greedy(name=name), output=outputs[name], first=first)
                )
                left[name] = len(prompts[name]) + len(outputs[name]) - first
                counts[name] = first
        if rng.random() < 0.5 and len(left) < 8:
            name = f"r{step}"
            prompts[name] = [rng.randrange(37) for _ in range(rng.randint(1, 7))]
            outputs[name] = []
            first = rng.randint(1, len(prompts[name]))
            new.append(h.new(name, prompts[name], greedy(name=name), first=first))
            left[name] = len(prompts[name]) - first
            counts[name] = first
        for name in left:
            if name not in counts and rng.random() < 0.9:  # now and then one is not scheduled
                counts[name] = max(1, rng.randint(1, left[name]) if left[name] else 1)
                left[name] = max(0, left[name] - counts[name])
        if not counts:
            continue
        results = h.step(counts, new, gone).requests
        sampled = {name for name, result in results.items() if result.token_ids}
        for name in sampled:
            assert left[name] == 0
            outputs[name] += results[name].token_ids
        for name in sampled:  # who was sampled has a slot, with its own live lists
            slot = next(s for s, entry in recorder.slots.items() if entry[0] == name)
            assert recorder.slots[slot][1:] == (prompts[name], outputs[name])
        tracked = h.worker._runner.processors._slots.request_ids
        assert [recorder.slots[slot][0] for slot in range(len(tracked))] == tracked
        gone = []
        for name in [*left]:
            fate = rng.random()
            if fate < 0.1:
                preempted.append(name)
            if fate < 0.25:  # preempted, finished or aborted
                gone.append(name)
                del left[name]
    for name, tokens in outputs.items():
        assert tokens == h.model.dense_greedy(prompts[name], len(tokens)), name


class Raises(Recorder):
    where = "apply"

    def update_state(self, batch_update: BatchUpdate | None) -> None:
        if self.where == "update_state":
            raise KeyError("secret")
        if self.where == "exit from update_state":
            raise SystemExit("secret")

    def apply(self, logits: Tensor) -> Tensor:
        if self.where == "apply":
            raise KeyError("secret")
        if self.where == "exit":
            raise SystemExit("secret")
        return logits[:, :-1]


@pytest.mark.parametrize(
    "where", ["apply", "update_state", "shape", "exit", "exit from update_state"]
)
def test_a_failing_processor_fails_the_step_by_name(
    harness: Any, monkeypatch: pytest.MonkeyPatch, where: str
) -> None:
    monkeypatch.setattr(Raises, "where", where)
    h = harness(sampling=SamplingSettings(make_processors=made(Raises)[1]))
    with pytest.raises(EngineError, match="Raises") as caught:
        h.step({"a": 5}, [h.new("a", PROMPT, greedy(name="a"))])
    assert "secret" not in str(caught.value)


def test_a_failing_update_reaches_the_other_processors(
    harness: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(Raises, "where", "update_state")
    [_, recorder], make = made(Raises, Recorder)
    h = harness(sampling=SamplingSettings(make_processors=make))
    with pytest.raises(EngineError, match="Raises failed in update_state"):
        h.step({"a": 5}, [h.new("a", PROMPT, greedy(name="a"))])
    assert [name for name, _, _ in recorder.slots.values()] == ["a"]
    monkeypatch.setattr(Raises, "where", "nowhere")
    monkeypatch.setattr(Raises, "apply", lambda self, logits: logits)
    h.step({"b": 5}, [h.new("b", PROMPT, greedy(name="b"))], gone=["a"])
    assert [name for name, _, _ in recorder.slots.values()] == ["b"]


def test_a_constructor_gets_config_device_and_pinning() -> None:
    class Remembers(Recorder):
        def __init__(self, *args: Any) -> None:
            super().__init__(*args)
            self.args = args

    class Broken(Recorder):
        def __init__(self, *args: Any) -> None:
            raise KeyError("no")

    config = EngineConfig()
    [one] = make_processors([Remembers], config, torch.device("cpu"))
    assert isinstance(one, Remembers)
    assert one.args == (config, torch.device("cpu"), False)
    with pytest.raises(ConfigError, match="Broken could not be made: KeyError"):
        make_processors([Broken], config, torch.device("cpu"))


def test_without_processors_nothing_is_kept(harness: Any) -> None:
    h = harness()
    assert h.worker._runner.processors is None
