"""Engines of several ranks that sleep: all ranks give their memory back, and say the same bits afterwards."""

from __future__ import annotations

import dataclasses
import os
import resource
import signal
from pathlib import Path
from typing import Any

import httpx
import pytest
import torch
from families import FAMILIES, save_model
from modes import PROMPTS, SETTINGS
from safetensors.torch import load_file, save_file
from servers import PATIENCE, alive, serving
from test_context_parallel import agree, said
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, SamplingParams
from headrace_core.errors import EngineAsleep, EngineDead
from headrace_testing.sampling import todays
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(4)

GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)
TWO: dict[str, Any] = {"tensor_parallel_size": 2}
MOVES = {"window_size": 4, "step_interval": 8, "num_redundant_experts": 2}
GUESSES = {
    "method": "ngram",
    "num_speculative_tokens": 2,
    "prompt_lookup_max": 3,
    "prompt_lookup_min": 1,
}


def resident(pid: int) -> int:
    """Bytes of a process's own memory."""
    pages = Path(f"/proc/{pid}/statm").read_text(encoding="ascii").split()
    return (int(pages[1]) - int(pages[2])) * resource.getpagesize()


@pytest.mark.parametrize(
    ("family", "layout"),
    [
        ("llama", {**TWO, "communicator": "gloo"}),
        ("llama", {"pipeline_parallel_size": 2, "speculative_config": GUESSES}),
        ("gemma3", {**TWO, "pipeline_parallel_size": 2}),
        ("llama", {"prefill_context_parallel_size": 2}),
        ("deepseek_v3", {**TWO, "decode_context_parallel_size": 2}),
        ("qwen3_moe", {**TWO, "enable_expert_parallel": True}),
    ],
    ids=str,
)
def test_both_levels_leave_outputs_as_they_were(
    family: str, layout: dict[str, Any], tmp_path: Path
) -> None:
    save_model(family, tmp_path)
    with LLM(str(tmp_path), **SETTINGS, **layout, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS, GREEDY)
        for level in (1, 2):
            llm.sleep(level=level)
            with pytest.raises(EngineAsleep):
                llm.generate(PROMPTS[:1], GREEDY, use_tqdm=False)
            llm.wake_up(["weights"])
            llm.wake_up()
            if level == 2:
                reports = llm.collective_rpc("reload_weights")
                assert len(reports) == len(llm.collective_rpc("report"))
            assert said(llm, PROMPTS, GREEDY) == before
        llm.collective_rpc("reload_weights")
        assert said(llm, PROMPTS, GREEDY) == before


@pytest.mark.parametrize("layout", todays([{}, {"pipeline_parallel_size": 2}], days=2), ids=str)
def test_experts_that_move_begin_anew(layout: dict[str, Any], tmp_path: Path) -> None:
    """With log-probabilities that differ by the order of sums."""
    save_model("qwen3_moe", tmp_path)
    moving = {"enable_expert_parallel": True, "enable_eplb": True, "eplb_config": MOVES}
    with LLM(str(tmp_path), **SETTINGS, **TWO, **layout, **moving, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS, GREEDY)
        llm.sleep()
        llm.wake_up()
        for _ in range(2):
            agree(said(llm, PROMPTS, GREEDY), before)


def test_experts_on_their_way_do_not_come_into_other_weights(tmp_path: Path) -> None:
    """A move beside steps has begun, and is not over, when other weights are read."""
    save_model("qwen3_moe", tmp_path)
    [file] = tmp_path.glob("*.safetensors")
    others = {
        name: -one if "experts" in name else one for name, one in load_file(str(file)).items()
    }
    moving = {
        "enable_expert_parallel": True, "enable_eplb": True, "eplb_config": {**MOVES, "use_async": True},
    }  # fmt: skip
    with LLM(str(tmp_path), **SETTINGS, **TWO, **moving) as llm:
        said(llm, PROMPTS[-1:], dataclasses.replace(GREEDY, max_tokens=3))
        save_file(others, file, metadata={"format": "pt"})
        llm.collective_rpc("reload_weights")
        now = said(llm, PROMPTS, GREEDY)
    with LLM(str(tmp_path), **SETTINGS) as llm:
        agree(now, said(llm, PROMPTS, GREEDY))


