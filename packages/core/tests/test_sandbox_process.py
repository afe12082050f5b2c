"""A job in a child may take processor time, and on a busy machine more of the wall's clock."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace_core.reliability import sandbox_process
from headrace_core.reliability.sandbox_process import SandboxProcess, TookTooLong

CHILD = """
import select
from headrace_core.reliability.sandbox_process import serve

def answer(message):
    if message == b"work":
        while True:
            pass
    select.select([], [], [], float(message))
    return b"done"

serve(answer)
"""
LIMIT = 0.2


@pytest.fixture
def child(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[SandboxProcess]:
    """Works forever, or waits for so many seconds, in which it takes no processor time."""
    (tmp_path / "waits_or_works.py").write_text(CHILD)
    paths = [str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(paths))
    made = SandboxProcess("waits_or_works")
    yield made
    made.kill()


@pytest.mark.req("SEC-14")
def test_a_child_that_waits_for_a_processor_has_its_time(
    child: SandboxProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_process, "PATIENCE", 300)
    assert child.ask(str(2 * LIMIT).encode(), LIMIT) == b"done"


@pytest.mark.req("SEC-14")
def test_a_child_that_works_has_no_more(
    child: SandboxProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sandbox_process, "PATIENCE", 10_000)
    with pytest.raises(TookTooLong, match=r"took longer than 0\.2 s"):
        child.ask(b"work", LIMIT)
    assert not child.running
    assert child.ask(b"0", 60) == b"done"


@pytest.mark.req("SEC-14")
def test_a_child_that_never_goes_on_is_ended(child: SandboxProcess) -> None:
    with pytest.raises(TookTooLong):
        child.ask(b"10000", LIMIT)
    assert not child.running


def test_a_terminals_interrupt_does_not_reach_a_child(child: SandboxProcess) -> None:
    child.start()
    assert child.pid is not None
    assert os.getpgid(child.pid) == child.pid, "the terminal signals the parent's group"
