"""Cores and threads: what a process may use, and how a configuration is fitted to it."""

from __future__ import annotations

import os
import subprocess
import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.errors import ConfigError
from headrace_engine import cores
from headrace_engine.config import DeviceConfig
from headrace_engine.cores import CpuThreads, cpu_quota, format_cores, parse_cores, plan_threads

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")


@pytest.fixture
def machine(monkeypatch):
    """Eight cores, 2-9, no quota."""
    monkeypatch.setattr(cores, "usable_cores", lambda: tuple(range(2, 10)))
    monkeypatch.setattr(cores, "cpu_quota", lambda: None)
    monkeypatch.setattr(cores.sys, "platform", "linux")
    monkeypatch.setattr(cores, "_apart", lambda usable: usable)
    return monkeypatch


@given(st.sets(st.integers(0, 300), min_size=1))
def test_a_formatted_list_reads_back(numbers):
    assert parse_cores(format_cores(sorted(numbers))) == tuple(sorted(numbers))


def test_a_list_keeps_its_order():
    assert parse_cores("8, 0-2") == (8, 0, 1, 2)


@pytest.mark.parametrize("text", ["", "a", "1,", "3-1", "1-", "-1", "0-2,1", "0..3", "1.5", "²"])
def test_what_is_no_list_is_refused_by_field(text):
    with pytest.raises(ConfigError, match=r"device\.cpu_bind") as caught:
        DeviceConfig(cpu_bind=text)
    assert caught.value.field == "device.cpu_bind"
    assert repr(text) in str(caught.value)


@pytest.mark.parametrize(
    ("num_threads", "bind", "default", "planned"),
    [
        (0, "none", 4, CpuThreads(4)),
        (0, "none", 64, CpuThreads(8)),
        (3, "none", 64, CpuThreads(3)),
        (0, "auto", 2, CpuThreads(2, (2, 3))),
        (8, "auto", 2, CpuThreads(8, tuple(range(2, 10)))),
        (0, "9,3-5", 1, CpuThreads(4, (9, 3, 4, 5))),
        (2, "9,3-5", 8, CpuThreads(2, (9, 3))),
    ],
)
def test_plans(machine, num_threads, bind, default, planned):
    assert plan_threads(num_threads, bind, default=default) == planned


def test_a_quota_limits_threads_and_is_rounded_down(machine):
    machine.setattr(cores, "cpu_quota", lambda: 2.9)
    assert plan_threads(0, "none", default=8) == CpuThreads(2)
    assert plan_threads(0, "4-7", default=8) == CpuThreads(2, (4, 5))
    with pytest.raises(
        ConfigError, match=r"num_threads = 3: must be at most 2: .* 2-9.*2\.9 cores"
    ):
        plan_threads(3, "none", default=8)
    machine.setattr(cores, "cpu_quota", lambda: 0.5)
    assert plan_threads(0, "none", default=8) == CpuThreads(1)


@pytest.mark.parametrize(
    ("num_threads", "bind", "message"),
    [
        (9, "none", "num_threads = 9: must be at most 8: .*cores 2-9"),
        (0, "0-3", "cpu_bind = '0-3': .* not 0-1; .*cores 2-9"),
        (3, "4,5", "num_threads = 3: must be at most 2.*cpu_bind = '4,5'"),
    ],
)
def test_what_the_machine_lacks_is_refused(machine, num_threads, bind, message):
    with pytest.raises(ConfigError, match=message):
        plan_threads(num_threads, bind, default=1)


def test_other_systems_refuse_to_bind(machine):
    machine.setattr(cores.sys, "platform", "darwin")
    assert plan_threads(0, "none", default=2) == CpuThreads(2)
    for bind in ("auto", "2"):
        with pytest.raises(ConfigError, match="'none' on darwin: only Linux"):
            plan_threads(0, bind, default=2)


def test_auto_takes_physical_cores_first(tmp_path):
    for core, siblings in enumerate(["0,4", "1,5", "2-3", "2-3", "0,4", "1,5"]):
        topology = tmp_path / f"sys/devices/system/cpu/cpu{core}/topology"
        topology.mkdir(parents=True)
        (topology / "thread_siblings_list").write_text(siblings + "\n")
    assert cores._apart((0, 1, 2, 3, 4, 5), tmp_path) == (0, 1, 2, 3, 4, 5)
    assert cores._apart((2, 3, 5), tmp_path) == (2, 5, 3)
    assert cores.physical_cores((2, 3, 5), tmp_path) == (2, 5)
    assert cores._apart((7, 8), tmp_path) == (7, 8)  # nothing is known of them


def _write(path, text):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(text)


def test_quota_of_cgroup_v2_is_the_tightest_above(tmp_path):
    _write(tmp_path / "proc/self/cgroup", "0::/pods/one\n")
    groups = tmp_path / "sys/fs/cgroup"
    _write(groups / "pods/one/cpu.max", "max 100000\n")
    assert cpu_quota(tmp_path) is None
    _write(groups / "pods/cpu.max", "250000 100000\n")
    assert cpu_quota(tmp_path) == 2.5
    _write(groups / "pods/one/cpu.max", "50000 50000\n")
    assert cpu_quota(tmp_path) == 1.0


def test_quota_of_cgroup_v1_in_a_container_that_does_not_see_its_path(tmp_path):
    _write(tmp_path / "proc/self/cgroup", "5:cpu,cpuacct:/docker/abc\n4:memory:/docker/abc\n0::/\n")
    folder = tmp_path / "sys/fs/cgroup/cpu"
    _write(folder / "cpu.cfs_quota_us", "-1\n")
    _write(folder / "cpu.cfs_period_us", "100000\n")
    assert cpu_quota(tmp_path) is None
    _write(folder / "cpu.cfs_quota_us", "150000\n")
    assert cpu_quota(tmp_path) == 1.5


def test_no_cgroups_no_quota(tmp_path):
    assert cpu_quota(tmp_path) is None


@on_linux
def test_affinity_limits_threads():
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from headrace_engine.cores import most_threads, plan_threads, usable_cores\n"
        f"assert usable_cores() == ({core},) and most_threads() == 1\n"
        "assert plan_threads(0, 'none', default=16).num_threads == 1\n"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
