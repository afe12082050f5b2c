"""Engines that come and go while others serve."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future
from typing import Any, cast

import pytest
from replica_fakes import FakeProcess, request

from headrace_core.errors import (
    CapacityError,
    EngineDead,
    GenerateError,
    RequestError,
    UnsupportedFeature,
)
from headrace_core.lora import LoRARequest
from headrace_engine.clients.base import OutputSink
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replicas import ReplicatedClient
from headrace_engine.messages import CoreOutput, CoreOutputs
from headrace_testing.waiting import PATIENCE, wait_until

SQL = LoRARequest("sql", 1, "/sql")


class HeldProcess(FakeProcess):
    """Starts when the test says so."""

    def __init__(self, index: int, held: threading.Event) -> None:
        super().__init__(index)
        self.held, self.killed = held, False

    def start(self, sink: OutputSink) -> None:
        assert self.held.wait(PATIENCE)
        if self.killed:
            raise EngineDead("the engine process ended while starting (killed by signal 9)")
        super().start(sink)

    def kill(self) -> None:
        self.killed = True
        self.held.set()

    def shutdown(self) -> None:
        super().shutdown()
        self.is_shut_down = True

    is_shut_down = False


class Engines:
    """Engines behind one client, and all processes that were ever made."""

    def __init__(self, count: int = 1, *, is_elastic: bool = True) -> None:
        self.processes: list[HeldProcess] = []
        self.prepare: Callable[[HeldProcess], None] = lambda process: None
        self.held = threading.Event()
        """New processes wait for it."""
        self.held.set()
        self.room: list[tuple[int, Sequence[Mapping[str, Any]]]] = []
        self.most = 64
        self.client = ReplicatedClient(
            lambda i: cast(ProcessClient, self._make(i)),
            count,
            check_room=self._check_room if is_elastic else None,
        )
        self.ended: dict[str, CoreOutput] = {}
        self.client.start(self)

    def _make(self, index: int) -> HeldProcess:
        made = HeldProcess(index, self.held)
        self.prepare(made)
        self.processes.append(made)
        return made

    def _check_room(self, num_engines: int, reports: Sequence[Mapping[str, Any]]) -> None:
        self.room.append((num_engines, reports))
        if num_engines > self.most:
            raise RequestError(
                f"new_data_parallel_size = {num_engines}: must be at most {self.most}"
            )

    def on_outputs(self, outputs: CoreOutputs) -> None:
        for output in outputs.outputs:
            if output.finish_reason is not None:
                assert output.request_id not in self.ended
                self.ended[output.request_id] = output

    def on_death(self, error: BaseException) -> None:
        raise AssertionError(error)

    def scale(self, count: int, drain_timeout: float = PATIENCE) -> Future[int]:
        return self.client.scale(count, drain_timeout)

    def add(self, *names: str) -> None:
        self.client.add([request(name) for name in names])

    def finish(self, process: FakeProcess, name: str) -> None:
        process.sink.on_outputs(CoreOutputs([CoreOutput(name, [1], finish_reason="stop")], 0.0))

    @property
    def count(self) -> int:
        return self.client.num_engines

    @property
    def loads(self) -> list[int]:
        return self.client._group.placements.balancer.loads


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    yield
    wait_until(
        lambda: not [t for t in threading.enumerate() if t.name == "headrace-engines-scaling"]
    )


def test_new_engines_serve_once_all_are_ready() -> None:
    engines = Engines(1)
    engines.held.clear()
    scaled = engines.scale(3)
    assert not scaled.cancel()
    wait_until(lambda: len(engines.processes) == 3)
    engines.add("a", "b", "c")
    assert engines.processes[0].added == ["a", "b", "c"]  # served meanwhile
    assert engines.count == 1
    engines.held.set()
    assert scaled.result(PATIENCE) == 0
    assert engines.count == 3
    engines.add("d", "e", "f", "g")
    assert engines.processes[1].added
    assert engines.processes[2].added
    assert engines.loads == [6, 4, 4]
    assert engines.room == [(3, [])]


def test_a_new_engine_has_the_adapters_of_the_others() -> None:
    engines = Engines(1)
    engines.client.add_lora(SQL).result()
    later = LoRARequest("chat", 2, "/chat")

    def on_lora(process: FakeProcess, lora: LoRARequest) -> bool:
        if process.index == 1 and lora is SQL:
            engines.client.add_lora(later)  # while it joins
        return True

    engines.prepare = lambda process: setattr(process, "on_lora", on_lora)
    engines.scale(2).result(PATIENCE)
    assert engines.processes[1].loras == {1: SQL, 2: later}


@pytest.mark.parametrize(
    ("error", "named"),
    [
        (EngineDead("the engine process ended while starting (killed by signal 9)"), "signal 9"),
        (CapacityError("model 'm' does not fit"), "does not fit"),
    ],
)
def test_the_old_number_stays_if_one_does_not_start(error: BaseException, named: str) -> None:
    engines = Engines(2)
    engines.prepare = lambda process: setattr(
        process, "start_error", error if process.index == 3 else None
    )
    with pytest.raises(
        GenerateError, match=rf"engine 3 did not start: .*{named}.*; 2 engines serve on"
    ):
        engines.scale(4).result(PATIENCE)
    assert engines.count == 2
    assert all(process.is_shut_down for process in engines.processes[2:])
    engines.add("a", "b")
    assert [len(one.added) for one in engines.processes] == [1, 1, 0, 0]
    engines.prepare = lambda process: None
    assert engines.scale(3).result(PATIENCE) == 0


def test_the_old_number_stays_if_one_ends_before_it_joins() -> None:
    engines = Engines(1)
    engines.client.add_lora(SQL).result()
    engines.prepare = lambda process: setattr(
        process, "on_lora", lambda process, lora: process.end()
    )
    with pytest.raises(GenerateError, match="did not start: killed; 1 engine serves on"):
        engines.scale(2).result(PATIENCE)
    assert engines.count == 1
    assert engines.client.trouble(1.0) is None


def test_an_engine_with_a_shorter_context_does_not_join() -> None:
    engines = Engines(1)
    engines.prepare = lambda process: setattr(process, "max_model_len", 50)
    with pytest.raises(GenerateError, match="contexts of 50 tokens, the others for 100"):
        engines.scale(2).result(PATIENCE)
    assert engines.count == 1


def test_an_engine_leaves_once_its_requests_have_ended() -> None:
    engines = Engines(3)
    engines.add("a", "b", "c")
    leaving = engines.processes[2]
    (left,) = leaving.added
    scaled = engines.scale(2)
    engines.add("d", "e")
    assert leaving.added == [left]
    with pytest.raises(GenerateError, match="engine 2 leaves"):
        engines.client.add([request("x", rank=2)])
    assert not scaled.done()
    engines.finish(leaving, left)
    assert scaled.result(PATIENCE) == 0
    assert leaving.is_shut_down
    assert engines.ended[left].finish_reason == "stop"
    assert engines.client.trouble(1.0) is None
    with pytest.raises(RequestError, match=r"must be in 0\.\.1"):
        engines.client.add([request("x", rank=2)])
    assert engines.loads == [4, 4]


def test_requests_that_take_too_long_end_with_an_error() -> None:
    engines = Engines(2)
    engines.add("a", "b")
    leaving = engines.processes[1]
    assert engines.scale(1, 0.0).result(PATIENCE) == 1
    (left,) = leaving.added
    assert leaving.aborted == [left]
    assert "had not ended within drain_timeout = 0 s" in str(engines.ended[left].error)
    assert engines.ended[left].engine_ended  # a 503: it may be sent again
    engines.finish(leaving, "nobody")  # an output that was on its way
    assert engines.loads == [2]


def test_an_aborted_request_keeps_no_engine() -> None:
    engines = Engines(2)
    engines.add("a", "b")
    scaled = engines.scale(1)
    engines.client.abort(engines.processes[1].added)
    assert scaled.result(PATIENCE) == 0


def test_a_leaving_engine_is_told_nothing_more() -> None:
    engines = Engines(2)
    engines.add("a", "b")
    scaled = engines.scale(1)
    engines.processes[1].on_lora = lambda process, lora: EngineDead("it ends")
    assert engines.client.add_lora(SQL).result() is True
    engines.client.abort(["a", "b"])
    assert scaled.result(PATIENCE) == 0


def test_a_leaving_engine_that_ends_is_not_replaced() -> None:
    engines = Engines(2)
    engines.add("a", "b")
    scaled = engines.scale(1)
    engines.processes[1].end()
    assert scaled.result(PATIENCE) == 0
    assert len(engines.processes) == 2
    (left,) = engines.processes[1].added
    assert engines.ended[left].error == "engine 1: killed"


def test_a_staying_engine_that_ends_meanwhile_is_replaced() -> None:
    engines = Engines(2)
    engines.add("a", "b")
    scaled = engines.scale(1)
    engines.processes[0].end()
    wait_until(lambda: not engines.client.ailments)
    assert [one.index for one in engines.processes] == [0, 1, 0]
    engines.client.abort(engines.processes[1].added)
    assert scaled.result(PATIENCE) == 0


def test_one_scaling_at_a_time() -> None:
    engines = Engines(1)
    engines.held.clear()
    first = engines.scale(2)
    with pytest.raises(GenerateError, match="being scaled to 2 already") as refused:
        engines.scale(3)
    assert refused.value.is_public
    with pytest.raises(GenerateError, match=r"swap_weights: must wait until .* scaled to 2"):
        engines.client.call_workers("swap_weights", [{}])
    engines.held.set()
    first.result(PATIENCE)
    assert engines.scale(3).result(PATIENCE) == 0


def test_an_engine_that_ends_while_it_reports() -> None:
    engines = Engines(2)
    engines.processes[1].on_call = lambda method: EngineDead("killed")
    with pytest.raises(
        GenerateError, match="not all engines tell what they take: killed"
    ) as refused:
        engines.scale(3).result(PATIENCE)
    assert refused.value.is_public
    assert len(engines.processes) == 2


def test_the_same_number_is_nothing_to_do() -> None:
    engines = Engines(2)
    assert engines.scale(2).result(0) == 0
    assert len(engines.processes) == 2


def test_refusals() -> None:
    with pytest.raises(UnsupportedFeature, match="was fixed at the start"):
        Engines(2, is_elastic=False).scale(3)
    engines = Engines(2)
    for number in (0, -1):
        with pytest.raises(
            RequestError, match=f"new_data_parallel_size = {number}: must be at least 1"
        ):
            engines.scale(number)
    for seconds in (-1.0, float("nan"), float("inf")):
        with pytest.raises(RequestError, match="drain_timeout = "):
            engines.scale(1, seconds)
    engines.most = 2
    with pytest.raises(RequestError, match="must be at most 2"):
        engines.scale(3).result(PATIENCE)
    engines.client.call_workers("sleep", [1]).result()
    with pytest.raises(RequestError, match="at most 2 while the engines sleep"):
        engines.scale(3)
    engines.client.call_workers("wake_up", [None]).result()
    engines.client.call_workers("swap_weights", [{}]).result()
    with pytest.raises(UnsupportedFeature, match="must be at most 2: swap_weights was called"):
        engines.scale(3)
    assert engines.scale(1).result(PATIENCE) == 0


def test_not_while_an_engine_is_replaced_but_one_that_is_given_up_may_go() -> None:
    engines = Engines(2)
    engines.held.clear()
    engines.processes[1].end()
    for number in (1, 3):
        with pytest.raises(GenerateError, match="must wait until engines run: engine 1"):
            engines.scale(number)
    engines.held.set()
    wait_until(lambda: not engines.client.ailments)
    engines.client.call_workers("set_weights_version", ["7"]).result()
    engines.processes[-1].end()
    wait_until(lambda: engines.client.trouble(1.0) is not None)
    assert engines.scale(1).result(PATIENCE) == 0
    assert engines.client.trouble(1.0) is None


@pytest.mark.parametrize("number", [1, 3])
def test_shutting_down_ends_it(number: int) -> None:
    engines = Engines(2)
    engines.add("a", "b")
    if number == 3:
        engines.held.clear()
    scaled = engines.scale(number)
    engines.client.shutdown()
    with pytest.raises(EngineDead, match="shut down"):
        scaled.result(PATIENCE)
    assert not any(process.has_started for process in engines.processes)
