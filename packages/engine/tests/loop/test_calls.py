"""The synchronous engine used by several threads."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

import pytest
from engine_fakes import CharTokenizer, Turnstile, expected_tokens, make_core, served_model

from headrace_core.errors import EngineDead, RequestError
from headrace_core.output import RequestOutput
from headrace_core.sampling.params import RequestOutputKind, SamplingParams
from headrace_engine.clients.inproc import InprocClient
from headrace_engine.input_processing.input_processor import InputProcessor
from headrace_engine.offline import OfflineEngine
from headrace_engine.output_processing.output_processor import OutputProcessor
from headrace_testing.waiting import wait_until

LIMIT = 60.0


def make_offline(**core: Any) -> OfflineEngine:
    return OfflineEngine(
        InprocClient(lambda _: make_core(**core)), InputProcessor(CharTokenizer(), served_model())
    )


def params(tokens: int, **more: Any) -> SamplingParams:
    return SamplingParams(max_tokens=tokens, ignore_eos=True, **more)


def begin(call: Callable[[], Any]) -> Future[Any]:
    """Run in a daemon thread: what hangs fails its test, and nothing else."""
    future: Future[Any] = Future()

    def run() -> None:
        try:
            future.set_result(call())
        except BaseException as error:
            future.set_exception(error)

    threading.Thread(target=run, daemon=True).start()
    return future


@pytest.mark.parametrize("kind", list(RequestOutputKind))
def test_many_threads_get_what_each_would_get_alone(kind: RequestOutputKind) -> None:
    def calls(engine: OfflineEngine, thread: int) -> list[list[RequestOutput]]:
        wanted = params(2 + thread % 7, output_kind=kind)
        return [engine.run([f"prompt {thread}", f"other {i}"], wanted) for i in range(5)]

    with make_offline(num_blocks=80) as engine:
        futures = [begin(lambda t=t: calls(engine, t)) for t in range(12)]  # type: ignore[misc]
        for thread, future in enumerate(futures):
            for i, (first, second) in enumerate(future.result(LIMIT)):
                wanted = params(2 + thread % 7)
                assert first.outputs[0].token_ids == expected_tokens(f"prompt {thread}", wanted)
                assert second.outputs[0].token_ids == expected_tokens(f"other {i}", wanted)
        stats = engine.stats()
        assert stats.num_requests_running == stats.num_requests_waiting == 0
        assert stats.num_free_blocks == stats.num_blocks


def test_a_dead_engine_ends_the_calls_of_all_threads() -> None:
    turnstile = Turnstile()
    with make_offline(turnstile=turnstile) as engine:
        futures = [begin(lambda: engine.run(["a", "b"], params(400))) for _ in range(4)]
        futures.append(begin(lambda: engine.run(["c"], params(20, extra_args={"die_at": 4}))))
        wait_until(lambda: len(engine._calls._processor.states) == 9)
        turnstile.open()
        for future in futures:
            with pytest.raises(EngineDead, match="died as told"):
                future.result(LIMIT)


def test_a_shutdown_ends_the_calls_of_all_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    running = threading.Event()
    wanted = params(500, output_kind=RequestOutputKind.DELTA)
    turnstile = Turnstile(1)
    engine = make_offline(turnstile=turnstile)
    futures = [
        begin(lambda: engine.run(["a", "b"], wanted, on_output=lambda *_: running.set()))
        for _ in range(3)
    ]
    assert running.wait(LIMIT)
    stop = engine.client._loop.stop
    told = threading.Event()
    monkeypatch.setattr(engine.client._loop, "stop", lambda: (stop(wait=False), told.set(), stop()))
    ending = begin(engine.shutdown)
    assert told.wait(LIMIT)
    turnstile.open()
    ending.result(LIMIT)
    for future in futures:
        with pytest.raises(EngineDead, match="shut down"):
            future.result(LIMIT)
    with pytest.raises(EngineDead, match="shut down"):
        engine.run(["a"], params(1))


def test_whoever_is_interrupted_while_it_takes_a_step_in_for_all_hangs_nobody(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Ctrl-C strikes in the main thread, in the middle of sorting a step's outputs."""
    real, other_runs = OutputProcessor.process, threading.Event()
    main = threading.current_thread()

    def process(self: OutputProcessor, step: Any) -> Any:
        if threading.current_thread() is main and other_runs.is_set():
            monkeypatch.undo()
            raise KeyboardInterrupt
        return real(self, step)

    monkeypatch.setattr(OutputProcessor, "process", process)
    with make_offline() as engine:
        delta = params(400, output_kind=RequestOutputKind.DELTA)
        other = begin(lambda: engine.run(["b"], delta, on_output=lambda *_: other_runs.set()))
        main_s = iter(lambda: engine.run(["a"], params(100)), None)
        with pytest.raises(KeyboardInterrupt):
            list(main_s)
        [output] = other.result(LIMIT)
        assert output.outputs[0].finish_reason in ("error", "length")
        [again] = engine.run(["a"], params(5))
        assert again.outputs[0].token_ids == expected_tokens("a", params(5))
        stats = engine.stats()
        assert stats.num_free_blocks == stats.num_blocks


