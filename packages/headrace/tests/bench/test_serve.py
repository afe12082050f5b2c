"""``headrace bench serve`` over a real socket, against answers that are known."""

from __future__ import annotations

import asyncio
import json
import math
from types import SimpleNamespace

import pytest
import scripted
from scripted import DONE, Scripted, completion, event, serving, token, usage

from headrace.bench import serve
from headrace_core.errors import ConfigError

FAST = ("--random-input-len", "8", "--random-output-len", "4", "--disable-tqdm")


def _bench(server: Scripted, tmp_path, *words: str) -> dict:
    status = serve.main(["--base-url", server.url, *FAST, "--save-detailed", "--result-dir", str(tmp_path),
                         "--result-filename", "r.json", *words])  # fmt: skip
    result = json.loads((tmp_path / "r.json").read_text())
    result["status"] = status
    return result


def test_times_are_those_of_the_script(tmp_path, capsys):
    """They are longer where the machine is busy, shorter never; a gap is, after a token seen late."""
    steps = [
        (0.20, token("a")),
        (0.05, token("b")),
        (0.15, token("c")),
        (0.0, usage(8, 3)),
        (0.0, DONE),
    ]
    with serving(Scripted(lambda _: steps)) as server:
        result = _bench(server, tmp_path, "--num-prompts", "2")
    assert (result["completed"], result["failed"], result["status"]) == (2, 0, 0)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (16, 6)
    for ttft, e2el, itls, tpot in zip(*(result[k] for k in ("ttfts", "e2els", "itls", "tpots"))):
        assert ttft >= 0.199
        assert e2el >= 0.399
        assert len(itls) == 2
        assert 0.1 <= sum(itls) <= e2el - ttft + 0.001
        assert tpot == pytest.approx((e2el - ttft) / 2)
    assert result["median_ttft_ms"] == pytest.approx(1e3 * sum(result["ttfts"]) / 2)
    assert result["generated_texts"] == ["abc", "abc"]
    assert result["model_id"] == "scripted"
    shown = capsys.readouterr().out
    assert "Median TTFT, ms" in shown
    assert "P99 ITL, ms" in shown


def test_tokens_are_counted_by_the_server_not_by_events(tmp_path, capsys):
    steps = [
        (0.01, token("two tokens")),
        (0.04, token("three more")),
        (0.0, usage(100, 5)),
        (0.0, DONE),
    ]
    with serving(Scripted(lambda _: steps)) as server:
        result = _bench(server, tmp_path, "--num-prompts", "1")
    assert result["output_lens"] == [5]
    assert result["input_lens"] == [100]
    assert result["tpots"][0] == pytest.approx((result["e2els"][0] - result["ttfts"][0]) / 4)
    assert "5 tokens arrived in 2 events" in capsys.readouterr().err


def test_usage_in_every_event_splits_the_gaps(tmp_path):
    def counted(text: str, so_far: int) -> bytes:
        return token(text, usage={"prompt_tokens": 8, "completion_tokens": so_far})

    steps = [(0.01, counted("a", 1)), (0.06, counted("bcd", 4)), (0.0, usage(8, 4)), (0.0, DONE)]
    with serving(Scripted(lambda _: steps)) as server:
        result = _bench(server, tmp_path, "--num-prompts", "1")
    assert len(result["itls"][0]) == 3
    assert sum(result["itls"][0]) >= 0.03


def test_events_without_output_are_no_tokens(tmp_path):
    def chunk(finish=None, **delta) -> bytes:
        return event({"choices": [{"index": 0, "delta": delta, "finish_reason": finish}]})

    steps = [(0.0, chunk(role="assistant", content="")), (0.1, chunk(reasoning="hm")),
             (0.02, chunk(content="so")), (0.0, chunk("stop")), (0.0, usage(8, 2)), (0.0, DONE)]  # fmt: skip
    lines = tmp_path / "lines.jsonl"
    lines.write_text('{"prompt": "why?"}\n')
    with serving(Scripted(lambda _: steps)) as server:
        result = _bench(server, tmp_path, "--backend", "openai-chat", "--dataset-name", "custom",
                        "--dataset-path", str(lines), "--num-prompts", "1")  # fmt: skip
        assert server.requests[-1]["messages"] == [{"role": "user", "content": "why?"}]
    assert result["ttfts"][0] > 0.09, "what has no text is no token"
    assert len(result["itls"][0]) == 1
    assert result["generated_texts"] == ["hmso"]


