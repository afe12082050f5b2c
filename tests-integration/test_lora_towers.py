"""Adapters of a tower and its projector through the whole engine and a real socket: an image's vectors, and
what is cached of them, belong to the adapter of the request."""

from __future__ import annotations

import base64
import io
import shutil
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple

import openai
import pytest
from lora_adapters import demo_folder
from PIL import Image
from safetensors.torch import load_file, save_file
from servers import serving

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest
from headrace_core.errors import ConfigError, HeadraceError
from headrace_testing.model.adapters import write_adapter

SIZE, INNER, HIDDEN = 160, 512, 192
"""Of the demo model's tower, its layers' inner products, and its decoder."""
TOWER = {
    **{f"vision_tower.encoder.layers.{i}.self_attn.{part}_proj": (SIZE, SIZE)
       for i in range(4) for part in ("q", "v", "out")},
    **{f"vision_tower.encoder.layers.{i}.mlp.fc1": (INNER, SIZE) for i in range(4)},
    "multi_modal_projector.linear_1": (HIDDEN, SIZE),
    "multi_modal_projector.linear_2": (HIDDEN, HIDDEN),
}  # fmt: skip
TEXT = {f"language_model.model.layers.{i}.self_attn.o_proj": (HIDDEN, HIDDEN) for i in range(4)}
PARAMS = SamplingParams(temperature=0, max_tokens=6, logprobs=1, ignore_eos=True)
COMMON: dict[str, Any] = {"dtype": "float32", "enable_lora": True, "block_size": 16}
TOWERS: dict[str, Any] = {**COMMON, "max_loras": 2, "enable_tower_connector_lora": True}


class Tuned(NamedTuple):
    """Adapters of the demo model, and the checkpoint with the same terms in its weights."""

    adapters: dict[str, str]
    merged: dict[str, str]


@pytest.fixture(scope="module")
def tuned(tmp_path_factory: pytest.TempPathFactory) -> Tuned:
    """``one`` and ``two`` change the tower alone, ``both`` also the language model."""
    folder, base = tmp_path_factory.mktemp("towers"), Path(demo_folder("vision"))
    weights = load_file(base / "model.safetensors")
    made = Tuned({}, {})
    for seed, (name, modules) in enumerate(
        {"one": TOWER, "two": TOWER, "both": {**TOWER, **TEXT}}.items()
    ):
        added = write_adapter(folder / name, modules, 8, seed, scale=1.0)
        made.adapters[name] = str(folder / name)
        into = folder / f"{name}-merged"
        shutil.copytree(base, into)
        changed = {f"{module}.weight": term for module, term in added.items()}
        tensors = {key: tensor.float() for key, tensor in weights.items()}
        for key, term in changed.items():
            tensors[key] = tensors[key] + term
        (into / "model.safetensors").unlink()
        save_file(tensors, into / "model.safetensors", metadata={"format": "pt"})
        made.merged[name] = str(into)
    return made


def picture(color: str) -> Any:
    return Image.new("RGB", (96, 96), color)


def prompt(color: str) -> dict[str, Any]:
    return {"prompt": "<image>What is this?", "multi_modal_data": {"image": picture(color)}}


def told(outputs: Any) -> list[Any]:
    """Tokens and their log-probability."""
    probability = [pytest.approx(o.outputs[0].cumulative_logprob, abs=1e-3) for o in outputs]
    return [(list(o.outputs[0].token_ids), p) for o, p in zip(outputs, probability, strict=True)]


@pytest.fixture(scope="module")
def expected(tuned: Tuned) -> dict[str, Any]:
    """What checkpoints with the terms in their weights write of a picture, by adapter; "": the base."""
    found = {}
    for name, folder in {"": demo_folder("vision"), **tuned.merged}.items():
        with LLM(folder, dtype="float32") as llm:
            found[name] = told(llm.generate([prompt("red"), prompt("blue")], PARAMS))
    return found


