"""Images and constraints in a server of engines that share experts: what one process says."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import torch
from image_checkpoints import data_url, picture, save_llama4
from modes import SETTINGS
from servers import RunningServer, serving
from test_data_parallel import by_engine, post

from headrace import LLM, SamplingParams
from headrace.sampling_params import StructuredOutputsParams

pytestmark = pytest.mark.days(3)

LENGTH = 24
IMAGES: list[list[int]] = [[1], [2, 3], [], [1]]
"""Numbers of the pictures of each chat; the last one comes again."""
FORMS: list[dict[str, Any]] = [
    {"choice": ["a red house", "the blue one"]},
    {"regex": r"[0-9]{3}-[a-f]{4}"},
    {"json": {"type": "object", "properties": {"ok": {"type": "boolean"}}, "required": ["ok"],
              "additionalProperties": False}},
]  # fmt: skip


def chat(numbers: list[int]) -> list[Any]:
    pictures = [{"type": "image_url", "image_url": {"url": data_url(picture(n))}} for n in numbers]
    return [{"role": "user", "content": [{"type": "text", "text": "the "}, *pictures]}]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    made = tmp_path_factory.mktemp("llama4")
    torch.manual_seed(0)
    save_llama4(made)
    return made


@pytest.fixture(scope="module")
def whole(folder: Path) -> tuple[list[list[int]], list[str]]:
    """Tokens of the chats, and texts of the forms, of one process."""
    settings = {**SETTINGS, "skip_tokenizer_init": False, "max_model_len": 256}
    with LLM(str(folder), **settings) as llm:
        plain = SamplingParams(temperature=0, max_tokens=LENGTH, ignore_eos=True)
        chats = llm.chat([chat(numbers) for numbers in IMAGES], plain, use_tqdm=False)
        texts = [
            llm.generate(
                ["the"],
                SamplingParams(temperature=0, max_tokens=LENGTH,
                               structured_outputs=StructuredOutputsParams(**form)),
                use_tqdm=False,
            )[0].outputs[0].text
            for form in FORMS
        ]  # fmt: skip
    return [list(one.outputs[0].token_ids) for one in chats], texts


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    words = ["--model", str(folder), "--dtype", "float32", "--max-model-len", "256", "-dp", "2", "-ep",
             "--kv-cache-memory-bytes", "32m", "--block-size", "8", "--num-threads", "2"]  # fmt: skip
    with serving(*words) as running:
        yield running


def seen(server: RunningServer, index: int, engine: int | None) -> list[int]:
    """Tokens after a chat with images, on an engine."""
    body = {"messages": chat(IMAGES[index]), "max_tokens": LENGTH, "temperature": 0, "ignore_eos": True,
            "return_token_ids": True}  # fmt: skip
    answer = post(server, "/v1/chat/completions", body, None if engine is None else str(engine))
    found: list[int] = answer["choices"][0]["token_ids"]
    return found


def formed(server: RunningServer, index: int, engine: int | None) -> str:
    body = {
        "prompt": "the",
        "max_tokens": LENGTH,
        "temperature": 0,
        "structured_outputs": FORMS[index],
    }
    answer = post(server, "/v1/completions", body, None if engine is None else str(engine))
    return str(answer["choices"][0]["text"])


def test_one_engine_has_all_and_the_other_none(
    server: RunningServer, whole: tuple[list[list[int]], list[str]]
) -> None:
    for engine in (0, 1):
        assert [seen(server, index, engine) for index in range(len(IMAGES))] == whole[0]
        assert [formed(server, index, engine) for index in range(len(FORMS))] == whole[1]


def test_all_at_once(server: RunningServer, whole: tuple[list[list[int]], list[str]]) -> None:
    """Towers run in one engine while the other one decodes under a constraint."""
    with ThreadPoolExecutor(8) as pool:
        chats = [pool.submit(seen, server, index, index % 2) for index in range(len(IMAGES))]
        forms = [pool.submit(formed, server, index, index % 2) for index in range(len(FORMS))]
        assert [one.result() for one in chats] == whole[0]
        assert [one.result() for one in forms] == whole[1]
    assert min(by_engine(server, "generation_tokens_total")) > 0
