"""Engines that sleep: memory goes back to the system and returns, and outputs stay the same to the bit."""

from __future__ import annotations

import asyncio
import json
import os
import shutil
import subprocess
import sys
import urllib.error
import urllib.request
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from servers import PATIENCE, serving
from transformers import LlamaConfig, LlamaForCausalLM

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams, demo
from headrace.assembly.core import check_can_sleep
from headrace_core.errors import ConfigError, EngineAsleep, RequestError, UnsupportedFeature

HIDDEN = 768
PROMPT = {"prompt_token_ids": list(range(1, 100))}

CHILD = f"""
import json, resource, sys

from headrace import LLM, SamplingParams
from headrace_core.lora import LoRARequest

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=256, num_threads=1,
    kv_cache_memory_bytes=48 << 20, kv_cache_ahead_bytes=-1, enable_lora=True, max_lora_rank=8,
    enable_sleep_mode=True,
)
params = SamplingParams(
    temperature=0, max_tokens=6, logprobs=3, detokenize=False, ignore_eos=True
)
prompt = {PROMPT!r}

def answers():
    found = []
    for adapter in (None, LoRARequest("a", 1, sys.argv[2])):
        answer = llm.generate([prompt], params, lora_request=adapter)[0]
        top = [{{i: e.logprob.hex() for i, e in at.items()}} for at in answer.outputs[0].logprobs]
        found.append([answer.outputs[0].token_ids, top, answer.num_cached_tokens])
    return found

first = answers()
report = llm.collective_rpc("report")[0]
told = {{
    "held": report["weights_bytes"] + report["cache_bytes"], "same": [], "fell": [], "returned": [],
    "adapter_changes": first[0][:2] != first[1][:2],
}}
for level in (1, 2):
    awake = resident()
    llm.sleep(level)
    asleep = resident()
    llm.wake_up()
    if level == 2:
        llm.collective_rpc("reload_weights")
    told["same"].append(answers() == first)
    told["fell"].append(awake - asleep)
    told["returned"].append(resident() - asleep)
print(json.dumps(told))
"""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """About 150 MB of weights."""
    folder = tmp_path_factory.mktemp("large")
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=1000, hidden_size=HIDDEN, intermediate_size=2048, num_hidden_layers=5,
        num_attention_heads=12, num_key_value_heads=4, max_position_embeddings=512,
        initializer_range=0.05,
    )  # fmt: skip
    LlamaForCausalLM(config).save_pretrained(folder)
    return folder


@pytest.fixture(scope="module")
def adapter(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("adapter")
    settings = {"peft_type": "LORA", "r": 4, "lora_alpha": 8, "target_modules": ["o_proj"]}
    (folder / "adapter_config.json").write_text(json.dumps(settings))
    torch.manual_seed(1)
    name = "base_model.model.model.layers.{}.self_attn.o_proj.lora_{}.weight"
    tensors = {name.format(i, "A"): torch.randn(4, HIDDEN) for i in range(5)}
    tensors |= {name.format(i, "B"): torch.randn(HIDDEN, 4) for i in range(5)}
    save_file(tensors, folder / "adapter_model.safetensors")
    return folder


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read there")
def test_memory_goes_back_and_outputs_stay(checkpoint: Path, adapter: Path) -> None:
    """In a process of its own, in which nothing else takes memory."""
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, str(checkpoint), str(adapter)],
        capture_output=True, text=True, timeout=PATIENCE * 2, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["held"] > 150e6
    assert told["adapter_changes"]
    assert told["same"] == [True, True], (
        "bits of log-probabilities, and nothing came from the cache"
    )
    for change in (*told["fell"], *told["returned"]):
        assert change >= 0.9 * told["held"], told


def text_of(llm: LLM) -> Any:
    return llm.generate("Once", SamplingParams(temperature=0, max_tokens=4))[0].outputs[0].text


def test_the_order_of_calls() -> None:
    """Of an engine with a draft model, which sleeps and wakes with the other."""
    draft = {"model": str(demo.path()), "num_speculative_tokens": 2}
    settings: dict[str, Any] = {
        "max_model_len": 128, "kv_cache_memory_bytes": 1 << 22, "speculative_config": draft,
    }  # fmt: skip
    with LLM(str(demo.path()), **settings, enable_sleep_mode=True) as llm:
        before = text_of(llm)
        llm.sleep(level=2)
        assert llm.is_sleeping()
        with pytest.raises(EngineAsleep, match=r"sleeps \(weights, kv_cache\) .* wake_up\(\)"):
            text_of(llm)
        with pytest.raises(RequestError, match="wake 'weights' first"):
            llm.wake_up(["kv_cache"])
        with pytest.raises(
            RequestError, match=r"tags = .*must be a list of 'weights' or 'kv_cache'"
        ):
            llm.wake_up(["weight"])
        with pytest.raises(RequestError, match="the weights sleep"):
            llm.collective_rpc("reload_weights")
        llm.wake_up(("weights",))
        llm.wake_up()
        assert not llm.is_sleeping()
        with pytest.raises(EngineAsleep, match="reload_weights comes first"):
            text_of(llm)
        llm.collective_rpc("reload_weights")
        assert text_of(llm) == before
        llm.sleep()
        llm.wake_up(["weights"])
        assert llm.is_sleeping()
        llm.wake_up(["kv_cache"])
        assert text_of(llm) == before


