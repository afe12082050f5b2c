"""An engine that sleeps: what may follow what, what its workers do, and who is refused meanwhile."""

from __future__ import annotations

import time
from typing import Any

import pytest
from engine_fakes import EOS, PATIENCE, FakeExecutor, FakeWorker, Turnstile, make_core

from headrace_core.errors import EngineAsleep, GenerateError, RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.core import EngineCore
from headrace_engine.loop import EngineLoop
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_testing.waiting import wait_until

KEPT = "give_back_memory, keeping"
"""At level 1 weights may be kept elsewhere."""


class Sink:
    def __init__(self) -> None:
        self.outputs: list[CoreOutput] = []

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self.outputs += outputs.outputs

    def on_death(self, error: BaseException) -> None:
        raise error


def request(name: str, max_tokens: int = 3) -> CoreRequest:
    return CoreRequest(
        request_id=name,
        prompt_token_ids=[1, 2, 3],
        params=SamplingParams(max_tokens=max_tokens, ignore_eos=True),
        stop_token_ids=frozenset({EOS}),
        max_tokens=max_tokens,
        arrival_time=time.time(),
    )


def sleeper() -> tuple[EngineCore, list[str]]:
    """A core, and what its worker is told."""
    core = make_core(sleep_mode=True)
    assert isinstance(core.executor, FakeExecutor)
    core.executor.worker.calls.clear()
    return core, core.executor.worker.calls


def call(core: EngineCore, method: str, *args: Any) -> Any:
    return core.call_workers(method, args)


def is_sleeping(core: EngineCore) -> Any:
    return call(core, "is_sleeping")[0]


def test_level_one_reads_the_checkpoint_again() -> None:
    core, told = sleeper()
    call(core, "sleep", 1)
    assert told == [KEPT]
    assert is_sleeping(core)
    assert core.stats().sleep_level == 1
    call(core, "wake_up", None)
    assert told == [KEPT, "read_weights", "restore_cache"]
    assert not is_sleeping(core)
    assert core.stats().sleep_level == 0
    core.add(request("a"))


def test_part_by_part() -> None:
    core, told = sleeper()
    call(core, "sleep", 1)
    with pytest.raises(RequestError, match=r"the weights sleep.*wake 'weights' first"):
        call(core, "wake_up", ["kv_cache"])
    call(core, "wake_up", ["weights"])
    assert told == [KEPT, "read_weights"]
    assert is_sleeping(core)
    with pytest.raises(EngineAsleep, match=r"sleeps \(kv_cache\)"):
        core.add(request("a"))
    with pytest.raises(RequestError, match=r"sleeps already \(kv_cache, level 1\)"):
        call(core, "sleep", 1)
    call(core, "wake_up", ["weights"])  # awake: nothing happens
    call(core, "wake_up", ["kv_cache", "weights"])
    assert told == [KEPT, "read_weights", "restore_cache"]
    assert not is_sleeping(core)
    call(core, "wake_up", None)
    assert len(told) == 3


@pytest.mark.parametrize("tags", [["weights", "kv_cache"], ["weights"]])
def test_level_two_waits_for_weights(tags: list[str]) -> None:
    core, told = sleeper()
    call(core, "sleep", 2)
    with pytest.raises(RequestError, match=r"the weights sleep: wake_up\(tags=\['weights'\]\)"):
        call(core, "reload_weights")
    call(core, "wake_up", tags)
    assert told == ["give_back_memory"]
    if len(tags) == 2:
        assert not is_sleeping(core)
        with pytest.raises(EngineAsleep, match="reload_weights comes first"):
            core.add(request("a"))
        assert core.stats().sleep_level == 2
    call(core, "reload_weights")
    call(core, "wake_up", None)
    assert told[1:] == ["read_weights, changed", "restore_cache"]
    core.add(request("a"))


def test_weights_given_up_at_level_two_stay_missing_at_level_one() -> None:
    core, told = sleeper()
    for level in (2, 1):
        call(core, "sleep", level)
        call(core, "wake_up", None)
    with pytest.raises(EngineAsleep, match="reload_weights comes first"):
        core.add(request("a"))
    assert told == ["give_back_memory", KEPT]


def test_asleep_already() -> None:
    core, told = sleeper()
    call(core, "sleep", 2)
    call(core, "sleep", 2)
    assert told == ["give_back_memory"]
    with pytest.raises(RequestError, match=r"sleeps already \(weights, kv_cache, level 2\)"):
        call(core, "sleep", 1)


def test_a_part_that_cannot_wake_sleeps_on(monkeypatch: pytest.MonkeyPatch) -> None:
    core, told = sleeper()
    call(core, "sleep", 1)

    def torn(self: FakeWorker, changed: bool) -> None:
        raise OSError("model.safetensors: gone")

    with monkeypatch.context() as patched:
        patched.setattr(FakeWorker, "read_weights", torn)
        with pytest.raises(OSError, match="gone"):
            call(core, "wake_up", None)
    with pytest.raises(EngineAsleep, match=r"sleeps \(weights, kv_cache\)"):
        core.add(request("a"))
    call(core, "wake_up", None)
    assert told == [KEPT, "read_weights", "restore_cache"]


