"""Several HTTP processes: what the supervisor decides, without processes."""

from __future__ import annotations

import itertools
import logging
import os
import signal
import socket
from io import FileIO
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from headrace.cli.serve import ServeOptions, make_parser, settings_from
from headrace.http_processes import process as process_module
from headrace.http_processes import supervisor as module
from headrace.http_processes.hello import CoreEnded, EngineStarted
from headrace.http_processes.process import EngineNews, SharedListener
from headrace.http_processes.supervisor import MOST_RESTARTS, Sockets, Supervisor
from headrace_core.errors import EngineDead
from headrace_engine.config import EngineConfig, SchedulerConfig
from headrace_engine.log_lines import LineFormatter
from headrace_server.settings import ServerSettings


class FakeProcess:
    """An HTTP process whose fate the test decides."""

    made: list[FakeProcess] = []  # noqa: RUF012

    def __init__(self, rank: int, name: str, words: Any, sockets: Any) -> None:
        self.rank, self.name, self.pid = rank, name, 1000 + len(self.made)
        self.is_ready = False
        self.status: int | None = None
        self.signals: list[int] = []
        self.said: list[Any] = []
        self.forgotten = False
        self.made.append(self)

    def look(self) -> bool:
        was, self.is_ready = self.is_ready, True
        return not was

    def say(self, line: Any) -> None:
        self.said.append(line)

    def send(self, number: int) -> None:
        self.signals.append(number)
        self.status = 0

    def forget(self) -> None:
        self.forgotten = True


class FakeCore:
    """An engine's process."""

    memory_plan = "a plan"

    def __init__(self) -> None:
        self.failure: BaseException | None = None
        self.inside: list[str] = []
        self.ended = False

    def start(self, sink: Any) -> None:
        pass

    def add_front_end(self, name: str) -> None:
        if self.failure is not None:
            raise EngineDead("gone")
        self.inside.append(name)

    def remove_front_end(self, name: str) -> None:
        self.inside.remove(name)

    def shutdown(self) -> None:
        self.ended = True


@pytest.fixture
def watched(monkeypatch: pytest.MonkeyPatch) -> Any:
    """A supervisor of two processes, and what comes between two looks."""
    FakeProcess.made = []
    monkeypatch.setattr(module, "HttpProcess", FakeProcess)
    core = FakeCore()
    prepared = ServeOptions(ServerSettings(api_server_count=2), EngineConfig())
    sockets: Any = Sockets(None, None, Path("/"))  # type: ignore[arg-type]
    supervisor = Supervisor(["--x"], prepared, sockets, core)  # type: ignore[arg-type]
    supervisor.start()
    script: list[Any] = []

    looks = itertools.count()

    class Pause:
        def wait(self, seconds: float) -> None:
            assert next(looks) < 100, "the supervisor goes on for ever"
            if script:
                script.pop(0)()

    monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Pause))
    return SimpleNamespace(supervisor=supervisor, core=core, script=script)


FACTS = {
    "seconds": 2.0,
    "accounted": 1.0,
    "phases": [{"name": "load model", "seconds": 2.0, "pieces": []}],
}


def test_each_process_is_told_of_the_engines_start(watched: Any) -> None:
    watched.supervisor.tell_start(FACTS)
    watched.script += [
        end(FakeProcess.made[0], -9),
        lambda: setattr(watched.supervisor, "_signals", 1),
        lambda: None,
    ]
    watched.supervisor.run()
    assert [p.said for p in FakeProcess.made] == [[EngineStarted(FACTS)]] * 3


def heard(*lines: Any) -> tuple[Any, list[str]]:
    """What a process knows of the start after these lines, and of the engine's ends."""
    ends: list[str] = []
    client: Any = SimpleNamespace(core_ended=ends.append)
    news = EngineNews(client)
    reading, writing = os.pipe()
    for line in lines:
        os.write(writing, msgspec.json.encode(line) + b"\n")
    os.close(writing)
    with FileIO(reading) as supervisor, pytest.MonkeyPatch.context() as patch:
        patch.setattr(process_module, "ORPHAN_SECONDS", 0.0)
        patch.setattr(os, "_exit", lambda status: None)
        news.hear(supervisor)
    return news.startup(), ends


def test_the_news_of_an_engine() -> None:
    gone = "its supervisor has ended"
    assert heard(EngineStarted(FACTS), CoreEnded("killed")) == (FACTS, ["killed", gone])
    assert heard(CoreEnded("killed")) == (None, ["killed", gone])
    assert heard() == (None, [gone])


def end(process: FakeProcess, status: int) -> Any:
    return lambda: setattr(process, "status", status)


def test_one_that_falls_is_replaced_under_another_name(watched: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO)
    assert watched.core.inside == ["http-0", "http-1"]
    watched.script += [
        end(FakeProcess.made[0], -9),
        lambda: watched.core.inside == ["http-1", "http-2"] or pytest.fail(watched.core.inside),
        lambda: setattr(watched.supervisor, "_signals", 1),
        lambda: None,
    ]
    assert watched.supervisor.run() == 0
    assert FakeProcess.made[0].forgotten
    assert [p.rank for p in FakeProcess.made] == [0, 1, 0]
    assert [p.signals for p in FakeProcess.made] == [[], [15], [15]]
    assert "HTTP process 0 ended (killed by signal 9); another one takes its place" in caplog.text
    assert watched.core.inside == []
    watched.supervisor.end()
    assert watched.core.ended


