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
