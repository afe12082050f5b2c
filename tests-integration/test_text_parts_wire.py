"""A checkpoint of a model that also sees, served: text is answered as by its language model alone, and images
are refused."""

from __future__ import annotations

import json
import shutil
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from servers import PATIENCE, RunningServer, serving

import headrace_demo

PIXEL = (
    "data:image/png;base64,iVBORw0KGgoAAAANSUhEUgAAAAEAAAABCAYAAAAfFcSJAAAADUlEQVR42mNk+M9QDwADhgGAWjR9"
    "awAAAABJRU5ErkJggg=="
)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The demo model as the language model of a ViP-LLaVA, whose images are not taken."""
    made = tmp_path_factory.mktemp("seeing") / "model"
    shutil.copytree(headrace_demo.model_path(), made)
    text = json.loads((made / "config.json").read_text())
    whole = {"architectures": ["VipLlavaForConditionalGeneration"], "model_type": "vipllava",
             "text_config": text, "vision_config": {"model_type": "clip_vision_model"}}  # fmt: skip
    (made / "config.json").write_text(json.dumps(whole))
    [file] = made.glob("*.safetensors")
    tensors = {f"language_model.{name}": tensor for name, tensor in load_file(file).items()}
    tensors["vision_tower.vision_model.embeddings.weight"] = torch.full((64, 64), torch.nan)
    save_file(tensors, file, metadata={"format": "pt"})
    return made


@pytest.fixture(scope="module")
def server(folder: Path) -> Iterator[RunningServer]:
    with serving(str(folder), "--served-model-name", "m") as running:
        yield running


def post(server: RunningServer, content: Any) -> tuple[int, dict[str, Any]]:
    body = {"model": "m", "max_tokens": 12, "temperature": 0,
            "messages": [{"role": "user", "content": content}]}  # fmt: skip
    request = urllib.request.Request(
        server.api + "/chat/completions",
        json.dumps(body).encode(),
        {"content-type": "application/json"},
    )
    try:
        with urllib.request.urlopen(request, timeout=PATIENCE) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        return error.code, json.load(error)


def test_text_is_that_of_the_language_model(server: RunningServer) -> None:
    with serving("--served-model-name", "m") as plain:
        wanted = post(plain, "Say hello.")[1]["choices"][0]["message"]
    status, answer = post(server, "Say hello.")
    assert status == 200
    assert answer["choices"][0]["message"] == wanted
    assert any("text is served; 1 tensors for images" in line for line in server.log)


def test_an_image_is_refused(server: RunningServer) -> None:
    image = {"type": "image_url", "image_url": {"url": PIXEL}}
    status, answer = post(server, [{"type": "text", "text": "What is this?"}, image])
    assert status == 400
    assert "image" in answer["error"]["message"]
    print(answer["error"]["message"])