def test_failures_are_counted_and_shown(tmp_path, capsys):
    turn = iter(range(100))

    def answer(_):
        which = next(turn)
        if which % 3 == 1:
            return [(0.0, event({"error": {"message": "no memory left"}}))]
        if which % 3 == 2:
            return [(0.0, usage(8, 0)), (0.0, DONE)]
        return completion(4)

    with serving(Scripted(answer)) as server:
        result = _bench(server, tmp_path, "--num-prompts", "6", "--ready-check-timeout-sec", "0")
    assert (result["completed"], result["failed"]) == (2, 4)
    assert "no memory left" in capsys.readouterr().err
    assert any("no token arrived" in error for error in result["errors"])


def test_nothing_served_is_a_failure(tmp_path):
    with serving(Scripted(lambda _: [(0.0, b'{"error": "full"}')], status=503)) as server:
        result = _bench(server, tmp_path, "--num-prompts", "2", "--ready-check-timeout-sec", "0")
    assert result["status"] == 1
    assert "HTTP 503" in result["errors"][0]


def test_concurrency_is_never_exceeded(tmp_path):
    with serving(Scripted(lambda _: completion(4, gap=0.005))) as server:
        result = _bench(server, tmp_path, "--num-prompts", "20", "--max-concurrency", "2")
        assert server.most_running == 2
    assert result["max_concurrent_requests"] == 2
    assert all(t <= e for t, e in zip(result["ttfts"], result["e2els"]))


def test_the_rate_is_kept(tmp_path):
    with serving(Scripted(lambda _: completion(2))) as server:
        result = _bench(server, tmp_path, "--num-prompts", "20", "--request-rate", "20")
    # Later on a machine that is busy; earlier never.
    assert result["start_times"][-1] >= 0.99
    assert result["duration"] < 30


def test_an_unreachable_server_fails_after_the_ready_timeout(monkeypatch):
    now, slept, sleep = 0.0, [], asyncio.sleep

    async def pass_time(seconds):
        nonlocal now
        now += seconds
        slept.append(seconds)
        await sleep(0)

    monkeypatch.setattr(serve, "time", SimpleNamespace(monotonic=lambda: now))
    monkeypatch.setattr(serve, "asyncio", SimpleNamespace(run=asyncio.run, sleep=pass_time))
    with pytest.raises(serve.Unreachable, match=r"not ready within 1\.2 s"):
        serve.main(["--base-url", "http://127.0.0.1:9", "--ready-check-timeout-sec", "1.2"])
    assert slept == pytest.approx([0.5, 0.5, 0.2])


def test_a_refusal_is_told_at_once(tmp_path):
    with (
        serving(Scripted(lambda _: [(0.0, b'{"error": "no such field"}')], status=400)) as server,
        pytest.raises(serve.Unreachable, match="no such field"),
    ):
        _bench(server, tmp_path)


def test_requests_carry_what_was_asked_for(tmp_path):
    with serving(Scripted(lambda _: completion(4))) as server:
        _bench(server, tmp_path, "--num-prompts", "3", "--ignore-eos", "--temperature", "0", "--top-k", "5",
               "--extra-body", '{"seed": 7}', "--request-id-prefix", "run-", "--header", "X-Team=core",
               "--api-key", "sesame", "--lora-modules", "a", "b", "--logprobs", "2",
               "--num-warmups", "2")  # fmt: skip
        requests, heads = server.requests, server.headers
    body = requests[-1]
    assert {k: body[k] for k in ("max_tokens", "ignore_eos", "temperature", "top_k", "seed", "logprobs")} == {
        "max_tokens": 4, "ignore_eos": True, "temperature": 0.0, "top_k": 5, "seed": 7, "logprobs": 2,
    }  # fmt: skip
    assert len(body["prompt"]) == 8
    assert [r["model"] for r in requests[-3:]] in (
        ["a", "b", "a"],
        ["b", "a", "a"],
        ["a", "a", "b"],
    )
    assert len(requests) == 1 + 2 + 3  # is it ready, warm-up, run
    assert all("Authorization: Bearer sesame" in head for head in heads)
    assert any("X-Request-Id: run-2" in head and "X-Team: core" in head for head in heads)


