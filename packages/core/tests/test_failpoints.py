"""Failpoints do what their plan says, and nothing without one."""

from __future__ import annotations

import errno
import os
import subprocess
import sys

import pytest

from headrace_core.errors import ConfigError
from headrace_core.reliability import failpoints


def test_nothing_is_planned_by_default():
    assert failpoints.PLAN is None
    assert failpoints.hit("kv.alloc", "r") is False


def test_kinds(monkeypatch):
    expected = {"raise": RuntimeError, "memory": MemoryError, "enospc": OSError}
    for kind, error in expected.items():
        monkeypatch.setattr(failpoints, "PLAN", failpoints.parse(f"kv.alloc={kind}"))
        with pytest.raises(error, match="canary") as caught:
            failpoints.hit("kv.alloc", "r")
        if kind == "enospc":
            assert caught.value.errno == errno.ENOSPC
        assert failpoints.hit("kv.match", "r") is False
    monkeypatch.setattr(failpoints, "PLAN", failpoints.parse("kv.alloc=nan"))
    assert failpoints.hit("kv.alloc", "r") is True
    monkeypatch.setattr(failpoints, "PLAN", failpoints.parse("kv.alloc=delay(seconds=0.05)"))
    slept = []
    monkeypatch.setattr(failpoints.time, "sleep", slept.append)
    assert failpoints.hit("kv.alloc", "r") is False
    assert slept == [0.05]


def test_who_and_when(monkeypatch):
    plan = failpoints.parse("kv.alloc=raise(match=vic,after=1,times=2);kv.match=nan")
    monkeypatch.setattr(failpoints, "PLAN", plan)
    fates = []
    for request_id in ("other", "victim", "victim", "other", "victim", "victim"):
        try:
            failpoints.hit("kv.alloc", request_id)
            fates.append("passed")
        except RuntimeError:
            fates.append("failed")
    assert fates == ["passed", "passed", "failed", "passed", "failed", "passed"]


@pytest.mark.parametrize(
    "text", ["nowhere=raise", "kv.alloc=explode", "kv.alloc", "kv.alloc=raise(who=x)",
             "kv.alloc=raise(after=x)"],
)  # fmt: skip
def test_nonsense_is_refused(text):
    with pytest.raises(ConfigError, match="HEADRACE_FAILPOINTS"):
        failpoints.parse(text)


def test_the_environment_sets_them_and_kill_kills():
    code = "from headrace_core.reliability import failpoints; failpoints.hit('kv.alloc')"
    done = subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, failpoints.VARIABLE: "kv.alloc=kill"},
        timeout=60,
    )
    assert done.returncode == -9
