"""Engines that share the experts of a mixture give what one process gives, and end together."""

from __future__ import annotations

import logging
import os
import re
import signal
import threading
import urllib.error
import urllib.request
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from modes import PROMPTS, SETTINGS
from servers import PATIENCE, SLACK, RunningServer, alive, serving, slow_steps
from shared_experts import SHARED
from test_data_parallel import by_engine, complete, engines
from test_expert_parallel import agree, said

from headrace import LLM
from headrace_core.errors import EngineAsleep, WeightsError
from headrace_testing.sampling import todays
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(3)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("qwen3_moe")
    save_model("qwen3_moe", folder)
    return folder


@pytest.fixture(scope="module")
def whole(folder: Path) -> list[list[tuple[int, float]]]:
    with LLM(str(folder), **SETTINGS) as llm:
        return said(llm, PROMPTS)


def check(folder: Path, expected: Any, settings: dict[str, Any]) -> None:
    """Alone, together and again: the same bits, and the tokens of one process."""
    with LLM(str(folder), **SETTINGS, **settings) as llm:
        alone = [said(llm, [prompt])[0] for prompt in PROMPTS]
        batched = said(llm, PROMPTS)
        assert said(llm, PROMPTS) == batched == alone
        stats = llm.engine.stats()
        assert len(stats.by_engine) == settings["data_parallel_size"]
        assert min(one.generation_tokens for one in stats.by_engine) > 0
    agree(batched, expected)


@pytest.mark.parametrize(
    "moving",
    [{}, {"enable_eplb": True, "eplb_config": {"window_size": 4, "step_interval": 8}}],
    ids=["placed", "moving"],
)
def test_weights_are_read_again(moving: dict[str, Any], whole: Any, tmp_path: Path) -> None:
    """By both engines; where they cannot be read there are none until they can."""
    save_model("qwen3_moe", tmp_path)
    [weights] = tmp_path.glob("*.safetensors")
    content = weights.read_bytes()
    with LLM(str(tmp_path), **SETTINGS, **SHARED, **moving) as llm:
        before = said(llm, PROMPTS)
        assert len(llm.collective_rpc("reload_weights")) == 2
        agree(said(llm, PROMPTS), before)
        weights.write_bytes(content[:-1])
        with pytest.raises(WeightsError, match="truncated"):
            llm.collective_rpc("reload_weights")
        with pytest.raises(EngineAsleep, match="reload_weights comes first"):
            llm.generate(PROMPTS[:1], use_tqdm=False)
        weights.write_bytes(content)
        llm.collective_rpc("reload_weights")
        agree(said(llm, PROMPTS), whole)


def test_two_engines_say_what_one_process_says(folder: Path, whole: Any) -> None:
    """Prompts are cut, while the other engine decodes or has nothing; requests are preempted."""
    check(folder, whole, {**SHARED, "num_gpu_blocks_override": 24})


KINDS: dict[str, dict[str, Any]] = {
    "deepseek_v3": {"tensor_parallel_size": 2},
    "mixtral": {"data_parallel_size": 4, "expert_placement_strategy": "round_robin"},
    "qwen3_next": {"communicator": "gloo", "async_scheduling": False},
    "qwen3_moe": {"max_num_batched_tokens": 128},
}
"""Latent attention, a shared expert, and two ranks of each engine; an expert an engine; layers with states;
experts in whole numbers, which each engine rounds whole."""
ROUNDED = {"qwen3_moe": {"quantization": "experts_int8", "quantization_activations": "float"}}


@pytest.mark.parametrize("kind", todays(KINDS, days=3))
def test_families_and_layouts(kind: str, tmp_path: Path) -> None:
    save_model(kind, tmp_path)
    stored = ROUNDED.get(kind, {})
    with LLM(str(tmp_path), **SETTINGS, **stored) as llm:
        expected = said(llm, PROMPTS)
    check(tmp_path, expected, SHARED | KINDS[kind] | stored)


