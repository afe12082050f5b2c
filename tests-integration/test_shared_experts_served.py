"""What a server of engines that share experts does beside completions: guesses, adapters and experts that
move, all at once."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
from lora_over_ranks import ONE, Case, made
from modes import PROMPTS
from servers import PATIENCE, RunningServer, serving
from test_data_parallel import by_engine

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.days(3)

KEY = "operators-key"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True)
MOVES = {"window_size": 6, "step_interval": 12, "num_redundant_experts": 2}
GUESSES = {"method": "ngram", "num_speculative_tokens": 3, "prompt_lookup_max": 3, "prompt_lookup_min": 1,
           "adaptive": False}  # fmt: skip


@pytest.fixture(scope="module")
def case(tmp_path_factory: pytest.TempPathFactory) -> Case:
    return made("qwen3_moe", tmp_path_factory.mktemp("served"), ("q_proj", "o_proj"))


@pytest.fixture(scope="module")
def whole(case: Case) -> dict[str, list[list[int]]]:
    """Tokens of one process, without an adapter and with one, by the model's name."""
    with LLM(case.base, **ONE) as llm:
        return {
            name: [
                list(output.outputs[0].token_ids)
                for output in llm.generate(PROMPTS, GREEDY, lora_request=adapter, use_tqdm=False)
            ]
            for name, adapter in (("mixture", None), ("adapted", case.adapters[0]))
        }


@pytest.fixture(scope="module")
def server(case: Case) -> Iterator[RunningServer]:
    words = ["--model", case.base, "--dtype", "float32", "--skip-tokenizer-init", "--max-model-len", "128",
             "-dp", "2", "-ep", "--kv-cache-memory-bytes", "32m", "--block-size", "8", "--num-threads", "2",
             "--served-model-name", "mixture", "--api-key", KEY, "--enable-lora",
             "--allow-runtime-lora-updating", "--enable-eplb", "--eplb-config", json.dumps(MOVES),
             "--speculative-config", json.dumps(GUESSES)]  # fmt: skip
    with serving(*words) as running:
        yield running


def post(
    server: RunningServer, path: str, body: dict[str, Any], engine: int | None = None
) -> httpx.Response:
    headers = {"authorization": f"Bearer {KEY}"}
    if engine is not None:
        headers["X-data-parallel-rank"] = str(engine)
    return httpx.post(f"{server.url}/v1{path}", json=body, headers=headers, timeout=PATIENCE)


def tokens(server: RunningServer, model: str, index: int, engine: int | None = None) -> list[int]:
    """Greedy tokens after a prompt."""
    body = {"model": model, "prompt": PROMPTS[index], "max_tokens": 12, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    answer = post(server, "/completions", body, engine)
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_guesses_and_moves_change_no_token(
    server: RunningServer, whole: dict[str, list[list[int]]]
) -> None:
    """Each engine in turn has all requests while the other one computes for it; then both have some."""
    for engine in (0, 1):
        found = [tokens(server, "mixture", index, engine) for index in range(len(PROMPTS))]
        assert found == whole["mixture"]
    with ThreadPoolExecutor(7) as pool:
        beside = list(pool.map(lambda index: tokens(server, "mixture", index), range(len(PROMPTS))))
    assert beside == whole["mixture"]
    assert min(by_engine(server, "spec_decode_num_draft_tokens_total")) > 0
    moved = [line for line in server.log if "experts moved" in line]
    assert len(moved) >= 3, server.log


def test_adapters_come_and_go_in_every_engine(
    case: Case, server: RunningServer, whole: dict[str, list[list[int]]]
) -> None:
    body = {"lora_name": "adapted", "lora_path": case.adapters[0].lora_path}
    assert post(server, "/load_lora_adapter", body).status_code == 200
    for engine in (0, 1):
        assert tokens(server, "adapted", 3, engine) == whole["adapted"][3] != whole["mixture"][3]
        assert tokens(server, "mixture", 3, engine) == whole["mixture"][3]
    assert post(server, "/unload_lora_adapter", {"lora_name": "adapted"}).status_code == 200
    assert post(server, "/completions", {"model": "adapted", "prompt": [1]}).status_code == 404
