"""Engines that share experts sleep and wake together: between two passes, all of them or none."""

from __future__ import annotations

import os
import re
import signal
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import save_model
from modes import PROMPTS, SETTINGS
from safetensors.torch import load_file, save_file
from servers import PATIENCE, RunningServer, alive, serving, slow_steps
from shared_experts import SHARED
from test_data_parallel import by_engine, engines
from test_expert_parallel import agree, said

from headrace import LLM
from headrace_core.errors import EngineAsleep, EngineDead, HeadraceError, WeightsError
from headrace_testing.sampling import todays
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(3)

MOVES = {"window_size": 4, "step_interval": 8, "num_redundant_experts": 2}
GUESSES = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}
LAYOUTS: dict[str, tuple[str, dict[str, Any]]] = {
    "recorded": ("qwen3_moe", {}),
    "two ranks each": ("deepseek_v3", {"tensor_parallel_size": 2, "communicator": "gloo"}),
    "guesses": ("qwen3_next", {"speculative_config": GUESSES, "async_scheduling": False}),
}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_model("qwen3_moe", folder)
    return folder


@pytest.mark.parametrize("layout", todays(LAYOUTS, days=3))
def test_both_levels_leave_outputs_as_they_were(layout: str, tmp_path: Path) -> None:
    family, settings = LAYOUTS[layout]
    save_model(family, tmp_path)
    with LLM(str(tmp_path), **SETTINGS, **SHARED, **settings, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS)
        for level in (1, 2):
            llm.sleep(level=level)
            assert llm.is_sleeping()
            reports = llm.collective_rpc("report")
            assert [report["cache_bytes"] for report in reports] == [0] * len(reports)
            with pytest.raises(EngineAsleep):
                llm.generate(PROMPTS[:1], use_tqdm=False)
            with pytest.raises(HeadraceError, match="wake 'weights' first"):
                llm.wake_up(["kv_cache"])
            llm.wake_up(["weights"])
            with pytest.raises(EngineAsleep):
                llm.generate(PROMPTS[:1], use_tqdm=False)
            llm.wake_up(["kv_cache"])
            if level == 2:
                assert len(llm.collective_rpc("reload_weights")) == len(reports)
            assert said(llm, PROMPTS) == before
        assert min(one.generation_tokens for one in llm.engine.stats().by_engine) > 0


@pytest.mark.parametrize("beside", todays([False, True], days=2))
def test_experts_that_move_begin_anew(folder: Path, beside: bool) -> None:
    """Some may be on their way when the engines fall asleep."""
    moving = {"enable_eplb": True, "eplb_config": {**MOVES, "use_async": beside}}
    with LLM(str(folder), **SETTINGS, **SHARED, **moving, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS)
        for _ in range(2):
            llm.sleep()
            llm.wake_up()
            agree(said(llm, PROMPTS), before)
            agree(said(llm, PROMPTS[:3]), before[:3])


