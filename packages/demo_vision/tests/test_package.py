"""The distribution is a folder in LLaVA's published layout, and depends on nothing."""

from __future__ import annotations

import json
import pathlib
import tomllib
from typing import Any

import pytest

import headrace_demo_vision

_ROOT = pathlib.Path(__file__).parents[1]
_FILES = {
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "preprocessor_config.json",
    "processor_config.json",
    "tokenizer.json",
    "tokenizer_config.json",
}


def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads(
        (headrace_demo_vision.model_path() / name).read_text("utf-8")
    )
    return loaded


def test_model_path_is_a_folder_of_the_package() -> None:
    path = headrace_demo_vision.model_path()
    assert path.parent == pathlib.Path(headrace_demo_vision.__file__).parent
    assert {file.name for file in path.iterdir()} == _FILES
    assert sum(file.stat().st_size for file in path.iterdir()) < 8_000_000


def test_model_path_refuses_an_installation_without_the_folder(
    monkeypatch: pytest.MonkeyPatch, tmp_path: pathlib.Path
) -> None:
    monkeypatch.setattr(headrace_demo_vision.resources, "files", lambda _: tmp_path)
    with pytest.raises(FileNotFoundError, match="unpacked installation"):
        headrace_demo_vision.model_path()


def test_version_is_the_one_of_the_distribution() -> None:
    project = tomllib.loads((_ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    assert headrace_demo_vision.__version__ == project["version"]
    assert project["dependencies"] == []


def test_the_files_agree_with_each_other() -> None:
    config, stated = _read("config.json"), _read("preprocessor_config.json")
    tower, tokenizer = config["vision_config"], _read("tokenizer.json")
    assert config["architectures"] == ["LlavaForConditionalGeneration"]
    assert stated["size"] == {"height": tower["image_size"], "width": tower["image_size"]}
    assert config["image_seq_length"] == (tower["image_size"] // tower["patch_size"]) ** 2
    added = {token["content"]: token["id"] for token in tokenizer["added_tokens"]}
    assert added["<image>"] == config["image_token_index"]
    assert added["<|im_end|>"] in _read("generation_config.json")["eos_token_id"]
    assert len(tokenizer["model"]["vocab"]) <= config["text_config"]["vocab_size"]


def test_the_card_has_its_figures() -> None:
    card = (headrace_demo_vision.model_path() / "README.md").read_text("utf-8")
    figures = card.partition("<!-- figures -->")[2].partition("<!-- end of figures -->")[0]
    assert figures.count("%") >= 5