def test_too_many_falls_end_the_server(watched: Any, caplog: Any) -> None:
    def fall() -> None:
        FakeProcess.made[-1].status = 70

    watched.script += [fall, lambda: None] * (MOST_RESTARTS + 1)
    assert watched.supervisor.run() == 70
    assert len(FakeProcess.made) == 2 + MOST_RESTARTS
    assert "the server stops" in caplog.text


def test_one_that_never_served_ends_the_server_with_its_status(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(FakeProcess, "look", lambda self: False)
    FakeProcess.made[1].status = 2
    assert watched.supervisor.run() == 2
    assert FakeProcess.made[0].signals == [15]


def test_the_engines_end_is_told_once_and_is_the_status(watched: Any) -> None:
    watched.core.failure = EngineDead("killed by signal 9")
    first, second = FakeProcess.made
    watched.script += [end(first, 1), end(second, 1)]
    assert watched.supervisor.run() == 1
    assert first.said == second.said == [CoreEnded("killed by signal 9")]
    assert len(FakeProcess.made) == 2


def test_those_that_do_not_leave_are_killed(watched: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    stubborn = FakeProcess.made[0]
    clock = [100.0]
    monkeypatch.setattr(module.time, "monotonic", lambda: clock[0])
    monkeypatch.setattr(
        stubborn, "send",
        lambda number: stubborn.signals.append(number) or (number == 9 and end(stubborn, -9)()),
    )  # fmt: skip
    watched.supervisor._signals = 1
    watched.script += [lambda: None, lambda: clock.__setitem__(0, 1000.0)]
    assert watched.supervisor.run() == 1
    assert stubborn.signals == [15, 9]


def test_a_queue_is_split() -> None:
    settings = ServerSettings(api_server_count=4)
    config = EngineConfig(scheduler=SchedulerConfig(max_queued_requests=10, max_queued_tokens=7))
    share = ServeOptions(settings, config).share_of_config().scheduler
    assert (share.max_queued_requests, share.max_queued_tokens) == (3, 2)
    no_limit = ServeOptions(settings, EngineConfig()).share_of_config().scheduler
    assert (no_limit.max_queued_requests, no_limit.max_queued_tokens) == (4096, None)


@pytest.mark.parametrize("flag", ["--api-server-count", "-asc", "--api_server_count"])
def test_the_flag_has_a_short_form(flag: str) -> None:
    assert settings_from(make_parser().parse_args([flag, "3"])).api_server_count == 3


def test_lines_name_their_process() -> None:
    record = logging.LogRecord("n", logging.INFO, "f", 7, "said", (), None)
    assert " (http 1) [n:7] said" in LineFormatter(process="http 1").format(record)
    assert " [n:7] said" in LineFormatter().format(record)


def test_a_shared_queue_is_left_alone() -> None:
    with SharedListener() as shared:
        shared.listen(1)  # of a socket without an address this would be an error, or give it one
        assert shared.getsockname() == ("0.0.0.0", 0)


def test_one_that_is_told_to_leave_while_it_starts_has_done_as_it_was_told(
    watched: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    """SIGTERM ends it by itself until its server runs: that is no failure of the server's."""
    monkeypatch.setattr(FakeProcess, "look", lambda self: False)
    starting, serving = FakeProcess.made
    monkeypatch.setattr(starting, "send", lambda number: setattr(starting, "status", -number))
    watched.supervisor._signals = 1
    assert watched.supervisor.run() == 0
    assert serving.signals == [15]
    assert [p.forgotten for p in FakeProcess.made] == [True, True]


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSEGV])
def test_another_signal_while_it_leaves_is_a_failure(
    watched: Any, monkeypatch: pytest.MonkeyPatch, number: int
) -> None:
    first = FakeProcess.made[0]
    monkeypatch.setattr(first, "send", lambda _: setattr(first, "status", -number))
    watched.supervisor._signals = 1
    assert watched.supervisor.run() == 1


def test_real_processes_that_are_held_in_their_start(monkeypatch: pytest.MonkeyPatch) -> None:
    core: Any = FakeCore()
    prepared = ServeOptions(ServerSettings(api_server_count=2), EngineConfig())
    with socket.create_server(("127.0.0.1", 0)) as listening:
        sockets = Sockets(listening, None, Path("/"))
        supervisor = Supervisor(["--x"], prepared, sockets, core)
        supervisor.start()
        processes = [process._process for process in supervisor._processes.values()]
        try:
            for process in processes:
                process.send_signal(signal.SIGSTOP)

            class Pause:
                def wait(self, seconds: float) -> None:
                    for process in processes:
                        process.send_signal(signal.SIGCONT)
                        process.wait(60)

            monkeypatch.setattr(module, "threading", SimpleNamespace(Event=Pause))
            supervisor._signals = 1
            assert supervisor.run() == 0
            assert [process.returncode for process in processes] == [-signal.SIGTERM] * 2
        finally:
            supervisor.end()


def test_the_address_is_said_once_when_all_serve(watched: Any, caplog: Any) -> None:
    caplog.set_level(logging.INFO, logger="headrace")
    watched.supervisor._sockets = Sockets(None, None, Path("/"), "http://x:1")  # type: ignore[arg-type]
    watched.script += [
        end(FakeProcess.made[0], -9),
        lambda: None,
        lambda: setattr(watched.supervisor, "_signals", 1),
    ]
    assert watched.supervisor.run() == 0
    said = [
        r.getMessage()
        for r in caplog.records
        if "serve" in r.getMessage() or "serving" in r.getMessage()
    ]
    assert said == [
        "2 HTTP processes serve: 1000, 1001", "serving at http://x:1",
        "2 HTTP processes serve: 1001, 1002",
    ]  # fmt: skip
