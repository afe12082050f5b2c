"""Ranks of two hosts, in processes on this one: whoever of them is killed, all end and say why."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace_core.errors import EngineDead
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.executor import MultiProcExecutor
from headrace_engine.multiproc.nodes.plan import NodePlan
from headrace_engine.multiproc.places import RankedWorkers
from headrace_testing.engine.echo_ranks import FACTORY, EchoMeeting
from headrace_testing.engine.executors import PATIENCE, EchoWorker, make_step
from headrace_testing.waiting import wait_until

SECONDS = 20.0
"""Five, within which all must end; the machine may be busy."""
NODE = """
import json, logging, sys
from headrace_engine.config import EngineConfig
from headrace_engine.multiproc.nodes.host import run_node
from headrace_engine.multiproc.nodes.plan import NodePlan
logging.basicConfig(level="INFO", stream=sys.stdout, format="%(message)s")
count, port, node = json.loads(sys.argv[1])
plan = NodePlan(count, "127.0.0.1", port, b"0123456789abcdef", {}, node)
sys.exit(run_node(plan, "headrace_testing.engine.echo_ranks:build", EngineConfig()))
"""


class Model:
    def forward(self, arg: Any) -> Any:
        return arg


class LedWorker(EchoWorker):
    """Runs a pass of a model, which the other ranks follow, in each step."""

    def __init__(self, leader: Any) -> None:
        super().__init__()
        self.model = Model()
        leader.lead(self.model)

    def execute(self, step: Any) -> Any:
        self.model.forward(step.step_id)
        return super().execute(step)


class Hosts:
    """An engine whose ranks are on two hosts, two on each; rank 0 is in this process."""

    def __init__(self, meeting: EchoMeeting) -> None:
        self.meeting = meeting
        self.node: subprocess.Popen[str] | None = None
        plan = NodePlan(2, "127.0.0.1", 0, b"0123456789abcdef", {}, 0, self._start_node)
        self.executor = MultiProcExecutor(
            RankedWorkers(
                lambda place, leader: LedWorker(leader), FACTORY, EngineConfig(), 4, "",
                lambda: meeting, nodes=plan,
            )
        )  # fmt: skip

    def _start_node(self, port: int) -> None:
        self.node = subprocess.Popen(
            [sys.executable, "-c", NODE, json.dumps([2, port, 1])],
            stdout=subprocess.PIPE,
            text=True,
        )

    @property
    def process(self) -> subprocess.Popen[str]:
        assert self.node is not None
        return self.node

    def ended(self) -> tuple[int, str]:
        """The node's exit status and log."""
        output, _ = self.process.communicate(timeout=SECONDS)
        return self.process.returncode, output


@pytest.fixture
def make(tmp_path: Path) -> Iterator[Callable[[str], Hosts]]:
    made: list[Hosts] = []

    def start(fault: str = "") -> Hosts:
        made.append(Hosts(EchoMeeting(tmp_path / "calls", fault)))
        made[0].executor.start()
        return made[0]

    yield start
    for hosts in made:
        hosts.executor.shutdown()
        if hosts.node is not None and hosts.node.poll() is None:
            hosts.node.kill()
            hosts.node.communicate()


def alive(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except OSError:
        return False


def all_end(hosts: Hosts, pids: list[int]) -> None:
    wait_until(lambda: not any(map(alive, pids)), SECONDS, "a rank lives on")


def run(executor: MultiProcExecutor, *names: str) -> Any:
    return executor.submit(make_step(7, *names)).result(PATIENCE)


def test_passes_and_calls_reach_every_host(make: Callable[..., Hosts]) -> None:
    hosts = make()
    run(hosts.executor, "pass")
    reports = hosts.executor.call("report")
    pids = hosts.executor.pids
    assert [report.get("pid", os.getpid()) for report in reports] == [os.getpid(), *pids]
    assert len({os.getpid(), *pids}) == 4
    hosts.executor.shutdown()
    assert [hosts.meeting.lines(rank) for rank in (1, 2, 3)] == [
        ["pass forward(7)", "report", "close"]
    ] * 3
    status, log = hosts.ended()
    assert status == 0
    assert "node 1 has ranks 2, 3 of 4" in log
    assert "the engine was shut down" in log
    all_end(hosts, pids)


@pytest.mark.parametrize("rank", [1, 3])
def test_a_killed_rank_ends_all_hosts_with_the_cause(make: Callable[..., Hosts], rank: int) -> None:
    hosts = make()
    pids = hosts.executor.pids
    os.kill(pids[rank - 1], signal.SIGKILL)
    wait_until(lambda: hosts.executor.failure is not None, SECONDS)
    where = " on node 1" if rank > 1 else ""
    cause = f"rank {rank} (process {pids[rank - 1]}{where}) ended: killed by signal 9"
    assert str(hosts.executor.failure) == cause
    status, log = hosts.ended()
    assert status == 1
    assert f"node 1 ends: {cause}" in log
    with pytest.raises(EngineDead):
        hosts.executor.call("report")
    hosts.executor.shutdown()
    all_end(hosts, pids)


def test_a_rank_that_raises_on_another_host(make: Callable[..., Hosts]) -> None:
    hosts = make("raise pass forward")
    run(hosts.executor, "pass")
    wait_until(lambda: hosts.executor.failure is not None, SECONDS)
    assert "LookupError: rank 1 fails in pass forward" in str(hosts.executor.failure)
    assert hosts.ended()[0] == 1


@pytest.mark.parametrize(
    ("number", "told"),
    [
        (signal.SIGKILL, r"node 1 (127.0.0.1:"),
        (signal.SIGTERM, "node 1 was ended by SIGTERM"),
    ],
)
def test_an_ended_host_ends_the_engine(make: Callable[..., Hosts], number: int, told: str) -> None:
    hosts = make()
    pids = hosts.executor.pids
    hosts.process.send_signal(number)
    wait_until(lambda: hosts.executor.failure is not None, SECONDS)
    assert told in str(hosts.executor.failure)
    hosts.ended()
    hosts.executor.shutdown()
    all_end(hosts, pids)


def test_a_stopped_rank_is_killed_at_the_end(make: Callable[..., Hosts]) -> None:
    hosts = make()
    pids = hosts.executor.pids
    os.kill(pids[2], signal.SIGSTOP)
    hosts.executor.shutdown()
    hosts.ended()
    all_end(hosts, pids)


LEADER = """
import runpy, sys, threading
from pathlib import Path
from headrace_testing.engine.echo_ranks import EchoMeeting
hosts = runpy.run_path(sys.argv[2])["Hosts"](EchoMeeting(Path(sys.argv[1])))
hosts.executor.start()
print(hosts.process.pid, *hosts.executor.pids, flush=True)
threading.Event().wait()
"""


def test_a_killed_rank_0_ends_all_hosts(tmp_path: Path) -> None:
    leader = subprocess.Popen(
        [sys.executable, "-c", LEADER, str(tmp_path / "calls"), __file__],
        stdout=subprocess.PIPE, text=True,
    )  # fmt: skip
    assert leader.stdout is not None
    pids = [int(word) for word in leader.stdout.readline().split()]
    assert len(pids) == 4
    leader.kill()
    leader.communicate()
    wait_until(lambda: not any(map(alive, pids)), SECONDS, "a process lives on")
