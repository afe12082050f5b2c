"""``bench scaling``: with the demo model, and its parts with made-up machines."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from headrace.bench import machine_numbers, scaling
from headrace.bench.machine_numbers import (
    Measured,
    ThreadNumbers,
    Topology,
    best_seconds,
    last_level_cache,
    meeting_costs,
)
from headrace.bench.scaling_report import Row, shown
from headrace.bench.scaling_run import DecodeTimes, EngineTimes, ScalingWork, decode_times
from headrace.bench.scaling_verdicts import ASSUMPTION_OF, verdicts
from headrace.planning.machine import Machine
from headrace.planning.model_shape import QWEN3_06B
from headrace.planning.scaling import ASSUMPTIONS, Layout, Overhead, Prediction, table_of
from headrace_core.errors import ConfigError
from headrace_core.output import RequestMetrics, StepTimes
from headrace_engine.cores import most_threads

MACHINE = Machine(cores=4, core_read=1e10, node_read=3e10, core_products=1e11)
PYTHON = Overhead(1e-3)
WORK = ScalingWork((1, 8), 16, 32, 2048)


@pytest.fixture
def quick(monkeypatch: pytest.MonkeyPatch) -> None:
    """Little is read and multiplied."""
    pytest.importorskip("headrace_demo")
    monkeypatch.setattr(machine_numbers, "SECONDS", 0.0)
    monkeypatch.setattr(machine_numbers, "LEAST_BYTES", 4 << 20)
    monkeypatch.setattr(machine_numbers, "MOST_BYTES", 8 << 20)


WORDS = ("--batch-sizes", "1,4", "--output-len", "4", "--prompt-len", "100", "--disable-tqdm",
         "--kv-cache-memory-bytes", "8M")  # fmt: skip


@pytest.mark.usefixtures("quick")
def test_the_demo_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "s.json"
    assert scaling.main([*WORDS, "--output-json", str(file)]) == 0
    report = json.loads(file.read_text())
    threads = [row["predicted"]["threads"] for row in report["rows"]]
    assert threads[0] == 1
    assert threads[-1] <= most_threads()
    for row in report["rows"]:
        assert set(row["ratios"]) == {"1 request", "4 requests", "prompt of 100"}
        for batch in ("1", "4"):
            times, predicted = row["measured"]["decode"][batch], row["predicted"]["decode"][batch]
            assert 0 <= times["forward"] <= times["step"]
            assert predicted["ms"] == pytest.approx(sum(predicted["parts_ms"].values()))
        assert row["measured"]["prefill"] > 0
    assert report["machine_numbers"]["core_read"] > 1e6
    assert set(report["by_threads"]) >= set(map(str, threads))
    out = capsys.readouterr().out
    assert all(f"  {name}: {text}" in out for name, text in ASSUMPTIONS.items())
    assert "takes the most" in out


@pytest.mark.usefixtures("quick")
def test_several_nodes_are_measured_with_bound_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """Two cores that are called nodes: what is not near is far."""
    cores = machine_numbers.this_topology().cores
    if len(cores) < 2:
        pytest.skip("one core")
    topology = Topology((cores[:1], cores[1:2]))
    meter = machine_numbers.MachineMeter(topology, "bfloat16", 1 << 30, 1e6)
    counted: list[float] = []

    class Bar:
        def update(self, n: float = 1) -> None:
            counted.append(n)

    machine, by_threads = meter.measure((1, 2), Bar())
    assert len(counted) == meter.steps((1, 2))
    assert (machine.nodes, machine.cores) == (2, 1)
    assert machine.far_core_read > 1e6
    assert machine.link > 1e6
    assert machine.far_line >= machine.line
    assert set(by_threads) == {1, 2}
    assert set(machine_numbers.this_topology().cores) == set(cores)  # nothing stays bound


def test_a_described_machine_is_only_reckoned(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    pytest.importorskip("headrace_demo")
    file = tmp_path / "s.json"
    facts = {"nodes": 2, "cores": 8, "core_read": 1e10, "node_read": 8e10, "core_products": 1e11}
    words = ["--machine", json.dumps(facts), "--threads", "1,16", "--output-json", str(file)]
    assert scaling.main(words) == 0
    report = json.loads(file.read_text())
    assert [row["predicted"]["layout"] for row in report["rows"]] == [
        "one process", *(layout.value for layout in Layout),
    ]  # fmt: skip
    assert all(row["measured"] is None for row in report["rows"])
    assert "PREDICTED, nothing was measured" in capsys.readouterr().out


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--output-len", "1"), "--output-len 1: must be at least 2"),
        (("--prompt-len", "0"), "--prompt-len 0: must be at least 1"),
        (("--num-threads", "2"), "num_threads = 2: must be left out"),
        (("-tp", "2"), "tensor_parallel_size = 2: must be left out"),
        (("--device", "sim"), "device = 'sim': must be cpu"),
        (("--machine", '{"cores": 2}'), "machine: must also have core_read"),
        (("--threads", "1000"), "--threads 1000: must be at most"),
    ],
)
def test_wrong_flags_are_named(words: tuple[str, ...], said: str) -> None:
    pytest.importorskip("headrace_demo")
    with pytest.raises(ConfigError, match=said):
        scaling.main(words)


def test_numbers_of_threads(capsys: pytest.CaptureFixture[str]) -> None:
    assert scaling.numbers("8, 1,2,8") == (1, 2, 8)
    assert scaling.default_threads(1) == (1,)
    assert scaling.default_threads(2) == (1, 2)
    assert scaling.default_threads(48) == (1, 2, 4, 8, 16, 32, 48)
    with pytest.raises(SystemExit):
        scaling.make_parser().parse_args(["--threads", "1,x"])
    assert "must be whole numbers above 0 with commas, as 1,2,8" in capsys.readouterr().err


def test_a_short_context_has_shorter_prompts() -> None:
    args = scaling.make_parser().parse_args([])
    assert scaling.work_of(args, 4096) == ScalingWork((1, 8, 32), 16, 32, 2048)
    assert scaling.work_of(args, 40) == ScalingWork((1, 8, 32), 7, 32, 39)
    with pytest.raises(ConfigError, match="--output-len 32: must be at most 30"):
        scaling.work_of(args, 32)


@pytest.mark.parametrize(("load", "said"), [(0.2, ""), (3.14, "about 3.1 threads of others run")])
def test_a_busy_machine_is_told(
    load: float, said: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(scaling.os, "getloadavg", lambda: (load, 0.0, 0.0), raising=False)
    scaling._warn_if_busy()
    error = capsys.readouterr().err
    assert said in error
    assert bool(error) == bool(said)


# --- settings of engines ----------------------------------------------------------------------

TWO = Topology(((0, 1, 2), (8, 9)))


def test_on_one_node_nothing_is_bound() -> None:
    one = Topology(((0, 1),))
    settings = scaling.run_settings({"model": "m"}, WORK, one, 2, Layout.ONE_PROCESS)
    assert "cpu_bind" not in settings
    assert (settings["num_threads"], settings["max_num_seqs"]) == (2, 8)
    assert settings["max_model_len"] == 2049


def test_on_several_nodes_threads_fill_one_after_the_other() -> None:
    assert TWO.cores_of_node == 2
    settings = scaling.run_settings({}, WORK, TWO, 3, Layout.ONE_PROCESS)
    assert settings["cpu_bind"] == "0-1,8"
    settings = scaling.run_settings({"cpu_bind": "none"}, WORK, TWO, 3, Layout.ONE_PROCESS)
    assert settings["cpu_bind"] == "none"


def test_ranks_have_their_nodes_cores() -> None:
    settings = scaling.run_settings({}, WORK, TWO, 2, Layout.RANK_PER_NODE)
    assert (settings["cpu_bind"], settings["tensor_parallel_size"]) == ("0,8", 2)
    settings = scaling.run_settings({}, WORK, TWO, 4, Layout.RANK_PER_NODE)
    assert settings["cpu_bind"] == "0-1,8-9"


# --- numbers ----------------------------------------------------------------------------------


def test_caches_are_counted_once_where_cores_share_them(tmp_path: Path) -> None:
    for core in range(4):
        for index, (level, shared, size) in enumerate(
            ((1, str(core), "48K"), (3, "0-1" if core < 2 else "2-3", "32768K"))
        ):
            folder = tmp_path / f"sys/devices/system/cpu/cpu{core}/cache/index{index}"
            folder.mkdir(parents=True)
            for name, text in (("level", level), ("shared_cpu_list", shared), ("size", size)):
                (folder / name).write_text(f"{text}\n")
    assert last_level_cache((0, 1), tmp_path) == 32 << 20
    assert last_level_cache((0, 1, 2), tmp_path) == 64 << 20
    assert last_level_cache((9,), tmp_path) == 0


def test_costs_of_meetings() -> None:
    assert meeting_costs({}, 1) == (0.0, 0.0, 0.0)
    assert meeting_costs({2: 8e-6}, 2) == pytest.approx((8e-6, 1e-6, 4e-6))
    costs = meeting_costs({2: 2e-6, 16: 16e-6, 32: 80e-6}, 16)
    assert costs == pytest.approx((2e-6, 1e-6, 4e-6))
    assert meeting_costs({2: 2e-6, 16: 1e-6}, 16)[1] == 0.0  # noise


def test_the_best_of_three_calls_and_more() -> None:
    times = iter([0.0, 0.0, 0.5, 1.0, 1.2, 2.0, 2.3, 3.0, 9.0])
    assert best_seconds(lambda: None, lambda: next(times)) == pytest.approx(0.2)


def request(scheduled: float, first: float, last: float, forward: float) -> RequestMetrics:
    """Of five tokens."""
    return RequestMetrics(
        scheduled_ts=scheduled, first_token_ts=first, last_token_ts=last, num_generation_tokens=5,
        step_times=StepTimes(0.0, forward),
    )  # fmt: skip


def test_a_step_is_timed_from_where_all_decode() -> None:
    late, early = request(1.5, 2.0, 4.0, 2.0), request(0.0, 1.0, 4.0, 2.5)
    times = decode_times([early, late])
    assert times == pytest.approx(DecodeTimes(0.5, 0.4))  # half a second of five steps is no pass
    assert times.python == pytest.approx(0.1)
    assert decode_times([request(1.5, 2.0, 4.0, 2.6)]).python == 0.0  # clocks differ


def test_python_is_what_the_fewest_threads_needed() -> None:
    decode = {1: DecodeTimes(3e-3, 2e-3), 11: DecodeTimes(8e-3, 5e-3)}
    overhead = scaling.overhead_of(EngineTimes(decode, 1.0))
    assert [overhead.of(n) for n in (1, 11)] == pytest.approx([1e-3, 3e-3])
    assert scaling.overhead_of(EngineTimes({8: decode[1]}, 1.0)) == Overhead(pytest.approx(1e-3))


# --- verdicts ---------------------------------------------------------------------------------


def row_of(threads: int = 4):
    [row] = table_of(QWEN3_06B.shape, MACHINE, (threads,), PYTHON, batches=(1,))
    return row


def times_of(row, *, decode: float = 1.0, python: float = 1.0) -> EngineTimes:
    """Times that are so many times the predicted ones."""
    each: Prediction = row.decode[1]
    own = python * PYTHON.step
    step = decode * (each.seconds - PYTHON.step) + own
    return EngineTimes({1: DecodeTimes(step, step - own)}, row.prefill.seconds)


def as_modelled(**changes: float) -> Measured:
    numbers = ThreadNumbers(3e10, 4e11, MACHINE.meeting((4,)))._replace(**changes)
    return Measured(MACHINE, {4: numbers})


def told(times: EngineTimes, measured: Measured) -> list[str]:
    return list(verdicts(row_of(), times, measured, QWEN3_06B.shape, PYTHON))


def test_nothing_is_said_of_what_is_near() -> None:
    row = row_of()
    assert told(times_of(row, decode=1.15), as_modelled()) == []
    shown_rows = [Row(row, times_of(row))]
    assert "within 20 %" in shown("m", MACHINE, shown_rows, measured=True)


@pytest.mark.parametrize(
    ("changes", "times", "assumption", "said"),
    [
        ({"read": 2e10}, {"decode": 1.5}, "memory", "4 threads read 20 GB/s here, 30 by the model"),
        ({"read": 6e10}, {"decode": 0.5}, "memory", "read 60 GB/s"),
        ({"meeting": 2e-4}, {"decode": 1.7}, "starts", "a meeting of 4 threads takes"),
        ({}, {"python": 20.0}, "python", "Python takes 20 ms of a step here, 1 with"),
    ],
)
def test_the_number_that_is_off_is_named(changes, times, assumption, said) -> None:
    [line] = told(times_of(row_of(), **times), as_modelled(**changes))
    assert f"assumption '{assumption}' is off" in line
    assert said in line
    assert line.startswith("4 threads, one process, 1 request: ")


def test_without_a_cause_what_binds_is_doubted() -> None:
    [line] = told(times_of(row_of(), decode=2.0), as_modelled())
    assert "no number of this machine explains it" in line
    assert "doubt assumption 'memory' first" in line


def test_every_part_has_an_assumption() -> None:
    assert set(ASSUMPTION_OF.values()) <= set(ASSUMPTIONS)