def test_as_with_the_terms_in_the_weights(tuned: Tuned, expected: dict[str, Any]) -> None:
    """In one batch: the same picture with two adapters and none, then again from what is cached."""
    adapters = {
        name: LoRARequest(name, number, path)
        for number, (name, path) in enumerate(tuned.adapters.items(), 1)
    }
    order = ["one", "", "two", "one", "", "both"]
    with LLM(demo_folder("vision"), **TOWERS) as llm:
        for _ in range(2):
            outputs = llm.generate(
                [prompt("red") for _ in order],
                PARAMS,
                lora_request=[adapters.get(n) for n in order],
            )
            for name, found in zip(order, told(outputs), strict=True):
                assert found == expected[name][0], name
        assert sum(output.num_cached_tokens for output in outputs) > 0
        again = llm.generate(prompt("blue"), PARAMS, lora_request=adapters["two"])
        assert told(again) == expected["two"][1:]
    assert len({str(one[0]) for one in expected.values()}) == 4


def test_through_the_socket(tuned: Tuned, expected: dict[str, Any]) -> None:
    """Many clients at once, each with one model's name; what one has cached is not another's."""
    words = ("--dtype", "float32", "--enable-lora", "--max-loras", "2", "--enable-tower-connector-lora",
             "--enforce-eager", "--max-num-seqs", "8")  # fmt: skip
    modules = [f"{name}={path}" for name, path in tuned.adapters.items()]
    base = demo_folder("vision")
    with (
        serving(
            "--model", base, *words, "--served-model-name", "base", "--lora-modules", *modules
        ) as server,
        openai.OpenAI(base_url=server.api, api_key="none", max_retries=0) as client,
        ThreadPoolExecutor(8) as pool,
    ):
        names = ["base", "one", "two", "both"]
        alone = {name: ask(client, name) for name in names}
        assert len(set(alone.values())) == 4
        calls = names * 4
        assert list(pool.map(lambda name: ask(client, name), calls)) == [alone[n] for n in calls]
    with LLM(tuned.merged["one"], dtype="float32", enforce_eager=True) as llm:
        [output] = llm.chat(messages(), PARAMS)
        chosen = zip(output.outputs[0].token_ids, output.outputs[0].logprobs or (), strict=True)
        probabilities = [by_token[token].logprob for token, by_token in chosen]
        assert probabilities == pytest.approx(alone["one"], abs=1e-3)


def messages() -> list[Any]:
    held = io.BytesIO()
    picture("red").save(held, "png")
    url = "data:image/png;base64," + base64.b64encode(held.getvalue()).decode()
    part = {"type": "image_url", "image_url": {"url": url}}
    return [{"role": "user", "content": [part, {"type": "text", "text": "What is this?"}]}]


def ask(client: openai.OpenAI, model: str) -> tuple[float, ...]:
    """Log-probabilities of the tokens that it writes."""
    answer = client.chat.completions.create(
        model=model, messages=messages(), temperature=0, max_tokens=6, logprobs=True,
        extra_body={"ignore_eos": True},
    )  # fmt: skip
    assert answer.choices[0].logprobs is not None
    return tuple(token.logprob for token in answer.choices[0].logprobs.content or ())


def test_without_the_option_it_is_refused_and_the_flag_is_named(tuned: Tuned) -> None:
    with LLM(demo_folder("vision"), **COMMON) as llm:
        with pytest.raises(HeadraceError, match="--enable-tower-connector-lora") as raised:
            llm.generate("Hello", PARAMS, lora_request=LoRARequest("x", 1, tuned.adapters["one"]))
        assert "vision_tower.encoder.layers.0" in str(raised.value)


def test_a_model_without_towers_refuses_the_option() -> None:
    with pytest.raises(ConfigError, match="enable_tower_connector_lora = True: must be False"):
        LLM(demo_folder(), **TOWERS)