@pytest.fixture(scope="module")
def large_mixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB of experts."""
    folder = tmp_path_factory.mktemp("large-mixture")
    sizes = {"hidden_size": 256, "moe_intermediate_size": 512, "num_experts": 24}
    kind, known = FAMILIES["qwen3_moe"]
    save_model("qwen3_moe", folder, {"qwen3_moe": (kind, {**known, **sizes})})
    return folder


@pytest.fixture(scope="module")
def large(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB of weights."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=768, intermediate_size=2048, num_hidden_layers=5,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=512,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.mark.parametrize(
    ("model", "layout"), [("large", {}), ("large_mixture", {"enable_expert_parallel": True})]
)
def test_memory_of_a_rank_goes_back_and_returns(
    model: str, layout: dict[str, Any], request: pytest.FixtureRequest
) -> None:
    """Of rank 1, which is a process of its own."""
    with LLM(
        str(request.getfixturevalue(model)),
        **{**SETTINGS, **TWO, **layout, "kv_cache_memory_bytes": 48 << 20},
        enable_sleep_mode=True,
    ) as llm:
        said(llm, PROMPTS, GREEDY)
        report = llm.collective_rpc("report")[1]
        rank, held = report["pid"], report["weights_bytes"]
        assert held > 60e6
        awake = resident(rank)
        llm.sleep()
        asleep = resident(rank)
        assert awake - asleep >= 0.9 * held
        llm.wake_up()
        assert resident(rank) - asleep >= 0.75 * held  # what reading left behind is counted in that


def test_a_rank_that_ends_asleep_ends_the_engine(tmp_path: Path) -> None:
    save_model("llama", tmp_path)
    with LLM(str(tmp_path), **SETTINGS, **TWO, enable_sleep_mode=True) as llm:
        rank = llm.collective_rpc("report")[1]["pid"]
        llm.sleep()
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: not alive(rank))
        with pytest.raises(EngineDead, match="rank 1"):
            llm.wake_up()


def test_a_checkpoint_that_is_gone_is_told_and_may_come_back(tmp_path: Path) -> None:
    folder, away = tmp_path / "here", tmp_path / "away"
    folder.mkdir()
    save_model("llama", folder)
    with LLM(str(folder), **SETTINGS, **TWO, enable_sleep_mode=True) as llm:
        before = said(llm, PROMPTS, GREEDY)
        llm.sleep()
        folder.rename(away)
        with pytest.raises(Exception, match="here"):
            llm.wake_up()
        assert llm.is_sleeping()
        away.rename(folder)
        llm.wake_up()
        assert said(llm, PROMPTS, GREEDY) == before


def test_a_server_of_two_ranks_sleeps_and_wakes() -> None:
    words = ["-tp", "2", "--num-threads", "2", "--enable-sleep-mode", "--dev-mode", "--max-model-len", "256",
             "--kv-cache-memory-bytes", "32m", "--served-model-name", "demo"]  # fmt: skip
    body = {"model": "demo", "prompt": "Once", "max_tokens": 8, "temperature": 0}
    with serving(*words) as server:

        def post(path: str, given: Any = None) -> httpx.Response:
            return httpx.post(server.url + path, json=given, timeout=PATIENCE)

        before = post("/v1/completions", body).json()["choices"][0]["text"]
        assert post("/sleep?level=1").status_code == 200
        assert post("/v1/completions", body).status_code == 503
        assert post("/wake_up").status_code == 200
        assert post("/v1/completions", body).json()["choices"][0]["text"] == before