async def test_requests_wait_if_it_is_paused() -> None:
    params = SamplingParams(temperature=0, max_tokens=4)
    args = EngineArgs(
        model=str(demo.path()),
        max_model_len=128,
        kv_cache_memory_bytes=1 << 20,
        enable_sleep_mode=True,
    )
    llm = AsyncLLM.from_engine_args(args)

    async def text(name: str) -> str:
        return [o async for o in llm.generate("Once", params, name)][-1].outputs[0].text

    before = await text("before")
    await llm.pause_generation()
    await llm.sleep()
    waiting = asyncio.create_task(text("waits"))
    while not (await llm.stats()).num_requests_waiting:
        await asyncio.sleep(0)
    await llm.wake_up(["weights"])
    assert await llm.is_sleeping()
    await llm.wake_up()
    assert not await llm.is_sleeping()
    assert not waiting.done()
    await llm.resume_generation()
    assert await waiting == before
    await llm.shutdown()


def test_a_device_whose_memory_is_not_given_back() -> None:
    resolved: Any = SimpleNamespace(platform=SimpleNamespace(device="xpu"))
    with pytest.raises(ConfigError, match="must be False on the device 'xpu'") as caught:
        check_can_sleep(resolved)
    assert caught.value.field == "device.enable_sleep_mode"
    check_can_sleep(SimpleNamespace(platform=SimpleNamespace(device="cuda")))  # type: ignore[arg-type]


def test_where_it_is_not_enabled() -> None:
    with LLM(str(demo.path()), max_model_len=128, kv_cache_memory_bytes=1 << 20) as llm:
        with pytest.raises(UnsupportedFeature, match="start it with enable_sleep_mode=True"):
            llm.sleep()
        assert not llm.is_sleeping()
    with pytest.raises(ConfigError, match=r"enable_sleep_mode = True: must be False .*Sim"):
        LLM(str(demo.path()), device="sim", enable_sleep_mode=True)


def ask(url: str, body: object = None, method: str = "POST") -> tuple[int, Any]:
    data = b"" if body is None else json.dumps(body).encode()
    sent = {"Content-Type": "application/json"} if data else {}
    request = urllib.request.Request(url, data if method == "POST" else None, sent, method=method)
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            status, text = response.status, response.read()
    except urllib.error.HTTPError as error:
        status, text = error.code, error.read()
    return status, json.loads(text) if text[:1] == b"{" else text.decode()


def test_over_http() -> None:
    """Two HTTP processes, and the engine in a third."""
    body = {"prompt": "Once", "max_tokens": 4, "temperature": 0, "logprobs": 1}
    with serving("--dev-mode", "--enable-sleep-mode", "--api-server-count", "2") as server:
        url, completions = server.url, server.api + "/completions"
        before = ask(completions, body)[1]["choices"]
        assert ask(url + "/sleep?level=3")[0] == 400
        assert ask(url + "/sleep?level=1") == (200, "")
        for _ in range(4):  # whichever process answers
            assert ask(url + "/is_sleeping", method="GET") == (200, {"is_sleeping": True})
            assert server.status("/readyz") == 503
            for stream in (False, True):
                status, answer = ask(completions, {**body, "stream": stream})
                assert (status, answer["error"]["headrace_code"]) == (503, "HR-ENG-003")
        assert server.status("/health") == 200
        status, answer = ask(url + "/wake_up?tags=cache")
        assert (status, answer["error"]["param"]) == (400, "tags")
        assert ask(url + "/wake_up?tags=weights") == (200, "")
        assert ask(url + "/is_sleeping", method="GET")[1] == {"is_sleeping": True}
        assert ask(url + "/wake_up?tags=weights&tags=kv_cache") == (200, "")
        assert ask(url + "/is_sleeping", method="GET")[1] == {"is_sleeping": False}
        assert ask(completions, body)[1]["choices"] == before
        assert server.status("/readyz") == 200


def test_weights_that_cannot_be_read_again(tmp_path: Path) -> None:
    """Their file has gone, and comes back."""
    folder = shutil.copytree(demo.path(), tmp_path / "model")
    (weights,) = folder.glob("*.safetensors")
    body, reload = (
        {"prompt": "Once", "max_tokens": 4, "temperature": 0},
        {"method": "reload_weights"},
    )
    options = ("--dev-mode", "--max-model-len", "128", "--enable-sleep-mode")
    with serving(str(folder), *options) as server:
        rpc, completions = server.url + "/collective_rpc", server.api + "/completions"
        before = ask(completions, body)[1]["choices"]
        weights.rename(tmp_path / "away")
        self_explaining(*ask(rpc, reload))
        status, answer = ask(completions, body)
        assert (status, answer["error"]["headrace_code"]) == (503, "HR-ENG-003")
        assert server.status("/readyz") == 503
        (tmp_path / "away").rename(weights)
        assert ask(rpc, reload)[0] == 200
        assert server.status("/readyz") == 200
        assert ask(completions, body)[1]["choices"] == before
        # Nor when it is to wake: the weights sleep on.
        assert ask(server.url + "/sleep?level=1")[0] == 200
        weights.rename(tmp_path / "away")
        self_explaining(*ask(server.url + "/wake_up"))
        assert ask(server.url + "/is_sleeping", method="GET")[1] == {"is_sleeping": True}
        (tmp_path / "away").rename(weights)
        assert ask(server.url + "/wake_up")[0] == 200
        assert ask(completions, body)[1]["choices"] == before


def self_explaining(status: int, answer: Any) -> None:
    """The call failed, and its answer says why."""
    assert (status, answer["error"]["headrace_code"]) == (500, "HR-MOD-002")
    assert "no weights found" in answer["error"]["message"]
