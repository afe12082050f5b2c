"""``examples/disaggregated_encoder_proxy.py`` in front of two servers."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx2
import openai
import pytest
from image_checkpoints import data_url, picture, save_qwen2_vl
from safetensors.torch import load_file, save_file
from servers import PATIENCE, RunningServer, free_port, serving

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

PROXY = Path(__file__).parents[1] / "examples/disaggregated_encoder_proxy.py"
WORDS = (
    "--dtype", "float32", "--max-model-len", "256", "--block-size", "8", "--kv-cache-memory-bytes",
    "16777216", "--enforce-eager", "--served-model-name", "seer",
)  # fmt: skip
SETTINGS: dict[str, Any] = {"temperature": 0, "max_tokens": 6}


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("seer")
    save_qwen2_vl(folder)
    return folder


@pytest.fixture(scope="module")
def blind(folder: Path) -> Path:
    """The same checkpoint with a tower that sees nothing: right answers need another's vectors."""
    copy = folder.parent / "blind"
    shutil.copytree(folder, copy)
    tensors = load_file(copy / "model.safetensors")
    for name, tensor in tensors.items():
        if "visual" in name:
            tensor.zero_()
    save_file(tensors, copy / "model.safetensors", {"format": "pt"})
    return copy


def parts(*numbers: int) -> list[Any]:
    images = [{"type": "image_url", "image_url": {"url": data_url(picture(n))}} for n in numbers]
    return [{"type": "text", "text": "the water "}, *images]


def chat(*numbers: int) -> list[Any]:
    return [{"role": "user", "content": parts(*numbers)}]


@pytest.fixture(scope="module")
def expected(folder: Path) -> list[str]:
    """Answers about picture 1, 1 and 2, none, 3; by one engine that does it all."""
    params = SamplingParams(**SETTINGS, ignore_eos=True)
    with LLM(
        str(folder), dtype="float32", max_model_len=256, block_size=8, enforce_eager=True,
        kv_cache_memory_bytes=16 << 20, use_tqdm_on_load=False,
    ) as model:  # fmt: skip
        chats = [chat(1), chat(1, 2), chat(), chat(3)]
        return [model.chat(one, params)[0].outputs[0].text for one in chats]


def transfer(role: str, folder: Path) -> tuple[str, ...]:
    extra = {"shared_storage_path": str(folder)}
    config = {
        "ec_connector": "ECExampleConnector",
        "ec_role": role,
        "ec_connector_extra_config": extra,
    }
    return "--ec-transfer-config", json.dumps(config)


@pytest.fixture(scope="module")
def engines(
    folder: Path, blind: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[tuple[RunningServer, RunningServer]]:
    shared = tmp_path_factory.mktemp("vectors")
    with (
        serving(str(folder), *WORDS, *transfer("ec_producer", shared)) as encoder,
        serving(str(blind), *WORDS, *transfer("ec_consumer", shared)) as decoder,
    ):
        yield encoder, decoder


@pytest.fixture(scope="module")
def proxy(engines: tuple[RunningServer, RunningServer]) -> Iterator[str]:
    encoder, decoder = engines
    with free_port() as port:
        words = ["--encoder", encoder.url, "--decoder", decoder.url, "--port", str(port)]
        process = subprocess.Popen(
            [sys.executable, str(PROXY), *words], stderr=subprocess.PIPE, text=True
        )
        url = f"http://127.0.0.1:{port}"

        def answers() -> bool:
            assert process.poll() is None, process.stderr and process.stderr.read()
            try:
                return httpx2.get(f"{url}/health", timeout=5).status_code == 200
            except httpx2.TransportError:
                return False

        try:
            wait_until(answers, PATIENCE, "the proxy did not answer")
            yield url
        finally:
            process.terminate()
            process.wait(PATIENCE)


def test_the_decoder_takes_the_encoders_vectors(
    proxy: str, engines: tuple[RunningServer, RunningServer], expected: list[str]
) -> None:
    client = openai.OpenAI(base_url=f"{proxy}/v1", api_key="x", max_retries=0)

    def asked(*numbers: int, stream: bool = False) -> str:
        made = client.chat.completions.create(
            model="seer",
            messages=chat(*numbers),
            stream=stream,
            extra_body={"ignore_eos": True},
            **SETTINGS,
        )
        if not stream:
            return made.choices[0].message.content or ""
        return "".join(chunk.choices[0].delta.content or "" for chunk in made if chunk.choices)

    assert [model.id for model in client.models.list()] == ["seer"]
    assert asked(1) == expected[0]
    assert asked(1, 2) == expected[1]
    assert asked(1, 2, stream=True) == expected[1]
    assert asked() == expected[2]
    damaged: Any = [
        {"role": "user", "content": [{"type": "image_url", "image_url": {"url": "data:,x"}}]}
    ]
    with pytest.raises(openai.BadRequestError, match=r"messages\[0\]\.content\[0\]\.image_url"):
        client.chat.completions.create(model="seer", messages=damaged)

    encoder, decoder = engines
    # By itself it sees nothing: what it said above was by the encoder's vectors.
    alone = openai.OpenAI(base_url=decoder.api, api_key="x", max_retries=0)
    made = alone.chat.completions.create(
        model="seer", messages=chat(3), extra_body={"ignore_eos": True}, **SETTINGS
    )
    assert made.choices[0].message.content != expected[3]

    encoder.stop()
    assert asked(1) == expected[0]
    assert asked(4)
