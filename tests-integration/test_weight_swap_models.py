"""Weights are swapped in engines of all kinds: each answers as one that was started with the new ones."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import gguf_blocks
import pytest
from families import save_model
from gguf import GGMLQuantizationType as Type
from gguf_blocks import write_demo
from image_checkpoints import picture
from lora_adapters import demo_adapter
from modes import PROMPTS
from pooling_checkpoints import bert
from safetensors.torch import load_file, save_file
from servers import PATIENCE
from weight_checkpoints import make_llama, perturbed

from headrace import LLM, SamplingParams, demo
from headrace_core.lora import LoRARequest

SMALL: dict[str, Any] = {"max_model_len": 256, "kv_cache_memory_bytes": 1 << 23, "num_threads": 2}
GREEDY = SamplingParams(temperature=0, max_tokens=8, ignore_eos=True, logprobs=1)


def bits(output: Any) -> Any:
    """Tokens, and the bits of their log-probabilities."""
    completion = output.outputs[0]
    entries = zip(completion.token_ids, completion.logprobs, strict=True)
    return [(token, entry[token].logprob.hex()) for token, entry in entries]


def texts(llm: LLM) -> Any:
    return [bits(one) for one in llm.generate(["Once upon", "The sum of"], GREEDY, use_tqdm=False)]


def check(
    first: Path | str, second: Path | str, ask: Callable[[LLM], Any] = texts, **settings: Any
) -> None:
    """The engine answers as a fresh one of the second checkpoint, and then again as at first."""
    settings = {**SMALL, **settings}
    with LLM(str(second), **settings) as llm:
        expected = ask(llm)
    with LLM(str(first), **settings) as llm:
        before = ask(llm)
        assert before != expected
        llm.swap_weights(second)
        assert ask(llm) == expected
        llm.swap_weights(first)
        assert ask(llm) == before


@pytest.fixture(scope="module")
def other_demo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return perturbed(demo.path(), tmp_path_factory.mktemp("other") / "demo")


@pytest.mark.parametrize(
    "settings", [{}, {"quantization": "int8"}, {"enforce_eager": True}], ids=str
)
def test_captured_rounded_and_eager(other_demo: Path, settings: dict[str, Any]) -> None:
    check(demo.path(), other_demo, **settings)


def test_packed_weights_take_the_place_of_floats(other_demo: Path, tmp_path: Path) -> None:
    def kind_of(name: str) -> Type:
        return Type.Q8_0

    file = write_demo(tmp_path / "demo.gguf", kind_of, encode=gguf_blocks.rounded)
    floats = tmp_path / "floats"
    shutil.copytree(other_demo, floats)
    for name in ("config.json", "generation_config.json"):  # a GGUF file names one end token
        content = json.loads((floats / name).read_text())
        (floats / name).write_text(json.dumps({**content, "eos_token_id": 2}))
    check(floats, file, dtype="bfloat16", tokenizer=str(demo.path()))


def test_a_recurrent_model(tmp_path: Path) -> None:
    save_model("bamba", tmp_path / "a")
    perturbed(tmp_path / "a", tmp_path / "b")

    def ask(llm: LLM) -> Any:
        prompts: Any = PROMPTS[:3]
        return [bits(one) for one in llm.generate(prompts, GREEDY, use_tqdm=False)]

    settings = {"skip_tokenizer_init": True, "dtype": "float32", "block_size": 8}
    check(tmp_path / "a", tmp_path / "b", ask, **settings)


def test_a_draft_model_stays(other_demo: Path) -> None:
    draft = {"model": str(demo.path()), "num_speculative_tokens": 2}
    check(demo.path(), other_demo, speculative_config=draft)


def test_adapters_are_placed_again(other_demo: Path, tmp_path: Path) -> None:
    adapters = [
        LoRARequest(f"a{seed}", seed, demo_adapter(tmp_path / str(seed), seed)) for seed in (1, 2)
    ]

    def ask(llm: LLM) -> Any:
        found = []
        for lora in (*adapters, None):
            output = llm.generate("Once upon", GREEDY, lora_request=lora, use_tqdm=False)[0]
            found.append(bits(output))
        assert len({json.dumps(one) for one in found}) == 3
        return found

    check(demo.path(), other_demo, ask, enable_lora=True, max_loras=1, max_lora_rank=8)


def test_embedded_pictures_are_forgotten(tmp_path: Path) -> None:
    image = picture(3)
    other = perturbed(demo.path("vision"), tmp_path / "vision")

    def ask(llm: LLM) -> Any:
        message = [
            {"type": "image_pil", "image_pil": image},
            {"type": "text", "text": "What is it?"},
        ]
        chat: Any = [{"role": "user", "content": message}]
        return bits(llm.chat(chat, GREEDY, use_tqdm=False)[0])

    check(demo.path("vision"), other, ask)


def test_a_model_that_embeds(tmp_path: Path) -> None:
    (tmp_path / "a").mkdir()
    bert(tmp_path / "a")
    other = perturbed(tmp_path / "a", tmp_path / "b")

    def ask(llm: LLM) -> Any:
        return [one.outputs.embedding for one in llm.embed(["ab c", "b"], use_tqdm=False)]

    check(tmp_path / "a", other, ask, max_model_len=64)


CHILD = """
import json, resource, sys

from headrace import LLM, SamplingParams
from headrace_core.errors import RequestError

def resident():
    with open("/proc/self/statm") as file:
        return int(file.read().split()[1]) * resource.getpagesize()

llm = LLM(
    sys.argv[1], skip_tokenizer_init=True, dtype="float32", max_model_len=256, num_threads=1,
    kv_cache_memory_bytes=1 << 22,
)
params = SamplingParams(temperature=0, max_tokens=4, detokenize=False, ignore_eos=True)

def answer():
    return llm.generate([{"prompt_token_ids": [1, 2, 3]}], params)[0].outputs[0].token_ids

answer()
weights = llm.collective_rpc("report")[0]["weights_bytes"]
grown, before = [], resident()
wrong = [([1, 2, 3], [0, 0, 0])]
for path, probe in ((sys.argv[2], None), (sys.argv[1], None), (sys.argv[2], wrong), (sys.argv[3], None)):
    try:
        llm.swap_weights(path, probe=probe)
    except RequestError:
        pass
    grown.append(resident() - before)
    answer()
print(json.dumps({"weights": weights, "grown": grown, "version": llm.weights_version}))
"""


@pytest.mark.skipif(not os.path.exists("/proc/self/statm"), reason="resident memory is read there")
def test_memory_returns(tmp_path: Path) -> None:
    """Of the old weights after a swap, of the new ones after one that is given up: with the last tensor of
    a file missing, when all others have been read."""
    sizes = {"hidden_size": 512, "intermediate_size": 2048, "num_hidden_layers": 6}
    paths = [make_llama(tmp_path / str(seed), seed, **sizes) for seed in (0, 1)]
    broken = Path(shutil.copytree(paths[1], tmp_path / "broken"))
    tensors = load_file(broken / "model.safetensors")
    del tensors["model.norm.weight"]
    save_file(tensors, broken / "model.safetensors", metadata={"format": "pt"})
    ran = subprocess.run(
        [sys.executable, "-c", CHILD, *map(str, (*paths, broken))],
        capture_output=True, text=True, timeout=PATIENCE * 2, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    told = json.loads(ran.stdout.splitlines()[-1])
    assert told["version"] == "2"
    assert told["weights"] > 80e6
    assert max(told["grown"]) < 0.4 * told["weights"], told
