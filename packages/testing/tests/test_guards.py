"""Each guard sees what it is there for, and nothing else."""

from __future__ import annotations

import asyncio
import contextlib
import pickle
import socket
import subprocess
import sys
import threading
from multiprocessing import shared_memory
from types import SimpleNamespace

import pytest

from headrace_testing.guards import (
    guarded_loop,
    guarded_pickles,
    guarded_resources,
    guarded_sockets,
)
from headrace_testing.guards import lag as lag_guard
from headrace_testing.guards import leaks as leak_guard
from headrace_testing.waiting import until


def test_loopback_is_allowed():
    with guarded_sockets(), socket.socket() as listening:
        listening.bind(("127.0.0.1", 0))
        listening.listen()
        socket.create_connection(listening.getsockname(), timeout=5).close()


def test_beyond_loopback_is_refused_and_reported_even_if_swallowed():
    def swallow() -> None:
        with guarded_sockets(), contextlib.suppress(AssertionError):
            socket.create_connection(("192.0.2.1", 9), timeout=1)

    with pytest.raises(AssertionError, match=r"192\.0\.2\.1"):
        swallow()


def test_a_name_of_another_machine_is_not_looked_up():
    with pytest.raises(AssertionError, match=r"example\.com"), guarded_sockets():
        socket.create_connection(("example.com", 80), timeout=1)


def test_sockets_are_put_back():
    before = socket.socket
    with guarded_sockets():
        assert socket.socket is not before
    assert socket.socket is before


def test_pickles_are_refused_even_if_swallowed():
    data = pickle.dumps([1])

    def swallow() -> None:
        with guarded_pickles(), contextlib.suppress(AssertionError):
            pickle.loads(data)

    with pytest.raises(AssertionError, match=r"pickle\.loads"):
        swallow()
    assert pickle.loads(data) == [1]


def test_torch_loads_weights_only(tmp_path):
    torch = pytest.importorskip("torch")
    torch.save(torch.zeros(1), tmp_path / "t")
    with guarded_pickles():
        torch.load(tmp_path / "t", weights_only=True)
    with pytest.raises(AssertionError, match="weights_only"), guarded_pickles():
        torch.load(tmp_path / "t")


def test_nothing_left_behind_passes():
    with guarded_resources():
        thread = threading.Thread(target=threading.Event().wait, args=(0.2,))
        thread.start()


@pytest.mark.skipif(sys.platform != "linux", reason="children and files are known on Linux only")
def test_what_is_left_behind_is_named(monkeypatch, tmp_path):
    monkeypatch.setattr(leak_guard, "SETTLE_SECONDS", 0.1)
    with contextlib.ExitStack() as later:

        def leave_behind() -> tuple[int, str]:
            done = threading.Event()
            threading.Thread(target=done.wait, args=(30,), name="left-thread").start()
            later.callback(done.set)
            child = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
            later.callback(_end, child)
            memory = shared_memory.SharedMemory(create=True, size=16)
            later.callback(memory.unlink)
            later.callback(memory.close)
            later.enter_context(open(tmp_path / "left-file", "w"))
            return child.pid, memory.name

        left: list[tuple[int, str]] = []
        with pytest.raises(AssertionError) as caught, guarded_resources():
            left.append(leave_behind())
        [(pid, name)] = left
        told = str(caught.value)
        for what in ("thread left-thread", f"child process {pid}", "left-file", name):
            assert what in told


def _end(child: subprocess.Popen) -> None:
    child.kill()
    child.wait(10)
    child.stdin.close()


def test_a_loop_that_is_held_up_fails(monkeypatch):
    now = 0.0
    monkeypatch.setattr(lag_guard, "time", SimpleNamespace(monotonic=lambda: now))

    async def hold_up() -> None:
        nonlocal now
        async with guarded_loop(0.1) as lag:
            await until(lambda: lag.lags)
            now += 0.25
            seen = len(lag.lags)
            await until(lambda: len(lag.lags) > seen)

    with pytest.raises(AssertionError, match="held up"):
        asyncio.run(hold_up())


def test_a_loop_that_is_free_passes():
    async def leave_free() -> float:
        async with guarded_loop(5.0) as lag:
            await until(lambda: lag.lags)
        return len(lag.lags)

    assert asyncio.run(leave_free()) > 0
