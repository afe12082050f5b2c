from __future__ import annotations

import os
import select
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, cast

import pytest

from headrace_core import plugins
from headrace_core.errors import EngineDead, ReplayFailed, UnsupportedFeature, WeightsError
from headrace_core.executor import Executor, WorkerFactory
from headrace_core.lora import AdapterSlots
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.executor import MultiProcExecutor
from headrace_engine.multiproc.leader import PassLeader
from headrace_engine.multiproc.places import RankedWorkers
from headrace_testing.engine.echo_ranks import FACTORY, EchoMeeting
from headrace_testing.engine.executors import PATIENCE, EchoWorker, ExecutorConformance, make_step
from headrace_testing.waiting import wait_until

SECONDS = 5.0
"""Within which the end of a rank must be known; times four, as the machine may be busy."""


class LedWorker(EchoWorker):
    """Runs a pass of a model, which the other ranks follow, in each step that has ``pass``."""

    def __init__(self, leader: PassLeader | None) -> None:
        super().__init__()
        self.model = Model()
        if leader is not None:
            leader.lead(self.model)

    def execute(self, step: Any) -> Any:
        if "pass" in step.num_scheduled_tokens:
            self.model.forward(step.step_id)
        return super().execute(step)


class Model:
    def __init__(self) -> None:
        self.passes: list[Any] = []
        self.hold: threading.Event | None = None

    def forward(self, arg: Any) -> Any:
        self.passes.append(arg)
        if arg == 13:
            raise ArithmeticError("thirteen")
        if self.hold is not None:  # as if it exchanged tensors with a rank that does not come
            self.hold.wait(PATIENCE)
        return arg


def executor_of(
    factory: Callable[[Any], Any], meeting: EchoMeeting, world_size: int = 2
) -> MultiProcExecutor:
    return MultiProcExecutor(
        RankedWorkers(
            lambda place, leader: factory(leader),
            FACTORY,
            EngineConfig(),
            world_size,
            "",
            lambda: meeting,
        )
    )


@pytest.fixture
def meeting(tmp_path: Path) -> EchoMeeting:
    return EchoMeeting(tmp_path / "calls")


class RemoteWorker:
    """What a test sees of a rank's worker."""

    def __init__(self, meeting: EchoMeeting, rank: int) -> None:
        self._meeting, self._rank = meeting, rank
        self.release = threading.Event()

    @property
    def calls(self) -> list[str]:
        return self._meeting.lines(self._rank)

    @property
    def closed(self) -> int:
        return self.calls.count("close")


class TestMultiProcExecutor(ExecutorConformance):
    @pytest.fixture(autouse=True)
    def _meeting(self, meeting: EchoMeeting) -> None:
        self.meeting = meeting

    def make_executor(self, factory: WorkerFactory) -> Executor:
        return executor_of(lambda leader: factory(), self.meeting)

    @pytest.fixture
    def workers(self) -> list[Any]:
        return []

    @pytest.fixture
    def executor(self, workers: list[Any]) -> Iterator[Executor]:
        def factory() -> EchoWorker:
            workers.append(EchoWorker())
            return workers[0]

        executor = self.make_executor(factory)
        executor.start()
        workers.append(RemoteWorker(self.meeting, 1))
        yield executor
        workers[0].release.set()
        executor.shutdown()

    def test_call_runs_a_function_with_each_worker(
        self, executor: Executor, workers: list[EchoWorker]
    ) -> None:
        with pytest.raises(UnsupportedFeature, match="tensor_parallel_size"):
            executor.call(lambda worker: worker)
        with pytest.raises(UnsupportedFeature, match="tensor_parallel_size"):
            executor.call_beside("load")


class TestOneRank(ExecutorConformance):
    """With one rank it starts no process."""

    def make_executor(self, factory: WorkerFactory) -> Executor:
        return MultiProcExecutor(factory)


def test_passes_run_on_every_rank_in_order(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting, world_size=3)
    executor.start()
    for number in (1, 2, 3):
        executor.submit(make_step(number, "pass")).result(PATIENCE)
    reports = executor.call("report")
    executor.shutdown()
    assert [report.get("pid", os.getpid()) for report in reports] == [os.getpid(), *executor.pids]
    wanted = ["pass forward(1)", "pass forward(2)", "pass forward(3)", "report", "close"]
    assert meeting.lines(1) == meeting.lines(2) == wanted
    assert executor.failure is None