def test_an_id_is_one_request_s_in_all_calls() -> None:
    with make_offline() as engine, engine.open_call() as call:
        engine.add_request("one", "first", params(3))
        with pytest.raises(RequestError, match="one"):
            engine.add_request("one", "again", params(3), call=call)
        assert call.num_unfinished == 0
        assert call.wait() == []
        while engine.has_unfinished_requests():
            outputs = engine.step()
        assert outputs[-1].finished


def states_of(engine: OfflineEngine) -> list[Any]:
    return engine._calls._processor.states


def test_a_pause_waits_for_requests_of_other_threads_and_holds_back_later_ones() -> None:
    turnstile, order = Turnstile(), list[str]()

    def pause(engine: OfflineEngine) -> None:
        with engine.paused(wait=True):
            assert not states_of(engine) or all(s.finished for s in states_of(engine))
            order.append("paused")

    def late(engine: OfflineEngine) -> list[RequestOutput]:
        outputs = engine.run(["late"], params(3))
        order.append("late")
        return outputs

    with make_offline(turnstile=turnstile) as engine:
        first = [begin(lambda: engine.run(["a", "b"], params(30))) for _ in range(3)]
        wait_until(lambda: len(states_of(engine)) == 6)
        pausing = begin(lambda: pause(engine))
        wait_until(lambda: engine._calls._pausing is not None)
        after = begin(lambda: late(engine))
        turnstile.open()
        pausing.result(LIMIT)
        for future in first:
            assert [len(o.outputs[0].token_ids) for o in future.result(LIMIT)] == [30, 30]
        assert after.result(LIMIT)[0].outputs[0].token_ids == expected_tokens("late", params(3))
    assert order == ["paused", "late"]


def test_a_pause_aborts_what_runs() -> None:
    turnstile = Turnstile()
    with make_offline(turnstile=turnstile) as engine:
        running = [begin(lambda: engine.run(["a", "b"], params(400))) for _ in range(2)]
        wait_until(lambda: len(states_of(engine)) == 4)
        with engine.paused(wait=False):  # not a step is needed
            for future in running:
                assert [o.outputs[0].finish_reason for o in future.result(LIMIT)] == ["abort"] * 2
            held = begin(lambda: engine.run(["c"], params(2)))
        turnstile.open()
        assert held.result(LIMIT)[0].outputs[0].token_ids == expected_tokens("c", params(2))
        assert engine.stats().num_free_blocks == engine.stats().num_blocks


def test_a_pause_runs_the_requests_of_its_own_thread() -> None:
    """Whose outputs stay for `step`."""
    with make_offline() as engine:
        engine.add_request("one", "first", params(20))
        with engine.paused(wait=True):
            assert engine.has_unfinished_requests()
        outputs = engine.step()
        assert [(o.request_id, o.finished) for o in outputs] == [("one", True)]
        assert isinstance(outputs[0], RequestOutput)
        assert outputs[0].outputs[0].token_ids == expected_tokens("first", params(20))
        with engine.paused(wait=True), engine.open_call() as call:
            assert call.num_unfinished == 0


def test_one_pauses_after_the_other_and_a_dead_engine_ends_both() -> None:
    turnstile, inside = Turnstile(), threading.Event()

    def pause(engine: OfflineEngine) -> None:
        with engine.paused(wait=True):
            inside.set()

    with make_offline(turnstile=turnstile) as engine:
        running = begin(lambda: engine.run(["c"], params(20, extra_args={"die_at": 4})))
        wait_until(lambda: len(states_of(engine)) == 1)
        pausing = [begin(lambda: pause(engine)) for _ in range(2)]
        wait_until(lambda: engine._calls._pausing is not None)
        held = begin(lambda: engine.run(["d"], params(2)))
        turnstile.open()
        for future in (running, held, *pausing):
            with pytest.raises(EngineDead, match="died as told"):
                future.result(LIMIT)
    assert not inside.is_set()
