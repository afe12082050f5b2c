"""Adapters that come and go at a server whose model is divided over two processes, or on two stages."""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from lora_adapters import demo_adapter, demo_folder
from servers import serving

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest

pytestmark = pytest.mark.days(3)

KEY = "operators-key"
FLAGS = (
    "--dtype", "float32", "--enable-lora", "--allow-runtime-lora-updating", "--api-key", KEY,
    "--enforce-eager", "--max-num-seqs", "4", "--max-model-len", "256",
)  # fmt: skip
BASE, PROMPT, NUM_TOKENS = "headrace-demo", "Hello! What can you do?", 8


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("adapters")
    for seed, name in enumerate(("one", "two")):
        demo_adapter(made / name, seed)
    demo_adapter(made / "large", 9, rank=64)
    return made


@pytest.fixture(scope="module")
def offline(folder: Path) -> dict[str, str]:
    """What the models write on one rank, by name."""
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    adapters = [LoRARequest(name, i, str(folder / name)) for i, name in ((1, "one"), (2, "two"))]
    with LLM(demo_folder(), dtype="float32", enable_lora=True, max_model_len=256) as llm:
        outputs = llm.generate([PROMPT] * 3, params, lora_request=[None, *adapters])
    written = {n: o.outputs[0].text for n, o in zip((BASE, "one", "two"), outputs, strict=True)}
    assert len(set(written.values())) == 3
    return written


@pytest.fixture(scope="module", params=["-tp", "-pp"])
def client(request: pytest.FixtureRequest) -> Iterator[openai.OpenAI]:
    with (
        serving(*FLAGS, request.param, "2") as server,
        openai.OpenAI(base_url=server.api, api_key=KEY, max_retries=0) as made,
    ):
        yield made


def write(client: openai.OpenAI, model: str) -> str:
    answer = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=NUM_TOKENS, temperature=0
    )
    return answer.choices[0].text


def change(client: openai.OpenAI, what: str, **body: Any) -> str:
    return client.post(f"/{what}_lora_adapter", body=body, cast_to=str)


def test_load_replace_unload(
    client: openai.OpenAI, folder: Path, offline: dict[str, str], tmp_path: Path
) -> None:
    change(client, "load", lora_name="extra", lora_path=str(folder / "one"))
    assert write(client, "extra") == offline["one"]
    change(client, "load", lora_name="extra", lora_path=str(folder / "two"), load_inplace=True)
    assert write(client, "extra") == offline["two"]
    assert write(client, BASE) == offline[BASE]
    change(client, "unload", lora_name="extra")
    with pytest.raises(openai.NotFoundError):
        write(client, "extra")
    shutil.copytree(folder / "one", tmp_path / "again")
    change(client, "load", lora_name="extra", lora_path=str(tmp_path / "again"))
    assert write(client, "extra") == offline["one"]


def test_what_cannot_be_used_is_refused_and_the_rest_goes_on(
    client: openai.OpenAI, folder: Path, offline: dict[str, str]
) -> None:
    with pytest.raises(openai.BadRequestError, match=r"64.*16|16.*64"):
        change(client, "load", lora_name="large", lora_path=str(folder / "large"))
    with pytest.raises(openai.NotFoundError):
        change(client, "load", lora_name="none", lora_path=str(folder / "none"))
    assert write(client, BASE) == offline[BASE]


def test_files_that_vanish_while_their_adapter_is_out_of_memory(
    client: openai.OpenAI, folder: Path, offline: dict[str, str], tmp_path: Path
) -> None:
    """The host's memory has room for one."""
    shutil.copytree(folder / "one", tmp_path / "fleeting")
    change(client, "load", lora_name="fleeting", lora_path=str(tmp_path / "fleeting"))
    change(client, "load", lora_name="staying", lora_path=str(folder / "two"))
    assert write(client, "staying") == offline["two"]
    shutil.rmtree(tmp_path / "fleeting")
    with pytest.raises(openai.InternalServerError):
        write(client, "fleeting")
    assert write(client, "staying") == offline["two"]
