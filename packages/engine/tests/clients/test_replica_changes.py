"""What several engines are told, and what a new one has when it takes the place of one that has ended."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import cast

import pytest
from replica_fakes import FakeProcess, request

from headrace_core.errors import EngineDead, GenerateError, RequestError
from headrace_core.lora import LoRARequest
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replicas import ReplicatedClient
from headrace_engine.messages import CoreOutputs
from headrace_testing.waiting import PATIENCE, wait_until

SQL, CHAT = LoRARequest("sql", 1, "/sql"), LoRARequest("chat", 2, "/chat")


class Outputs:
    """Takes what becomes of requests."""

    def __init__(self) -> None:
        self.errors: list[str] = []

    def on_outputs(self, outputs: CoreOutputs) -> None:
        self.errors += [one.error or "" for one in outputs.outputs]

    def on_death(self, error: BaseException) -> None:
        self.errors.append(f"dead: {error}")


class Engines:
    """Two engines behind one client, and all processes that were ever made."""

    def __init__(self, prepare: Callable[[FakeProcess, int], None] | None = None) -> None:
        self.processes: list[FakeProcess] = []
        self._prepare = prepare or (lambda process, number: None)
        self.hold: threading.Event | None = None
        """Replacements wait for it."""
        self.client = ReplicatedClient(lambda i: cast(ProcessClient, self._make(i)), 2)
        self.outputs = Outputs()
        self.client.start(self.outputs)

    def _make(self, index: int) -> FakeProcess:
        if self.hold is not None:
            assert self.hold.wait(PATIENCE)
        made = FakeProcess(index)
        self._prepare(made, len(self.processes))
        self.processes.append(made)
        return made

    def wait_until_whole(self) -> None:
        wait_until(lambda: not self.client.ailments)


def test_a_replacement_that_does_not_start_is_tried_again() -> None:
    def prepare(process: FakeProcess, number: int) -> None:
        if number in (2, 3):
            process.start_error = EngineDead("killed while starting")

    engines = Engines(prepare)
    engines.processes[1].end()
    engines.wait_until_whole()
    assert len(engines.processes) == 5
    assert engines.client.trouble(1.0) is None


def test_replacements_that_never_start_are_given_up() -> None:
    def prepare(process: FakeProcess, number: int) -> None:
        if number >= 2:
            process.start_error = EngineDead("there is no room")

    engines = Engines(prepare)
    engines.processes[1].end()
    wait_until(lambda: engines.client.trouble(1.0) is not None)
    assert "there is no room" in str(engines.client.trouble(1.0))
    assert len(engines.processes) == 6  # five ends in a row
    engines.processes[0].end()
    wait_until(lambda: engines.client.failure is not None)
    assert engines.outputs.errors[-1].startswith("dead: all engines have ended")


def test_a_replacement_that_ends_while_it_catches_up_is_replaced() -> None:
    def prepare(process: FakeProcess, number: int) -> None:
        if number == 2:
            process.on_lora = lambda process, lora: process.end()

    engines = Engines(prepare)
    assert engines.client.add_lora(SQL).result() is True
    engines.processes[0].end()
    engines.wait_until_whole()
    assert len(engines.processes) == 4
    assert engines.processes[3].loras == {1: SQL}
    assert engines.client.pids == [1, 1]


def test_an_adapter_that_one_engine_refuses_is_kept_by_none() -> None:
    def prepare(process: FakeProcess, number: int) -> None:
        if number == 1:
            process.on_lora = lambda process, lora: RequestError("no") if lora is CHAT else True

    engines = Engines(prepare)
    assert engines.client.add_lora(SQL).result() is True
    with pytest.raises(RequestError, match="no"):
        engines.client.add_lora(CHAT).result()
    assert [one.loras for one in engines.processes] == [{1: SQL}, {1: SQL}]
    other = LoRARequest("sql", 1, "/elsewhere")  # refused: its id has another path
    for process in engines.processes:
        process.on_lora = lambda process, lora: RequestError("another path")
    with pytest.raises(RequestError, match="another path"):
        engines.client.add_lora(other).result()
    engines.processes[0].end()
    engines.wait_until_whole()
    assert engines.processes[2].loras == {1: SQL}


def test_an_adapter_whose_files_have_gone_does_not_keep_an_engine_from_running() -> None:
    def prepare(process: FakeProcess, number: int) -> None:
        if number == 2:
            process.on_lora = lambda process, lora: (
                RequestError("its files have gone") if lora is SQL else True
            )

    engines = Engines(prepare)
    for lora in (SQL, CHAT):
        assert engines.client.add_lora(lora).result() is True
    engines.processes[0].end()
    engines.wait_until_whole()
    assert len(engines.processes) == 3
    assert engines.processes[2].loras == {2: CHAT}


def test_an_adapter_that_goes_while_a_replacement_reads_it_is_gone_there_too() -> None:
    removed: list[bool] = []

    def prepare(process: FakeProcess, number: int) -> None:
        if number == 2:
            process.on_lora = lambda process, lora: (
                removed.append(engines.client.remove_lora(1).result()) or True
            )

    engines = Engines(prepare)
    assert engines.client.add_lora(SQL).result() is True
    engines.processes[0].end()
    engines.wait_until_whole()
    assert removed == [True]
    assert engines.processes[2].loras == {}


def test_a_call_that_all_engines_refuse_changes_nothing() -> None:
    engines = Engines()
    for process in engines.processes:
        process.on_call = lambda method: RequestError(f"method = {method!r}: must be one of")
    for call in (("nonsense", []), ("sleep", [7])):
        with pytest.raises(RequestError, match="must be one of"):
            engines.client.call_workers(*call).result()
    engines.processes[1].end()
    engines.wait_until_whole()
    assert engines.processes[2].calls == []  # it is awake, as the others are


def test_a_call_that_one_engine_obeys_is_a_change() -> None:
    engines = Engines()
    engines.processes[0].on_call = lambda method: RequestError("not now")
    with pytest.raises(RequestError, match="not now"):
        engines.client.call_workers("set_weights_version", ["2"]).result()
    engines.processes[1].end()
    assert "set_weights_version was called" in str(engines.client.trouble(1.0))


@pytest.mark.parametrize("method", ["sleep", "reload_weights"])
def test_engines_sleep_all_or_none(method: str) -> None:
    """A request runs in one: the other one must not fall asleep."""
    engines = Engines()
    engines.client.add([request("a")])
    with pytest.raises(RequestError, match="must wait until no request runs"):
        engines.client.call_workers(method, [1]).result()
    assert [one.calls for one in engines.processes] == [[], []]
    engines.client.abort(["a"])
    engines.client.call_workers(method, [1]).result()
    assert [one.calls for one in engines.processes] == [[(method, [1])]] * 2


def test_a_replacement_sleeps_while_the_others_do() -> None:
    engines = Engines()
    engines.client.call_workers("sleep", [1]).result()
    engines.processes[0].end()
    engines.wait_until_whole()
    assert engines.processes[2].calls == [("sleep", [1])]
    engines.client.call_workers("wake_up", [None]).result()
    engines.processes[1].end()
    engines.wait_until_whole()
    assert engines.processes[3].calls == []


def test_a_group_of_requests_is_taken_whole_or_not_at_all() -> None:
    engines = Engines()
    engines.processes[1].add_error = ValueError("it cannot be sent")
    with pytest.raises(ValueError, match="it cannot be sent"):
        engines.client.add([request(name) for name in "abcd"])
    assert engines.processes[0].aborted == engines.processes[0].added != []
    assert engines.client._group.placements.balancer.loads == [0, 0]
    named = [request("e", rank=0), request("f", rank=1)]
    engines.processes[1].add_error = EngineDead("it takes no commands")
    with pytest.raises(GenerateError, match="engine 1 takes no requests"):
        engines.client.add(named)
    assert engines.processes[0].aborted[-1] == "e"
    assert engines.client._group.placements.balancer.loads == [0, 0]


def test_while_no_engine_runs_calls_may_be_tried_again() -> None:
    """Both are being replaced: nothing has stopped for good."""
    engines = Engines()
    engines.hold = threading.Event()
    for process in engines.processes[:2]:
        process.end()
    for call in (
        lambda: engines.client.add([request("a")]),
        lambda: engines.client.call_workers("report"),
        lambda: engines.client.call_workers("sleep", [1]),
        lambda: engines.client.add_lora(SQL),
        lambda: engines.client.list_loras(),
    ):
        with pytest.raises(GenerateError, match=r"engine 0|no engine runs") as refused:
            call()
        assert refused.value.is_public
    stats = engines.client.stats().result()
    assert ["being replaced" in one.ended for one in stats.by_engine] == [True, True]
    engines.hold.set()
    engines.wait_until_whole()
