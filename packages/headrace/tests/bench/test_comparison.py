"""Tables and bookkeeping of ``benchmarks/``, which only a source tree has."""

from __future__ import annotations

import json
import struct
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

FOLDER = Path(__file__).parents[4] / "benchmarks"
pytestmark = pytest.mark.skipif(not FOLDER.is_dir(), reason="needs the source tree")
sys.path.insert(0, str(FOLDER))


@pytest.fixture
def render():
    return pytest.importorskip("render")


def _lines():
    def line(workload, engine, number, **figures):
        return {"time": "2026-11-21T10:00:00", "workload": workload, "engine": engine, "round": number,
                "model": "m", "precision": "bf16", "others_pct": 1, "steal_pct": 0, **figures}  # fmt: skip

    limits = {"time": "2026-11-21T09:00:00", "workload": "limits", "round": 0, "model": "m",
              "precision": "bf16", "read_gb_s": 50.0, "read_method": "huge pages", "bf16_gflop_s": 900.0,
              "fp32_gflop_s": 200.0, "int8_gop_s": 1800.0}  # fmt: skip
    return [
        {"time": "2026-11-21T09:00:00", "workload": "machine", "cpu": "EPYC", "num_cpus": 2},
        limits,
        *(
            line("decode", "vllm", i, ms_per_token=v, version="9")
            for i, v in enumerate((40, 30, 36))
        ),
        *(line("decode", "headrace", i, ms_per_token=v) for i, v in enumerate((25, 30, 20))),
        line("serve8", "headrace", 0, output_tok_s=150.0, ttft_p50_ms=500.0, tpot_p50_ms=50.0),
        line("serve8", "vllm", 0, output_tok_s=100.0, ttft_p50_ms=250.0, tpot_p50_ms=75.0),
        line("serve8", "openvino", 0, output_tok_s=120.0, ttft_p50_ms=900.0, tpot_p50_ms=60.0),
        {**line("failure", "openvino", 0), "error": "it ended with status 1"},
    ]


