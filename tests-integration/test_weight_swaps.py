"""Other weights take the place of the running ones: no request fails, and no answer is of both."""

from __future__ import annotations

import asyncio
import contextlib
import itertools
import json
import re
import shutil
from collections.abc import Sequence
from functools import partial
from pathlib import Path
from typing import Any

import httpx2
import pytest
from safetensors.torch import load_file, save_file
from servers import PATIENCE, serving
from weight_checkpoints import VOCAB, WEIGHTS, make_faulty, make_llama, perturbed

from headrace import LLM, AsyncLLM, EngineArgs, SamplingParams, demo
from headrace_core.errors import EngineAsleep, RequestError
from headrace_testing.waiting import until

STREAMS = 50
SETTINGS: dict[str, Any] = {
    "skip_tokenizer_init": True, "dtype": "float32", "max_model_len": 128,
    "kv_cache_memory_bytes": 1 << 22, "num_threads": 2,
}  # fmt: skip
FLAGS = (
    "--skip-tokenizer-init", "--dtype", "float32", "--max-model-len", "128", "--kv-cache-memory-bytes",
    str(1 << 22), "--num-threads", "2", "--max-num-seqs", "64", "--dev-mode",
)  # fmt: skip
PROMPTS = [[(7 * i + j * j) % VOCAB for j in range(3 + i % 20)] for i in range(STREAMS)]


def greedy(length: int) -> SamplingParams:
    return SamplingParams(temperature=0, max_tokens=length, detokenize=False, ignore_eos=True)


def length_of(index: int) -> int:
    """Tokens of the answer to a prompt: others for each, or streams that waited together would end so."""
    return 10 + 5 * (index % 17)


