"""Parts of a plan that need no model."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest

from headrace.planning.advice import best_of, figures, largest
from headrace.planning.decoding import Bound
from headrace.planning.devices import (
    Devices,
    cores_by_node,
    numa_nodes,
    parse_devices,
    parse_speed,
    parse_time,
)
from headrace.planning.layouts import Layout, layouts_of
from headrace.planning.memory import RankMemory
from headrace.planning.plan import LayoutPlan
from headrace.planning.report import table
from headrace_core.errors import ConfigError


@pytest.mark.parametrize(
    ("text", "devices"),
    [
        ("2x64GiB@100GB/s", Devices(2, 64 << 30, 1e11)),
        ("80GB@3.35TB/s", Devices(1, 80 * 10**9, 3.35e12)),
        (" 16x512MiB@1GiB/s ", Devices(16, 512 << 20, float(1 << 30))),
    ],
)
def test_devices_are_read(text: str, devices: Devices) -> None:
    assert parse_devices(text, 0) == devices


@pytest.mark.parametrize(
    "text", ["", "2", "64GiB", "2x64@100", "x64GiB@1GB/s", "0x64GiB@1GB/s", "2x0GiB@1GB/s", "gpu", "cpux2",
             "1025x1GiB@1GB/s"],
)  # fmt: skip
def test_other_words_are_refused_with_what_is_taken(text: str) -> None:
    with pytest.raises(ConfigError, match="devices = ") as refused:
        parse_devices(text, 0)
    assert refused.value.field == "devices"


def test_a_typo_is_refused_before_torch_is_imported() -> None:
    code = (
        "import sys\nfrom headrace.cli.plan import main\nfrom headrace_core.errors import ConfigError\n"
        "try:\n    main(['nowhere', '--devices', '2x64'])\n"
        "except ConfigError as error:\n    print(error.field, 'torch' in sys.modules)\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.split() == ["devices", "False"]


def test_this_machine_is_divided_evenly() -> None:
    found = parse_devices("2xcpu", 1 << 30)
    assert (found.number, found.memory) == (2, 1 << 29)
    assert found.bandwidth > 1e6
    assert "NUMA node" in found.machine


def test_nodes_are_those_with_a_usable_core(tmp_path: Path) -> None:
    for node, cores in enumerate(("0-3,8\n", "4-7\n", "\n")):
        (tmp_path / f"node{node}").mkdir()
        (tmp_path / f"node{node}" / "cpulist").write_text(cores)
    assert numa_nodes({0, 5}, tmp_path) == 2
    assert cores_by_node({0, 5, 8}, tmp_path) == [(0, 8), (5,)]
    assert cores_by_node({5, 3}, tmp_path / "nowhere") == [(3, 5)]
    assert numa_nodes({8, 2}, tmp_path) == 1
    assert numa_nodes({0}, tmp_path / "nowhere") == 1


def test_speeds_and_times() -> None:
    assert parse_speed("20GB/s", "link") == 2e10
    assert parse_time("5us", "link_latency") == pytest.approx(5e-6)
    assert parse_time("0.1ms", "link_latency") == pytest.approx(1e-4)
    for parse in (parse_speed, parse_time):
        with pytest.raises(ConfigError, match="x = '20'"):
            parse("20", "x")


def test_layouts_are_pairs_at_most() -> None:
    found = {str(layout) for layout in layouts_of(4, has_experts=False)}
    assert found == {"dp 4", "pp 4", "tp 4", "pp 2, dp 2", "tp 2, dp 2", "tp 2, pp 2"}
    assert [str(layout) for layout in layouts_of(1, has_experts=True)] == ["one rank"]
    mixed = [layout for layout in layouts_of(8, has_experts=True) if layout.experts]
    assert {str(one) for one in mixed} == {"tp 8, ep", "tp 4, pp 2, ep", "tp 4, dp 2, ep",
                                           "tp 2, pp 4, ep", "tp 2, dp 4, ep", "dp 8, ep"}  # fmt: skip
    assert Layout(2, 3, 1, experts=True).flags() == "-tp 2 -pp 3 --enable-expert-parallel"
    assert all(layout.devices == 8 for layout in layouts_of(8, has_experts=True))


def plan(layout: Layout, speed: float, *, refused: str = "") -> LayoutPlan:
    bound = Bound(1 / speed, 0.0, speed)
    return LayoutPlan(layout, refused, (RankMemory(1, 1, 1, 10),), bound=bound)


def test_the_fastest_is_chosen_and_of_equals_the_simplest() -> None:
    fast, mixed, slow = plan(Layout(4), 100), plan(Layout(2, 1, 2), 103), plan(Layout(1, 1, 4), 90)
    assert best_of([mixed, slow, fast]) is fast
    faster = plan(Layout(2, 1, 2), 120)
    assert best_of([faster, slow, fast]) is faster


def test_what_runs() -> None:
    assert plan(Layout(2), 1).runs
    assert not plan(Layout(2), 1, refused="no").runs
    full = LayoutPlan(Layout(), "", (RankMemory(8, 2, 1, 10), RankMemory(1, 1, 1, 10)))
    assert (full.runs, full.missing, full.fullest.needed) == (False, 1, 11)
    assert not LayoutPlan(Layout(), "").runs


def test_search_and_figures() -> None:
    assert largest(100, lambda n: n <= 37) == 37
    assert largest(100, lambda n: False) == 0
    assert largest(5, lambda n: True) == 5
    assert [figures(x) for x in (1234.0, 0.0123, 7.0)] == ["1200", "0.012", "7"]
    assert table([("a", "b"), ("long", "1")]) == ["a     b", "long  1"]