@pytest.mark.parametrize(
    ("fault", "told"),
    [
        ("kill create", "killed by signal 9"),
        ("raise create", "LookupError: rank 1 fails in create"),
    ],
)
def test_a_rank_that_cannot_be_made(meeting: EchoMeeting, fault: str, told: str) -> None:
    executor = executor_of(LedWorker, meeting._replace(fault=fault))
    with pytest.raises(EngineDead, match=rf"rank 1 \(process \d+\) ended: {told}"):
        executor.start()
    assert ended(executor.pids)


def test_a_rank_that_ends_while_it_loads(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting._replace(fault="kill load"))
    executor.start()
    with pytest.raises(EngineDead, match=r"rank 1 .*killed by signal 9"):
        executor.call("load")
    assert isinstance(executor.failure, EngineDead)
    executor.shutdown()


def test_a_call_that_raises_is_survived(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting._replace(fault="raise load"))
    executor.start()
    with pytest.raises(Exception, match="rank 1 fails in load") as caught:
        executor.call("load")
    assert "raised by rank 1" in caught.value.__notes__
    assert executor.call("kv_specs")[1] == executor.call("kv_specs")[0]
    executor.shutdown()


def test_a_rank_killed_between_steps(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting)
    executor.start()
    executor.submit(make_step(1, "pass")).result(PATIENCE)
    os.kill(executor.pids[0], signal.SIGKILL)
    wait_until(lambda: executor.failure is not None, 4 * SECONDS)
    with pytest.raises(EngineDead) as caught:
        executor.submit(make_step(2, "pass"))
    assert "rank 1" in str(caught.value.__cause__)
    with pytest.raises(EngineDead):
        executor.call("report")
    executor.shutdown()


@pytest.mark.parametrize("fault", ["", "kill pass forward", "raise pass forward"])
def test_a_rank_that_ends_in_a_step(meeting: EchoMeeting, fault: str) -> None:
    """Also while rank 0 waits for it."""
    made: list[LedWorker] = []

    def make(leader: Any) -> LedWorker:
        made.append(LedWorker(leader))
        made[0].model.hold = threading.Event()
        return made[0]

    executor = executor_of(make, meeting._replace(fault=fault))
    executor.start()
    step = executor.submit(make_step(1, "pass"))
    queued = executor.submit(make_step(2, "pass"))
    if not fault:
        wait_until(lambda: meeting.lines(1) == ["pass forward(1)"])
        os.kill(executor.pids[0], signal.SIGKILL)
    with pytest.raises(EngineDead, match=r"rank 1 .*(signal 9|rank 1 fails in pass forward)"):
        step.result(PATIENCE)  # while rank 0 still hangs in its pass
    assert queued.done()
    made[0].model.hold.set()
    executor.shutdown()
    assert ended(executor.pids)


def test_a_pass_that_raises_ends_the_executor(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting)
    executor.start()
    with pytest.raises(ArithmeticError, match="thirteen"):
        executor.submit(make_step(13, "pass")).result(PATIENCE)
    assert isinstance(executor.failure, ArithmeticError), "the ranks are no longer in step"
    executor.shutdown()
    assert ended(executor.pids)


def test_a_terminals_signals_do_not_reach_ranks(meeting: EchoMeeting) -> None:
    """Ctrl-C, while a rank still imports, would end it with a stack trace."""
    executor = executor_of(LedWorker, meeting)
    executor.start()
    try:
        assert all(os.getpgid(pid) != os.getpgrp() for pid in executor.pids)
    finally:
        executor.shutdown()


