"""The checkpoint is whole, and agrees with itself."""

from __future__ import annotations

import json
import struct
from math import prod
from typing import Any, NamedTuple

import pytest

import headrace_demo

_FILES = (
    "README.md",
    "chat_template.jinja",
    "config.json",
    "generation_config.json",
    "model.safetensors",
    "tokenizer.json",
    "tokenizer_config.json",
)
_TEN_MEGABYTES = 10_000_000


class Stored(NamedTuple):
    """A tensor as the header of a safetensors file describes it, and its bytes."""

    dtype: str
    shape: list[int]
    data: memoryview


def _read(name: str) -> dict[str, Any]:
    loaded: dict[str, Any] = json.loads((headrace_demo.model_path() / name).read_text("utf-8"))
    return loaded


@pytest.fixture(scope="module")
def config() -> dict[str, Any]:
    return _read("config.json")


@pytest.fixture(scope="module")
def tensors() -> dict[str, Stored]:
    """Read by hand: the format is a length, a JSON header and the data."""
    content = memoryview((headrace_demo.model_path() / "model.safetensors").read_bytes())
    (length,) = struct.unpack("<Q", content[:8])
    header = json.loads(bytes(content[8 : 8 + length]))
    header.pop("__metadata__", None)
    data = content[8 + length :]
    return {
        name: Stored(entry["dtype"], entry["shape"], data[slice(*entry["data_offsets"])])
        for name, entry in header.items()
    }


def _expected_shapes(config: dict[str, Any]) -> dict[str, list[int]]:
    """Every parameter of a Llama of this configuration, with tied embeddings."""
    size, width = config["hidden_size"], config["head_dim"]
    inner = config["intermediate_size"]
    queries = config["num_attention_heads"] * width
    keys = config["num_key_value_heads"] * width
    layer = {
        "input_layernorm": [size],
        "post_attention_layernorm": [size],
        "self_attn.q_proj": [queries, size],
        "self_attn.k_proj": [keys, size],
        "self_attn.v_proj": [keys, size],
        "self_attn.o_proj": [size, queries],
        "mlp.gate_proj": [inner, size],
        "mlp.up_proj": [inner, size],
        "mlp.down_proj": [size, inner],
    }
    shapes = {
        f"model.layers.{index}.{name}.weight": shape
        for index in range(config["num_hidden_layers"])
        for name, shape in layer.items()
    }
    outer = {"model.embed_tokens.weight": [config["vocab_size"], size], "model.norm.weight": [size]}
    return shapes | outer


def test_every_file_is_there() -> None:
    found = {path.name for path in headrace_demo.model_path().iterdir()}
    assert found == set(_FILES)


def test_the_whole_is_under_ten_megabytes() -> None:
    sizes = [path.stat().st_size for path in headrace_demo.model_path().iterdir()]
    assert sum(sizes) < _TEN_MEGABYTES


def test_tensors_have_the_shapes_of_the_config(
    config: dict[str, Any], tensors: dict[str, Stored]
) -> None:
    assert config["tie_word_embeddings"] is True
    assert config["num_key_value_heads"] < config["num_attention_heads"]
    assert {name: tensor.shape for name, tensor in tensors.items()} == _expected_shapes(config)


def test_tensors_are_finite_bfloat16(tensors: dict[str, Stored]) -> None:
    """Looks at high bytes alone, which is fast: 0x7F and 0xFF are infinite, not a number, or huge."""
    for name, tensor in tensors.items():
        assert tensor.dtype == "BF16", name
        assert len(tensor.data) == 2 * prod(tensor.shape), name
        assert {0x7F, 0xFF}.isdisjoint(bytes(tensor.data[1::2])), name


def test_token_ids_agree_between_the_files(config: dict[str, Any]) -> None:
    added = {token["content"]: token for token in _read("tokenizer.json")["added_tokens"]}
    generation = _read("generation_config.json")
    assert config["eos_token_id"] == added["<|im_end|>"]["id"]
    assert added["<|im_end|>"]["id"] in generation["eos_token_id"]
    assert config["pad_token_id"] == generation["pad_token_id"] == added["<|endoftext|>"]["id"]
    decoder = _read("tokenizer_config.json")["added_tokens_decoder"]
    assert {(int(i), token["content"], token["special"]) for i, token in decoder.items()} == {
        (token["id"], token["content"], token["special"]) for token in added.values()
    }


@pytest.mark.parametrize("tag", ["<think>", "</think>", "<tool_call>", "</tool_call>"])
def test_tags_that_clients_read_are_not_special(tag: str) -> None:
    added = {
        token["content"]: token["special"] for token in _read("tokenizer.json")["added_tokens"]
    }
    assert added[tag] is False


def test_vocabulary_fills_the_embedding(config: dict[str, Any]) -> None:
    tokenizer = _read("tokenizer.json")
    ids = set(tokenizer["model"]["vocab"].values())
    ids |= {token["id"] for token in tokenizer["added_tokens"]}
    assert ids == set(range(config["vocab_size"]))