def test_one_engine_that_cannot_wake_lets_all_sleep_on(tmp_path: Path) -> None:
    """The weights of an expert that engine 1 has are damaged; engine 0 could read all of its own."""
    save_model("qwen3_moe", tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    tensors = load_file(str(file))
    damaged = dict(tensors)
    [name] = [name for name in tensors if re.search(r"layers\.1\..*experts\.5\.up_proj", name)]
    damaged[name] = torch.full_like(tensors[name], torch.nan)
    with LLM(str(tmp_path), **SETTINGS, **SHARED, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS)
        for call, after in (
            (llm.wake_up, "wake_up"),
            (lambda: llm.collective_rpc("reload_weights"), "reload_weights comes first"),
        ):
            if call == llm.wake_up:
                llm.sleep()
            save_file(damaged, file, metadata={"format": "pt"})
            with pytest.raises(WeightsError, match=r"^engine 1: .*experts\.5"):
                call()
            with pytest.raises(EngineAsleep, match=after):
                llm.generate(PROMPTS[:1], use_tqdm=False)
            save_file(tensors, file, metadata={"format": "pt"})
            call()
            assert said(llm, PROMPTS) == before


def test_an_engine_that_ends_asleep_ends_all(folder: Path) -> None:
    with LLM(str(folder), **SETTINGS, **SHARED, enable_sleep_mode=True) as llm:
        said(llm, PROMPTS[:2])
        first, second = (report["pid"] for report in llm.collective_rpc("report"))
        llm.sleep()
        os.kill(second, signal.SIGKILL)
        wait_until(lambda: not alive(second) and not alive(first))
        with pytest.raises(EngineDead, match=r"engine 1: .*killed by signal 9.*end together"):
            llm.wake_up()


def words(folder: Path) -> list[str]:
    return ["--model", str(folder), "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128",
            "-dp", "2", "-ep", "--kv-cache-memory-bytes", "32m", "--block-size", "8", "--num-threads", "2",
            "--served-model-name", "mixture", "--enable-sleep-mode", "--dev-mode"]  # fmt: skip


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(*words(folder), environment=slow_steps(0.05)) as running:
        yield running


def post(
    server: RunningServer, path: str, body: Any = None, engine: int | None = None
) -> httpx.Response:
    headers = {} if engine is None else {"X-data-parallel-rank": str(engine)}
    return httpx.post(server.url + path, json=body, headers=headers, timeout=PATIENCE)


def complete(server: RunningServer, engine: int | None = None, count: int = 4) -> httpx.Response:
    body = {"model": "mixture", "prompt": PROMPTS[1], "max_tokens": count, "temperature": 0,
            "ignore_eos": True, "return_token_ids": True}  # fmt: skip
    return post(server, "/v1/completions", body, engine)


def tokens(answer: httpx.Response) -> list[int]:
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def is_sleeping(server: RunningServer) -> bool:
    found: bool = httpx.get(server.url + "/is_sleeping", timeout=PATIENCE).json()["is_sleeping"]
    return found


def test_routes_reach_all_engines(server: RunningServer) -> None:
    before = [tokens(complete(server, engine)) for engine in (0, 1)]
    for path in ("/sleep?level=1", "/sleep?level=2"):
        assert post(server, path).status_code == 200
        assert is_sleeping(server)
        assert by_engine(server, 'engine_sleep_state(?=.*"awake")') == [0.0, 0.0]
        for engine in (0, 1):
            refused = complete(server, engine)
            assert refused.status_code == 503
            assert "wake_up() comes first" in refused.text
        assert post(server, "/wake_up?tags=weights").status_code == 200
        assert is_sleeping(server)
        assert post(server, "/wake_up?tags=kv_cache").status_code == 200
        assert not is_sleeping(server)
        if path.endswith("2"):
            assert complete(server).status_code == 503
            assert post(server, "/collective_rpc", {"method": "reload_weights"}).status_code == 200
        assert [tokens(complete(server, engine)) for engine in (0, 1)] == before


def test_requests_that_run_keep_all_awake(server: RunningServer) -> None:
    with ThreadPoolExecutor(1) as pool:
        begun = sum(by_engine(server, "generation_tokens_total"))
        running = pool.submit(complete, server, 1, 60)
        wait_until(lambda: sum(by_engine(server, "generation_tokens_total")) > begun)
        refused = post(server, "/sleep")
        assert refused.status_code == 400
        assert "must wait until no request runs" in refused.text
        assert not is_sleeping(server)
        assert len(tokens(running.result(PATIENCE))) == 60


def test_requests_wait_while_paused_engines_sleep(server: RunningServer) -> None:
    expected = tokens(complete(server))
    assert post(server, "/pause").status_code == 200
    assert post(server, "/sleep").status_code == 200
    with ThreadPoolExecutor(2) as pool:
        waiting = [pool.submit(complete, server, engine) for engine in (0, 1)]
        assert post(server, "/wake_up").status_code == 200
        assert post(server, "/resume").status_code == 200
        assert [tokens(one.result(PATIENCE)) for one in waiting] == [expected] * 2


def test_engines_that_sleep_run_no_passes(server: RunningServer) -> None:
    assert post(server, "/sleep").status_code == 200
    pids = engines(server)
    before = [_cpu_ticks(pid) for pid in pids]
    for _ in range(1000):  # the front end alone answers
        urllib.request.urlopen(f"{server.url}/livez", timeout=PATIENCE).close()
    assert sum(_cpu_ticks(pid) for pid in pids) - sum(before) < 25
    assert post(server, "/wake_up").status_code == 200


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


def test_a_server_that_sleeps_ends_in_order(folder: Path) -> None:
    """And at once: no engine waits for a pass of the others."""
    with serving(*words(folder)) as server:
        assert post(server, "/sleep?level=2").status_code == 200
        assert post(server, "/wake_up").status_code == 200
        assert server.stop() == 0
    wrong = "ERROR|CRITICAL|Traceback|died|has left|ended first|not told to end"
    bad = [line for line in server.log if re.search(wrong, line)]
    assert bad == []
