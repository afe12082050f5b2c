"""``bench latency``, ``throughput``, ``startup`` and ``serve`` with the demo model."""

from __future__ import annotations

import json
import os
import statistics
import sys

import pytest

from headrace.bench import latency, serve, startup, sweep, throughput
from headrace_core.errors import ConfigError

pytest.importorskip("headrace_demo")
SMALL = (
    "--max-model-len",
    "256",
    "--kv-cache-memory-bytes",
    "8M",
    "--no-use-tqdm-on-load",
    "--disable-tqdm",
)


def test_latency(tmp_path, capsys):
    file = tmp_path / "l.json"
    assert latency.main(["--num-iters", "3", "--num-iters-warmup", "1", "--batch-size", "2", "--input-len",
                         "8", "--output-len", "4", "--output-json", str(file), *SMALL]) == 0  # fmt: skip
    report = json.loads(file.read_text())
    assert len(report["latencies"]) == 3
    assert report["avg_latency"] == pytest.approx(statistics.fmean(report["latencies"]))
    assert list(report["percentiles"]) == ["10", "25", "50", "75", "90", "99"]
    assert report["percentiles"]["50"] == statistics.median(report["latencies"])
    assert "P99, s" in capsys.readouterr().out


def test_latency_leaves_prefix_caching_off_unless_asked():
    assert latency.make_parser().parse_args([]).enable_prefix_caching is False
    assert (
        latency.make_parser().parse_args(["--enable-prefix-caching"]).enable_prefix_caching is True
    )


def test_throughput_totals_are_those_of_the_dataset(tmp_path):
    totals = []
    for more in ((), ("--async-engine",)):
        file = tmp_path / "t.json"
        assert throughput.main(["--num-prompts", "5", "--input-len", "8", "--output-len", "3", "--prefix-len",
                                "4", "--output-json", str(file), *SMALL, *more]) == 0  # fmt: skip
        report = json.loads(file.read_text())
        assert report["num_requests"] == 5
        assert report["total_num_tokens"] == 5 * (4 + 8 + 3)
        assert report["tokens_per_second"] * report["elapsed_time"] == pytest.approx(75)
        totals.append((report["total_input_tokens"], report["total_output_tokens"]))
    assert totals == [(60, 15), (60, 15)]


def test_lengths_that_are_not_stated_fit_into_a_short_context(tmp_path):
    file = tmp_path / "t.json"
    throughput.main(["--num-prompts", "2", "--output-len", "3", *SMALL, "--max-model-len", "64",
                     "--output-json", str(file)])  # fmt: skip
    report = json.loads(file.read_text())
    assert (report["total_input_tokens"], report["total_output_tokens"]) == (2 * 61, 2 * 3)


def test_throughput_of_chats_counts_the_template(tmp_path):
    file = tmp_path / "t.json"
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "hello there"}\n')
    throughput.main(["--backend", "headrace-chat", "--dataset-name", "custom", "--dataset-path", str(lines),
                     "--num-prompts", "2", "--n", "2", "--output-len", "3", "--output-json", str(file),
                     *SMALL])  # fmt: skip
    report = json.loads(file.read_text())
    assert report["total_output_tokens"] == 2 * 2 * 3
    assert report["total_input_tokens"] > 4


def test_startup_has_both_series(tmp_path, monkeypatch, capsys):
    evicted = []
    monkeypatch.setattr(startup, "_evict", evicted.append)
    file = tmp_path / "s.json"
    assert startup.main(["--evict-files", "--num-iters-cold", "1", "--num-iters-warmup", "0",
                         "--num-iters-warm", "1", "--output-json", str(file), *SMALL]) == 0  # fmt: skip
    assert len(evicted) == 1
    report = json.loads(file.read_text())
    for kind in ("cold", "warm"):
        [total], [phases] = report[f"{kind}_startup_times"], report[f"{kind}_phases"]
        assert total == pytest.approx(sum(phases.values()))
        assert {"start Python", "load model", "first token"} <= set(phases)
    assert "total, median" in capsys.readouterr().out