def test_the_ready_check_sends_no_measured_prompt(tmp_path):
    with serving(Scripted(lambda _: completion(4))) as server:
        _bench(server, tmp_path, "--num-prompts", "1")
        first, second = server.requests
    assert first["prompt"] != second["prompt"]
    assert len(first["prompt"]) < len(second["prompt"])


def test_goodput_metadata_and_percentiles(tmp_path):
    with serving(Scripted(lambda _: completion(3, gap=0.02))) as server:
        result = _bench(server, tmp_path, "--num-prompts", "4", "--goodput", "ttft:10000", "tpot:0.001",
                        "--metadata", "team=core", "--metric-percentiles", "25,99.9",
                        "--percentile-metrics", "ttft,e2el")  # fmt: skip
    assert result["request_goodput"] == 0.0
    assert result["team"] == "core"
    assert result["p25_ttft_ms"] <= result["p99.9_ttft_ms"]
    assert "mean_itl_ms" not in result


def test_results_can_be_appended(tmp_path):
    with serving(Scripted(lambda _: completion(2))) as server:
        for _ in range(2):
            serve.main(["--base-url", server.url, *FAST, "--num-prompts", "1", "--append-result",
                        "--result-dir", str(tmp_path), "--result-filename", "all.jsonl"])  # fmt: skip
    lines = (tmp_path / "all.jsonl").read_text().splitlines()
    assert [json.loads(line)["completed"] for line in lines] == [1, 1]


def test_embeddings_have_an_end_to_end_latency_only(tmp_path):
    reply = json.dumps({"data": [{"embedding": [1.0]}], "usage": {"prompt_tokens": 8}}).encode()
    with serving(Scripted(lambda _: [(0.03, reply)])) as server:
        result = _bench(server, tmp_path, "--backend", "openai-embeddings", "--num-prompts", "2")
    assert result["completed"] == 2
    assert result["median_e2el_ms"] >= 30
    assert "mean_ttft_ms" not in result


@pytest.mark.parametrize(
    ("words", "said"),
    [
        (("--percentile-metrics", "ttft,speed"), "ttft, tpot, itl, e2el"),
        (("--metric-percentiles", "50,200"), "50,200"),
        (("--goodput", "ttft"), "NAME:VALUE"),
        (("--goodput", "itl:5"), "ttft, tpot or e2el"),
        (("--ramp-up-start-rps", "1"), "--ramp-up-strategy"),
        (("--ramp-up-strategy", "linear"), "--ramp-up-start-rps"),
        (("--max-concurrency", "0"), "--max-concurrency 0"),
        (("--num-prompts", "0"), "--num-prompts 0"),
        (("--header", "X"), "NAME=VALUE"),
        (("--plot", "x.gif"), "x.gif"),
        (
            ("--backend", "openai-chat", "--ready-check-timeout-sec", "0", "--model", "m"),
            "--tokenizer",
        ),
        (
            ("--request-rate", "0", "--ready-check-timeout-sec", "0", "--model", "m"),
            "request rate 0.0",
        ),
    ],
)
def test_wrong_flags_are_named(words, said):
    with pytest.raises(ConfigError, match=said):
        serve.main(list(words))


def test_file_names_tell_the_load():
    args = serve.make_parser().parse_args(["--max-concurrency", "4", "--label", "mine"])
    report = {"request_rate": "inf", "model_id": "/models/x/", "date": "D"}
    assert serve._file_name(args, report) == "mine-infqps-concurrency4-x-D.json"
    assert math.isinf(args.request_rate)


def test_scripted_server_stops():
    with serving(Scripted(lambda _: completion(1))) as server:
        assert server.port > 0
    assert scripted.DONE == b"data: [DONE]\n\n"