def _checkpoint(folder: Path) -> Path:
    folder.mkdir()
    shapes = {"model.embed_tokens.weight": [1000, 64], "model.layers.0.mlp.up_proj.weight": [64, 500_000],
              "model.norm.weight": [64]}  # fmt: skip
    header = json.dumps(
        {n: {"dtype": "BF16", "shape": s, "data_offsets": [0, 0]} for n, s in shapes.items()}
    )
    (folder / "model.safetensors").write_bytes(struct.pack("<Q", len(header)) + header.encode())
    config = {
        "num_hidden_layers": 1,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 32,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def test_tables_have_medians_ratios_and_shares(render, tmp_path):
    _checkpoint(tmp_path / "m")
    text = render.tables(_lines(), tmp_path)
    rows = {(c[1].strip(), c[2].strip()): [x.strip() for x in c[3:-1]]
            for c in (line.split("|") for line in text.splitlines() if line.startswith("| "))}  # fmt: skip
    # 2 bytes of (32 M + 64 k) parameters and 192 tokens of 128 bytes, at 50 GB/s: 1.283 ms
    assert rows["decode, 128 in, 128 out", "ms/token"] == [
        "25 (20-30)", "36 (30-40)", "-", "**1.44x** vllm", "5%",
    ]  # fmt: skip
    assert rows["serving at 8", "output tok/s"][3:] == ["**1.25x** openvino", "-"]
    assert rows["serving at 8", "ms TTFT p50"][3] == "**0.50x** vllm"
    assert "reads 50 GB/s (best: huge pages)" in text
    assert "vllm 9" in text
    assert "openvino on m, bf16: it ended with status 1" in text


def test_fewer_bits_are_compared_with_our_own_bf16(render):
    int8 = [{**line, "precision": "int8", "ms_per_token": 20.0} for line in _lines()
            if line.get("engine") == "headrace" and line["workload"] == "decode"]  # fmt: skip
    assert "headrace on m against its own bf16: int8 decode 1.25x." in render.tables(
        [*_lines(), *int8]
    )


def test_an_engine_that_beats_the_measured_limit_moves_it(render, tmp_path):
    _checkpoint(tmp_path / "m")
    fast = [{**line, "ms_per_token": 1.0} for line in _lines()
            if line["workload"] == "decode" and line["engine"] == "vllm"]  # fmt: skip
    ours = [
        line for line in _lines() if line["workload"] != "decode" or line["engine"] == "headrace"
    ]
    assert "**0.04x** vllm | 4% |" in render.tables([*ours, *fast], tmp_path)


def test_quick_looks_are_shown_only_where_there_is_nothing_else(render):
    quick = [
        {**line, "quick": True, "ms_per_token": 1.0}
        for line in _lines()
        if line["workload"] == "decode"
    ]
    assert render.tables([*_lines(), *quick]) == render.tables(_lines())
    assert "quick look" in render.tables(quick)


def test_limits_of_prefill(render, tmp_path):
    shape = render.shape_of(_checkpoint(tmp_path / "m"))
    assert (shape.linear, shape.head) == (32_000_000, 64_000)
    machine = {"read_gb_s": 50.0, "bf16_gflop_s": 1000.0, "int8_gop_s": 2000.0}
    attention = 4 * 2 * 32 * 2048 * 2049 / 2 / 1e12
    assert render.limit("prefill", "bf16", shape, machine) == pytest.approx(0.131072 + attention)
    assert render.limit("prefill", "int8", shape, machine) == pytest.approx(0.065536 + attention)
    assert render.limit("mixed", "bf16", shape, machine) is None


def test_tables_replace_older_ones(render, tmp_path):
    page = tmp_path / "performance.md"
    page.write_text("# Performance\n\nWords.\n")
    render.write(page, "one\n")
    render.write(page, "two\n")
    assert page.read_text() == f"# Performance\n\nWords.\n\n{render.BEGIN}\ntwo\n{render.END}\n"


def test_a_result_file_that_was_cut_off_can_be_read(render, tmp_path):
    file = tmp_path / "r.jsonl"
    file.write_text('{"workload": "machine"}\n{"workload": "dec')
    assert render.read(file) == [{"workload": "machine"}]


def test_a_comparison_goes_on_where_it_stopped(tmp_path):
    compare = pytest.importorskip("compare")
    done = {
        "round": 0,
        "model": "qwen06",
        "precision": "bf16",
        "engine": "headrace",
        "workload": "decode",
    }
    out = tmp_path / "r.jsonl"
    out.write_text(json.dumps(done) + "\n")
    args = type("Args", (), {"out": str(out), "quick": False, "rounds": 2, "model": ["qwen06"],
                             "precision": ["bf16", "int4"], "only": ["decode", "prefill"],
                             "engines": ["headrace", "llama-bench"], "no_limits": True})()  # fmt: skip
    visits = list(compare.Comparison(args, None, tmp_path)._visits())
    assert [(v.round, v.precision, v.engine, v.workloads) for v in visits] == [
        (0, "bf16", "headrace", ("prefill",)),
        (0, "bf16", "llama-bench", ("decode", "prefill")),
        (0, "int4", "headrace", ("decode",)),
        (0, "int4", "llama-bench", ("decode",)),
        (1, "bf16", "llama-bench", ("decode", "prefill")),  # the next round begins with another
        (1, "bf16", "headrace", ("decode", "prefill")),
        (1, "int4", "llama-bench", ("decode",)),
        (1, "int4", "headrace", ("decode",)),
    ]


def test_homes_come_from_words_and_variables(tmp_path, monkeypatch):
    peers = pytest.importorskip("peers")
    (tmp_path / "a").mkdir()
    (tmp_path / "b").mkdir()
    monkeypatch.setenv("HEADRACE_BENCH_VLLM", str(tmp_path / "a"))
    monkeypatch.setenv("HEADRACE_BENCH_OPENVINO", str(tmp_path / "a"))
    found = peers.homes([f"vllm={tmp_path / 'b'}"])
    assert found == {"vllm": tmp_path / "b", "openvino": tmp_path / "a"}
    for wrong in ("vlm=/x", "vllm", "vllm=/no/such", "headrace=/x"):
        with pytest.raises(ValueError):
            peers.homes([wrong])
    with pytest.raises(peers.Absent, match="HEADRACE_BENCH_LLAMACPP"):
        peers.Peers(found, tmp_path, 2).program("llamacpp", "llama-server")


def test_workloads_are_the_same_for_all_engines_and_new_in_each_round():
    workloads = pytest.importorskip("driven.workloads")
    for name in workloads.OFFLINE:
        assert workloads.requests_of(name, 1) == workloads.requests_of(name, 1)
        assert workloads.requests_of(name, 1) != workloads.requests_of(name, 2)
    [batch] = workloads.requests_of("prefix", 1)
    assert len({tuple(r.prompt[:1024]) for r in batch}) == 1
    batches = workloads.requests_of("decode", 1)
    assert workloads.figures("decode", [1.0, 4.2], batches) == {"ms_per_token": pytest.approx(25.0)}


def test_timing_takes_turns_and_finds_the_faster(monkeypatch):
    timing = pytest.importorskip("timing")
    now = 0.0

    def pass_time(seconds):
        nonlocal now
        now += seconds

    clock = SimpleNamespace(perf_counter=lambda: now, sleep=pass_time)
    monkeypatch.setattr(timing, "time", clock)
    timings = timing.compare({"slow": lambda: pass_time(2e-3), "fast": lambda: pass_time(1e-6)},
                             rounds=3, min_seconds=4e-3)  # fmt: skip
    assert timings["slow"].median == pytest.approx(2e-3)
    assert timings["fast"].median == pytest.approx(1e-6)
    assert timings["fast"].calls > timings["slow"].calls
    row = timing.Row("case", timings, timing.Work(bytes=1e6), timing.Limits(read_bytes_s=1e9))
    assert (
        timing.table([row]).splitlines()[2].endswith("| 50% |")
        or row.limits.seconds(row.work) == 1e-3
    )
    turns = []
    call = timing.rotate([lambda: turns.append(1), lambda: turns.append(2)])
    for _ in range(3):
        call()
    assert turns == [1, 2, 1]
    assert timing.copies_beyond_caches(100 << 20) == 3