@pytest.mark.skipif(not hasattr(os, "posix_fadvise"), reason="Linux")
def test_cold_starts_find_neither_checkpoint_nor_packed_weights_in_memory(tmp_path, monkeypatch):
    kept = tmp_path / "root" / "packed-weights" / "one.weights"
    kept.parent.mkdir(parents=True)
    for file in (kept, tmp_path / "model.safetensors"):
        file.write_bytes(b"x")
    evicted = []
    monkeypatch.setattr(
        os, "posix_fadvise", lambda fd, *_: evicted.append(os.readlink(f"/proc/self/fd/{fd}"))
    )
    monkeypatch.setenv("HEADRACE_CACHE_ROOT", str(tmp_path / "root"))
    startup._evict(str(tmp_path))
    assert evicted == [str(tmp_path / "model.safetensors"), str(kept)]


@pytest.mark.parametrize(
    ("words", "counts"),
    [
        ((), (0, 3)),
        (("--evict-files",), (3, 3)),
        (("--evict-files", "--num-iters-cold", "1"), (1, 3)),
    ],
)
def test_starts_are_called_cold_only_if_files_are_evicted(monkeypatch, tmp_path, words, counts):
    """Nothing else differs between two starts: each gets the same environment."""
    begun = []
    monkeypatch.setattr(startup, "_evict", lambda model: begun.append("evict"))
    monkeypatch.setattr(startup, "_offline_start", lambda *given: begun.append(given) or {"a": 1.0})
    file = tmp_path / "s.json"
    startup.main([*words, "--num-iters-warmup", "1", "--output-json", str(file), *SMALL])
    cold, warm = counts
    report = json.loads(file.read_text())
    assert (len(report["cold_startup_times"]), len(report["warm_startup_times"])) == counts
    starts = [given for given in begun if given != "evict"]
    assert all(given == starts[0] for given in starts)
    assert begun == ["evict", starts[0]] * cold + [starts[0]] * (1 + warm)


def test_serve_with_our_own_server(tmp_path):
    command = [sys.executable, "-m", "headrace", "serve", *SMALL[:-1]]
    url, command = sweep.address_of(command)
    with sweep.running(command, url, tmp_path / "log", 120):
        status = serve.main(["--base-url", url, "--num-prompts", "20", "--random-input-len", "8",
                             "--random-output-len", "6", "--ignore-eos", "--max-concurrency", "4",
                             "--save-detailed", "--result-dir", str(tmp_path), "--result-filename", "r.json",
                             "--disable-tqdm"])  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    assert (status, result["completed"], result["failed"]) == (0, 20, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (20 * 8, 20 * 6)
    assert all(0 < ttft <= e2el for ttft, e2el in zip(result["ttfts"], result["e2els"]))
    assert result["model_id"] == "headrace-demo"


@pytest.mark.parametrize(
    ("main", "words", "said"),
    [
        (latency.main, ("--num-iters", "0"), "--num-iters 0"),
        (latency.main, ("--plot", "x.bmp"), "x.bmp"),
        (throughput.main, ("--n", "0"), "--n 0"),
        (throughput.main, ("--dataset-name", "custom", "--input-len", "3"), "--input-len"),
        (throughput.main, ("--async-engine", "--backend", "hf"), "--async-engine"),
        (startup.main, ("--num-iters-cold", "-1"), "--num-iters-cold -1"),
        (startup.main, ("--num-iters-cold", "0", "--num-iters-warm", "0"), "nothing to measure"),
        (startup.main, ("--num-iters-cold", "2"), "--num-iters-cold 2: needs --evict-files"),
    ],
)
def test_wrong_flags_are_named(main, words, said):
    with pytest.raises(ConfigError, match=said):
        main(list(words))