RECORDED: dict[str, dict[str, Any]] = {
    "qwen3_moe": {},
    "qwen3_next": {"data_parallel_size": 3},
    "deepseek_v3": {"async_scheduling": False},
}
"""Grouped queries; layers with states, one engine being idle now and then; latent attention."""


@pytest.mark.parametrize("kind", todays(RECORDED, days=3))
def test_recorded_steps_give_the_bits_of_eager_ones(
    kind: str,
    tmp_path: Path,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Engines have different numbers of requests, so that steps are padded."""
    save_model(kind, tmp_path)
    found = []
    for eager in (True, False):
        settings = {**SHARED, **RECORDED[kind], "enforce_eager": eager}
        # Engines log from the level that this process does.
        with caplog.at_level(logging.INFO), LLM(str(tmp_path), **SETTINGS, **settings) as llm:
            found.append([said(llm, PROMPTS[:1]), said(llm, PROMPTS), said(llm, PROMPTS[2:5])])
        assert ("captured steps" in capfd.readouterr().err) is not eager
    assert found[0] == found[1]


MOVES: dict[str, dict[str, Any]] = {
    "at once": {},
    "beside passes": {"tensor_parallel_size": 2, "use_async": True},
}


@pytest.mark.parametrize("kind", todays(MOVES, days=2))
def test_experts_that_move_between_engines_change_no_token(
    kind: str,
    folder: Path,
    whole: Any,
    caplog: pytest.LogCaptureFixture,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """They move while one engine has requests, and while both do."""
    own = dict(MOVES[kind])
    ranks = own.pop("tensor_parallel_size", 1)
    moves = {"window_size": 6, "step_interval": 12, "num_redundant_experts": 2, **own}
    settings = {**SHARED, "tensor_parallel_size": ranks, "enable_eplb": True, "eplb_config": moves}
    with caplog.at_level(logging.INFO), LLM(str(folder), **SETTINGS, **settings) as llm:
        for prompts, expected in ((PROMPTS[:1], whole[:1]), (PROMPTS, whole), (PROMPTS, whole)):
            agree(said(llm, prompts), expected)
    assert "experts moved" in capfd.readouterr().err


def words(folder: Path) -> list[str]:
    return ["--model", str(folder), "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128",
            "-dp", "2", "-ep", "--kv-cache-memory-bytes", "32m", "--block-size", "8", "--num-threads", "2"
            ]  # fmt: skip


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(*words(folder)) as running:
        yield running


def tokens(server: RunningServer, index: int, engine: int | None, count: int = 12) -> list[int]:
    """Greedy tokens after a prompt, on an engine."""
    rank = None if engine is None else str(engine)
    answer = complete(server, rank, prompt=PROMPTS[index], max_tokens=count, temperature=0,
                      ignore_eos=True, return_token_ids=True)  # fmt: skip
    return answer["choices"][0]["token_ids"]


def test_an_idle_engine_beside_a_busy_one(server: RunningServer, whole: Any) -> None:
    """Each of them in turn has all requests: waves begin and end between them."""
    for index, expected in enumerate(whole):
        for engine in (0, 1):
            assert tokens(server, index, engine) == [token for token, _ in expected]
    first, second = by_engine(server, "generation_tokens_total")
    assert first == second > 0


def test_requests_that_come_in_the_middle(server: RunningServer, whole: Any) -> None:
    """While engine 0 decodes, requests come to engine 1, one after the other and side by side."""
    expected = [[token for token, _ in one] for one in whole]
    begun = sum(by_engine(server, "generation_tokens_total"))
    with ThreadPoolExecutor(8) as pool:
        long = [pool.submit(tokens, server, 0, 0, 120) for _ in range(3)]
        wait_until(lambda: sum(by_engine(server, "generation_tokens_total")) > begun)
        for index in range(4):
            assert tokens(server, index, 1) == expected[index]
        found = list(pool.map(lambda index: tokens(server, index, index % 2), range(len(PROMPTS))))
        assert found == expected
        answers = [future.result(PATIENCE) for future in long]
    assert answers[0][:12] == expected[0]
    assert answers == [tokens(server, 0, None, 120)] * 3


def test_what_engines_at_rest_cost(server: RunningServer, whole: Any) -> None:
    """Once nothing runs no engine computes, and the first request after that is served."""
    wait_until(lambda: sum(by_engine(server, "num_requests_running")) == 0)
    pids = engines(server)
    before = [_cpu_ticks(pid) for pid in pids]
    for _ in range(1000):  # the front end alone answers
        urllib.request.urlopen(f"{server.url}/livez", timeout=PATIENCE).close()
    assert sum(_cpu_ticks(pid) for pid in pids) - sum(before) < 25
    assert tokens(server, 2, 1) == [token for token, _ in whole[2]]


def _cpu_ticks(pid: int) -> int:
    fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    return int(fields[11]) + int(fields[12])


@pytest.mark.req("REL-03")
def test_a_killed_engine_ends_all(folder: Path) -> None:
    with serving(*words(folder), fresh=True) as server:
        pids = engines(server)
        told: list[str] = []

        def ask(engine: int) -> None:
            """Ask again and again, until that fails."""
            try:
                while True:
                    tokens(server, 1, engine, 100)
            except urllib.error.HTTPError as error:
                told.append(error.read().decode())
            except OSError:  # it was between two requests, and the server has gone
                pass

        clients = [threading.Thread(target=ask, args=(index % 2,)) for index in range(4)]
        for client in clients:
            client.start()
        wait_until(lambda: min(by_engine(server, "generation_tokens_total")) > 200)
        os.kill(pids[1], signal.SIGKILL)
        for client in clients:
            client.join(5 * SLACK)
        assert not any(client.is_alive() for client in clients)
        assert server.process.wait(5 * SLACK) != 0
        pattern = r"engine \d: the engine process ended \(killed by signal 9\).*end together"
        assert any(re.search(pattern, one) for one in told), told
        wait_until(lambda: not any(map(alive, pids)))


def test_stopping_while_requests_run_is_an_orderly_end(folder: Path) -> None:
    """Both engines run passes when the signal comes, and none of their four ranks misses another one."""
    flags = (*words(folder), "-tp", "2", "--drain-timeout", "0")
    with serving(*flags, environment=slow_steps(0.05)) as server:
        with ThreadPoolExecutor(2) as pool:
            asked = [pool.submit(tokens, server, 0, engine, 100) for engine in (0, 1)]
            wait_until(lambda: min(by_engine(server, "num_requests_running")) == 1)
            assert server.stop() == 0
        assert any(future.exception() is not None for future in asked)
    bad = [line for line in server.log if re.search("ERROR|CRITICAL|Traceback|died|has left", line)]
    assert bad == []


@pytest.mark.parametrize(
    ("settings", "text"),
    [
        ({"pipeline_parallel_size": 2}, "parallel.pipeline_parallel_size"),
        ({"tensor_parallel_size": 2, "decode_context_parallel_size": 2},
         "parallel.decode_context_parallel_size.*share the experts"),
        ({"distributed_executor_backend": "ray"}, "parallel.distributed_executor_backend.*'mp', or left"),
        ({"distributed_executor_backend": "external_launcher"}, "distributed_executor_backend"),
        ({"device": "sim"}, "parallel.*must be 1 on device 'sim'"),
        ({"model_impl": "transformers"}, "parallel.enable_expert_parallel.*transformers"),
    ],
)  # fmt: skip
def test_refused_by_name(folder: Path, settings: dict[str, Any], text: str) -> None:
    with pytest.raises((ValueError, LookupError), match=text):
        LLM(str(folder), **{**SETTINGS, **SHARED, **settings})