@pytest.fixture(scope="module")
def checkpoints(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    folder = tmp_path_factory.mktemp("weights")
    return {name: make_llama(folder / name, seed) for seed, name in enumerate("AB")}


@pytest.fixture(scope="module")
def faulty(
    checkpoints: dict[str, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, tuple[Path, str]]:
    return make_faulty(tmp_path_factory.mktemp("faulty"), checkpoints["B"])


def answers(llm: LLM, prompts: Sequence[list[int]] = PROMPTS) -> list[list[int]]:
    params = [greedy(length_of(index)) for index in range(len(prompts))]
    outputs = llm.generate([{"prompt_token_ids": p} for p in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


@pytest.fixture(scope="module")
def expected(checkpoints: dict[str, Path]) -> dict[str, list[list[int]]]:
    """By checkpoint: the greedy answer to each prompt."""
    found = {}
    for name, path in checkpoints.items():
        with LLM(str(path), **SETTINGS) as llm:
            found[name] = answers(llm)
    assert all(a[0] != b[0] for a, b in zip(*found.values(), strict=True))
    return found


async def streamed(client: httpx2.AsyncClient, index: int) -> tuple[list[int], list[str]]:
    """Tokens and versions of a streamed answer to one of the prompts."""
    body = {
        "prompt": PROMPTS[index], "max_tokens": length_of(index), "temperature": 0, "ignore_eos": True,
        "stream": True, "return_token_ids": True, "return_weights_version": True,
    }  # fmt: skip
    tokens: list[int] = []
    versions: list[str] = []
    async with client.stream("POST", "/v1/completions", json=body) as answer:
        assert answer.status_code == 200
        async for line in answer.aiter_lines():
            if not line.startswith("data: ") or line == "data: [DONE]":
                continue
            event = json.loads(line[6:])
            assert "error" not in event, event
            for choice in event["choices"]:
                tokens += choice.get("token_ids") or []
            versions = event.get("weights_versions", versions)
    return tokens, versions


async def swap(client: httpx2.AsyncClient, path: Path, **options: Any) -> httpx2.Response:
    return await client.post("/swap_weights", json={"path": str(path), **options})


@pytest.mark.req("REL-17")
@pytest.mark.parametrize("processes", [(), ("--api-server-count", "2")], ids=["one", "several"])
async def test_fifty_streams_while_weights_are_swapped(
    processes: tuple[str, ...],
    checkpoints: dict[str, Path],
    expected: dict[str, list[list[int]]],
    faulty: dict[str, tuple[Path, str]],
) -> None:
    name_of, drains = {"0": "A"}, list[float]()
    found: list[tuple[int, list[int], list[str]]] = []
    with serving(str(checkpoints["A"]), *FLAGS, *processes) as server:
        async with httpx2.AsyncClient(
            base_url=server.url,
            timeout=PATIENCE,
            limits=httpx2.Limits(max_connections=STREAMS + 4),
        ) as client:
            done = False

            async def talk(index: int) -> None:
                while not done:
                    found.append((index, *await streamed(client, index)))

            talking = [asyncio.create_task(talk(index)) for index in range(STREAMS)]

            def has_found(count: int) -> bool:
                return len(found) >= count or any(task.done() for task in talking)

            faults = itertools.cycle(faulty.values())
            for round_number in range(1, 7):
                enough = len(found) + STREAMS
                await until(partial(has_found, enough))
                name = "BA"[(round_number - 1) % 2]
                answer = await swap(client, checkpoints[name], weights_version=f"v{round_number}")
                assert answer.status_code == 200, answer.text
                name_of[f"v{round_number}"] = name
                told = answer.json()
                drains.append(told["seconds"]["drain"])
                before = "0" if round_number == 1 else f"v{round_number - 1}"
                assert (told["weights_version"], told["previous_version"]) == (
                    f"v{round_number}",
                    before,
                )
                path, message = next(faults)
                refused = await swap(client, path)
                assert refused.status_code == 400, refused.text
                assert message in refused.json()["error"]["message"], message
                assert (await client.get("/weights_version")).json() == {
                    "weights_version": f"v{round_number}"
                }
            done = True
            await asyncio.gather(*talking)
        assert server.metric("num_requests_running") == 0
    assert len(found) >= 6 * STREAMS
    assert max(drains) > 0, "no swap met running streams"
    for index, tokens, versions in found:
        assert len(versions) == 1
        assert tokens == expected[name_of[versions[0]]][index], (index, versions)
    assert {versions[0] for _, _, versions in found} == set(name_of)


def test_a_faulty_checkpoint_leaves_the_old_one(
    checkpoints: dict[str, Path],
    expected: dict[str, list[list[int]]],
    faulty: dict[str, tuple[Path, str]],
) -> None:
    with LLM(str(checkpoints["A"]), **SETTINGS) as llm:
        for name, (path, message) in faulty.items():
            with pytest.raises(RequestError) as caught:
                llm.swap_weights(path)
            assert message in str(caught.value), name
            assert caught.value.param == "path"
        with pytest.raises(RequestError, match="no such folder or file"):
            llm.swap_weights(checkpoints["A"] / "nothing")
        assert llm.weights_version == "0"
        assert answers(llm) == expected["A"]
        told = llm.swap_weights(checkpoints["B"])
        assert (told["weights_version"], told["previous_version"]) == ("1", "0")
        assert answers(llm) == expected["B"]


def test_probes(checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]) -> None:
    right = list(zip(PROMPTS, expected["B"], strict=True))[:4]
    with LLM(str(checkpoints["A"]), **SETTINGS, max_num_batched_tokens=64) as llm:
        with pytest.raises(
            RequestError, match=r"probe\[4\]: token 0 of its continuation is"
        ) as caught:
            llm.swap_weights(checkpoints["B"], probe=[*right, (PROMPTS[4], expected["A"][4])])
        assert caught.value.param == "probe"
        with pytest.raises(RequestError, match=r"its perplexity on the probes is .* above"):
            llm.swap_weights(checkpoints["B"], probe=[(PROMPTS[9],)], max_perplexity=2)
        with pytest.raises(
            RequestError, match=rf"probe\[0\]: token {VOCAB}: must be below {VOCAB}"
        ):
            llm.swap_weights(checkpoints["B"], probe=[([1], [2, VOCAB])])
        with pytest.raises(RequestError, match=r"probe\[0\]: 130 tokens with its continuation"):
            llm.swap_weights(checkpoints["B"], probe=[([1] * 129, [])])
        assert answers(llm) == expected["A"]
        longest = [index % VOCAB for index in range(120)]  # in two steps
        told = llm.swap_weights(checkpoints["B"], probe=[*right, (longest, ())])
        assert told["perplexity"] > 10
        assert answers(llm) == expected["B"]


def overflowing(folder: Path, sound: Path) -> Path:
    """Finite weights, and hidden states that are not."""
    shutil.copytree(sound, folder)
    tensors = load_file(folder / WEIGHTS)
    for name, tensor in tensors.items():
        if name.endswith(("down_proj.weight", "up_proj.weight")):
            tensor *= 1e25
    save_file(tensors, folder / WEIGHTS, metadata={"format": "pt"})
    return folder


def test_weights_that_compute_no_numbers(checkpoints: dict[str, Path], tmp_path: Path) -> None:
    with LLM(str(checkpoints["A"]), **SETTINGS) as llm:
        with pytest.raises(RequestError, match=r"fail their probe: .* not finite"):
            llm.swap_weights(overflowing(tmp_path / "large", checkpoints["B"]))
        assert llm.weights_version == "0"


async def test_an_async_engine_and_one_that_sleeps(
    checkpoints: dict[str, Path], expected: dict[str, list[list[int]]]
) -> None:
    llm = AsyncLLM.from_engine_args(
        EngineArgs(model=str(checkpoints["A"]), **SETTINGS, enable_sleep_mode=True)
    )

    async def answer(name: str) -> Any:
        prompt: Any = {"prompt_token_ids": PROMPTS[0]}
        outputs = llm.generate(prompt, greedy(length_of(0)), name)
        return [output async for output in outputs][-1]

    probe = [(PROMPTS[1], expected["B"][1])]
    told = await llm.swap_weights(checkpoints["B"], weights_version="b", probe=probe)
    assert told["previous_version"] == "0"
    answered = await answer("after")
    assert answered.weights_versions == ("b",)
    assert answered.outputs[0].token_ids == expected["B"][0]
    await llm.sleep()
    with pytest.raises(EngineAsleep):
        await llm.swap_weights(checkpoints["A"])
    await llm.wake_up()
    answered = await answer("awake")
    assert answered.weights_versions == ("b",)
    assert answered.outputs[0].token_ids == expected["B"][0], "waking reads what served before"
    await llm.collective_rpc("reload_weights")
    assert (await answer("reloaded")).outputs[0].token_ids == expected["B"][0]
    await llm.shutdown()


CHAT = {"messages": [{"role": "user", "content": "Hi"}], "max_tokens": 6, "temperature": 0}
ASKED = {"return_weights_version": True}


async def test_what_a_server_tells(tmp_path: Path) -> None:
    other = perturbed(demo.path(), tmp_path / "demo")
    async with contextlib.AsyncExitStack() as stack:
        server = stack.enter_context(serving("--dev-mode"))
        client = await stack.enter_async_context(
            httpx2.AsyncClient(base_url=server.url, timeout=PATIENCE)
        )

        async def ask(path: str, body: Any) -> Any:
            answer = await client.post(path, json=body)
            assert answer.status_code == 200, answer.text
            return answer.json()

        async def events(path: str, body: Any) -> list[Any]:
            answer = await client.post(path, json={**body, "stream": True})
            lines = [line[6:] for line in answer.text.splitlines() if line.startswith("data: ")]
            return [json.loads(line) for line in lines if line != "[DONE]"]

        async def told() -> tuple[str, str, str]:
            info = (await client.get("/server_info")).json()["weights_version"]
            fingerprint = (await client.get("/v1/system/determinism")).json()["system_fingerprint"]
            metrics = (await client.get("/metrics")).text
            (version,) = re.findall(
                r'headrace:weights_info\{.*weights_version="(.*)"\} 1.0', metrics
            )
            return info, version, fingerprint

        before = await ask("/v1/chat/completions", CHAT)
        assert before["weights_versions"] is None
        assert await told() == ("0", "0", before["system_fingerprint"])
        swapped = await ask(
            "/swap_weights",
            {"path": str(other), "weights_version": "step 1200", "probe": [{"prompt": "Once upon"}],
             "max_perplexity": 1e9},
        )  # fmt: skip
        assert swapped["perplexity"] > 1
        for path, body in (
            ("/v1/chat/completions", CHAT),
            ("/v1/completions", {"prompt": ["Once", "upon"], "max_tokens": 6, "seed": 1, "n": 2}),
            ("/v1/completions", {"prompt": "Once", "max_tokens": 4, "use_beam_search": True, "n": 2}),
        ):  # fmt: skip
            whole = await ask(path, {**body, **ASKED})
            assert whole["weights_versions"] == ["step 1200"]
            assert whole["system_fingerprint"] not in (before["system_fingerprint"], "")
            assert (await ask(path, body))["weights_versions"] is None
            if "use_beam_search" in body:
                continue
            streamed = await events(path, {**body, **ASKED})
            assert {event["system_fingerprint"] for event in streamed} == {
                whole["system_fingerprint"]
            }
            for event in streamed:
                ends = any(choice["finish_reason"] for choice in event["choices"])
                assert event.get("weights_versions") == (["step 1200"] if ends else None)
            assert any("weights_versions" in event for event in streamed)
            assert not any("weights_versions" in event for event in await events(path, body))
        batch = {"messages": [CHAT["messages"]] * 2, "max_tokens": 4, "temperature": 0, **ASKED}
        found = await ask("/v1/chat/completions/batch", batch)
        assert found["weights_versions"] == ["step 1200"]
        assert await told() == ("step 1200", "step 1200", found["system_fingerprint"])
        refused = await client.post("/swap_weights", json={"path": str(other), "versoin": "x"})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "versoin")
        refused = await client.post("/swap_weights", json={"path": str(tmp_path / "nothing")})
        assert (refused.status_code, refused.json()["error"]["param"]) == (400, "path")
        assert "no such folder or file" in refused.json()["error"]["message"]