def test_shutdown_does_not_wait_for_a_stopped_rank(
    meeting: EchoMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rank 0 is in an exchange with a process that is stopped (Ctrl-Z, a debugger): it waits for minutes."""
    monkeypatch.setattr("headrace_engine.multiproc.executor.JOIN_SECONDS", 0.2)
    monkeypatch.setattr("headrace_engine.multiproc.rank_processes.STOP_SECONDS", 0.2)
    workers: list[LedWorker] = []
    executor = executor_of(lambda leader: workers.append(LedWorker(leader)) or workers[0], meeting)
    executor.start()
    model, [pid] = workers[0].model, executor.pids
    model.hold = threading.Event()
    threading.Thread(target=_set_when_ended, args=(pid, model.hold), daemon=True).start()
    os.kill(pid, signal.SIGSTOP)
    step = executor.submit(make_step(1, "pass"))
    wait_until(lambda: bool(model.passes), PATIENCE, "no step began")
    with ThreadPoolExecutor(1) as thread:
        thread.submit(executor.shutdown).result(PATIENCE / 2)
    assert ended([pid])
    assert step.done()


def _set_when_ended(pid: int, event: threading.Event) -> None:
    """As the group's communicator ends an exchange when a peer has ended."""
    descriptor = os.pidfd_open(pid)
    select.select([descriptor], [], [], PATIENCE)
    os.close(descriptor)
    event.set()


class OpenMeeting:
    """Where rank 0 waits for a rank that has died."""

    def __init__(self, echo: EchoMeeting) -> None:
        self.echo = echo
        self.given_up = threading.Event()

    def address(self, name: str) -> str:
        return self.echo.address(name)

    def give_up(self) -> None:
        self.given_up.set()

    def close(self) -> None:
        pass


class MeetingWorker(EchoWorker):
    """Waits for the other rank."""

    def __init__(self, meeting: OpenMeeting) -> None:
        super().__init__()
        assert meeting.given_up.wait(PATIENCE), "nobody gave the meeting up"


def test_rank_0_does_not_wait_for_a_rank_that_died_before_it_joined(meeting: EchoMeeting) -> None:
    held = OpenMeeting(meeting._replace(fault="kill create"))
    executor = executor_of(lambda leader: MeetingWorker(held), cast(Any, held))
    with (
        ThreadPoolExecutor(1) as thread,
        pytest.raises(EngineDead, match="killed by signal 9"),
    ):
        thread.submit(executor.start).result(4 * SECONDS)
    assert ended(executor.pids)


class RetryingWorker(LedWorker):
    """Replays each step, and runs it eagerly if that fails, as the runner does with one rank."""

    def __init__(self, leader: PassLeader | None) -> None:
        super().__init__(leader)
        self.graph = FailingGraph()
        if leader is not None:
            leader.lead_replays(cast(Any, self.graph))

    def execute(self, step: Any) -> Any:
        try:
            self.graph.replay(step.step_id)
        except ReplayFailed:
            self.model.forward(step.step_id)
        return EchoWorker.execute(self, step)


class FailingGraph:
    def replay(self, batch: Any) -> None:
        raise ReplayFailed("call 3, embedding, reported status 4")


def test_a_replay_that_fails_on_rank_0_is_not_run_again(
    meeting: EchoMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nobody knows how far the other ranks' replays came, so an eager pass would meet their exchanges."""
    monkeypatch.setattr("headrace_engine.multiproc.rank_processes.CAUSE_SECONDS", 0.01)
    workers: list[RetryingWorker] = []
    executor = executor_of(
        lambda leader: workers.append(RetryingWorker(leader)) or workers[0], meeting
    )
    executor.start()
    with pytest.raises(EngineDead, match=r"rank 0 .*embedding, reported status 4"):
        executor.submit(make_step(1)).result(PATIENCE)
    assert isinstance(executor.failure, EngineDead)
    assert workers[0].model.passes == []
    executor.shutdown()
    assert ended(executor.pids)


def test_a_rank_that_does_not_end_is_killed(
    meeting: EchoMeeting, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("headrace_engine.multiproc.rank_processes.STOP_SECONDS", 0.2)
    executor = executor_of(LedWorker, meeting._replace(fault="wait close"))
    executor.start()
    executor.shutdown()
    assert ended(executor.pids)


_OWNER = """
import sys, time
from pathlib import Path
sys.path.insert(0, {folder!r})
from test_executor import *
executor = executor_of(LedWorker, EchoMeeting(Path({calls!r}), {fault!r}))
executor.start()
print(executor.pids[0], flush=True)
executor.submit(make_step(1, "pass")).result()
time.sleep(600)
"""


@pytest.mark.parametrize("fault", ["", "wait pass forward"])
def test_no_rank_outlives_a_killed_engine(meeting: EchoMeeting, fault: str) -> None:
    """Neither one that waits nor one that computes."""
    code = _OWNER.format(folder=str(Path(__file__).parent), calls=str(meeting.calls), fault=fault)
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout is not None
        pid = int(owner.stdout.readline())
        wait_until(lambda: meeting.lines(1) == ["pass forward(1)"])
        owner.kill()
    wait_until(lambda: ended([pid]), 4 * SECONDS)


def test_a_rank_takes_only_known_calls(meeting: EchoMeeting) -> None:
    executor = executor_of(LedWorker, meeting)
    executor.start()
    with pytest.raises(UnsupportedFeature, match="get_model: not while tensor_parallel_size"):
        executor.call("get_model")
    assert executor.call("start_profile") == [None]
    executor.shutdown()
    assert meeting.lines(1) == ["close"]


class ReadPath(NamedTuple):
    """What one-line slots read: the digest is the path."""

    digest: str
    num_bytes: int = 1
    changes_media: bool = False


class PathSlots:
    """Slots of adapters that are paths; ``bad`` cannot be read."""

    num_slots, num_bytes, runs_eagerly = 1, 1, False

    def read(self, path: str) -> ReadPath:
        if path.endswith("bad"):
            raise WeightsError(f"{path}: bad")
        return ReadPath("/other" if path == "/mine" else path)

    def place(self, slot: int, adapter: ReadPath) -> None:
        assert isinstance(adapter, ReadPath)

    def choose(self, tokens: Any, logits: Any = None) -> None: ...

    def choose_media(self, slot: int | None) -> None: ...


class SlotsWorker(LedWorker):
    """With slots of adapters, which the other ranks follow."""

    def __init__(self, leader: PassLeader) -> None:
        super().__init__(leader)
        self.slots = leader.lead_adapters(PathSlots())
        self.leader = leader

    def execute(self, step: Any) -> Any:
        if "adapter" in step.num_scheduled_tokens:
            self.slots.place(0, self.slots.read("/a"))
            self.slots.choose(None)
        return super().execute(step)


def slots_of(meeting: EchoMeeting) -> tuple[MultiProcExecutor, AdapterSlots]:
    made: list[SlotsWorker] = []

    def make(leader: Any) -> SlotsWorker:
        made.append(SlotsWorker(leader))
        return made[0]

    executor = executor_of(make, meeting)
    executor.start()
    return executor, made[0].slots


def test_adapters_are_told_in_order_and_dropped_with_rank_0s(meeting: EchoMeeting) -> None:
    executor, slots = slots_of(meeting)
    executor.submit(make_step(1, "adapter", "pass")).result(PATIENCE)
    with pytest.raises(WeightsError, match="/bad: bad"):
        slots.read("/bad")
    with pytest.raises(WeightsError, match="/mine: rank 1 reads other content there"):
        slots.read("/mine")
    executor.submit(make_step(2, "adapter")).result(PATIENCE)
    executor.shutdown()
    told = [
        "read_adapter(0, /a, [])", "pass place_adapter(0, 0)", "pass drop_adapters([0])",
        "pass choose_adapters(None, None)", "pass forward(1)", "read_adapter(1, /bad, [])",
        "read_adapter(2, /mine, [1])", "read_adapter(3, /a, [2])", "pass place_adapter(0, 3)",
        "pass drop_adapters([3])", "pass choose_adapters(None, None)", "close",
    ]  # fmt: skip
    assert meeting.lines(1) == told


def test_passes_do_not_wait_for_a_reading_nor_does_the_end(meeting: EchoMeeting) -> None:
    executor, slots = slots_of(meeting._replace(fault="wait read_adapter"))
    with ThreadPoolExecutor(1) as pool:
        reading = pool.submit(slots.read, "/a")
        wait_until(lambda: meeting.lines(1) == ["read_adapter(0, /a, [])"])
        executor.submit(make_step(1, "pass")).result(PATIENCE)
        executor.call("report")
        assert not reading.done()
        executor.shutdown()
        with pytest.raises(EngineDead):
            reading.result(PATIENCE)
    with pytest.raises(EngineDead):
        slots.read("/b")


def test_a_rank_that_cannot_read_is_named_and_goes_on(meeting: EchoMeeting) -> None:
    executor, slots = slots_of(meeting)
    with pytest.raises(WeightsError, match=r"rank 1 cannot read .*/missing: no such folder"):
        slots.read("/missing")
    executor.submit(make_step(1, "pass")).result(PATIENCE)
    executor.shutdown()


def test_the_entry_point() -> None:
    assert plugins.load("headrace.executors", "mp") is MultiProcExecutor


def ended(pids: list[int]) -> bool:
    """True if none of the processes runs."""
    return not any(_runs(pid) for pid in pids)


def _runs(pid: int) -> bool:
    try:
        state = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0]
    except OSError:
        return False
    return state != "Z"