def test_weights_that_could_not_be_read_again_are_missing(monkeypatch: pytest.MonkeyPatch) -> None:
    core, told = sleeper()

    def torn(self: FakeWorker) -> None:
        raise OSError("model.safetensors: gone")

    with monkeypatch.context() as patched:
        patched.setattr(FakeWorker, "reload_weights", torn)
        with pytest.raises(OSError, match="gone"):
            call(core, "reload_weights")
    with pytest.raises(EngineAsleep, match="reload_weights comes first"):
        core.add(request("a"))
    assert not is_sleeping(core)
    assert core.stats().sleep_level == 2
    call(core, "reload_weights")
    assert told == ["read_weights, changed", "restore_cache"]
    core.add(request("a"))
    assert core.stats().sleep_level == 0


def test_a_worker_that_cannot_read_again_keeps_its_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    core, _ = sleeper()

    def refuse(self: FakeWorker) -> None:
        raise UnsupportedFeature("reload_weights: this worker reads its weights once")

    monkeypatch.setattr(FakeWorker, "reload_weights", refuse)
    with pytest.raises(UnsupportedFeature):
        call(core, "reload_weights")
    core.add(request("a"))


@pytest.mark.parametrize("level", [0, 3, True, "1", None])
def test_levels_that_there_are_not(level: Any) -> None:
    with pytest.raises(RequestError, match="must be 1 or 2"):
        call(sleeper()[0], "sleep", level)


@pytest.mark.parametrize("tags", [["cache"], [], "weights", ["weights", 3], [["weights"]]])
def test_tags_that_there_are_not(tags: Any) -> None:
    with pytest.raises(RequestError, match="must be a list of 'weights' or 'kv_cache', or None"):
        call(sleeper()[0], "wake_up", tags)


def test_only_where_it_is_enabled() -> None:
    core = make_core()
    for method, argument in (("sleep", 1), ("wake_up", None)):
        with pytest.raises(UnsupportedFeature, match=f"{method}: .*enable_sleep_mode=True"):
            call(core, method, argument)
    assert not is_sleeping(core)


def test_no_adapter_is_taken_meanwhile() -> None:
    core, _ = sleeper()
    call(core, "sleep", 1)
    with pytest.raises(EngineAsleep):
        core.add_lora(LoRARequest("a", 1, "/nowhere"))


def test_not_while_requests_run_and_none_is_taken_then() -> None:
    turnstile = Turnstile(1)
    core, sink = make_core(sleep_mode=True, turnstile=turnstile), Sink()
    loop = EngineLoop(core, sink)
    loop.add([request("a", 4)])
    loop.start()
    early = loop.call_workers("sleep", [1])
    turnstile.release(2)  # of the steps in flight, for which the call waits
    with pytest.raises(RequestError, match="'sleep': must wait until no request runs: pause first"):
        early.result(PATIENCE)
    turnstile.release(100)
    wait_until(lambda: any(output.finish_reason for output in sink.outputs))
    assert loop.call_workers("sleep", [1]).result(PATIENCE) == []
    loop.add([request("b")])
    wait_until(lambda: sink.outputs[-1].request_id == "b")
    assert sink.outputs[-1].asleep
    assert "takes no requests" in (sink.outputs[-1].error or "")
    loop.call_workers("wake_up", [None]).result(PATIENCE)
    loop.add([request("c")])
    wait_until(lambda: sink.outputs[-1].finish_reason == "length")
    loop.stop()


def test_the_prefix_cache_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    core, told = sleeper()
    monkeypatch.setattr(core, "reset_prefix_cache", lambda: told.append("forgotten"))
    call(core, "sleep", 1)
    assert told == ["forgotten", KEPT]


def test_waking_is_no_sign_of_being_stuck(monkeypatch: pytest.MonkeyPatch) -> None:
    core, ages = make_core(sleep_mode=True), list[float]()
    now = [0.0]
    loop = EngineLoop(core, Sink(), clock=lambda: now[0])

    def slow(self: FakeWorker, changed: bool) -> None:
        now[0] += 1000.0
        ages.append(loop.heartbeat_age)

    monkeypatch.setattr(FakeWorker, "read_weights", slow)
    loop.start()
    loop.call_workers("sleep", [1]).result(PATIENCE)
    loop.call_workers("wake_up", [None]).result(PATIENCE)
    loop.stop()
    assert ages == [0.0]


def test_being_asleep_fails_one_request() -> None:
    assert issubclass(EngineAsleep, GenerateError)
