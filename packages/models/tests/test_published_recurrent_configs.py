"""Published configs spell things otherwise than transformers writes them; the model is the same."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import test_other_recurrences as others
import test_recurrent_families as recurrent
import torch

from headrace_testing.model.decoders import PagedDriver

Config = dict[str, Any]


def minimax(config: Config) -> None:
    config["architectures"] = ["MiniMaxText01ForCausalLM"]
    config["attn_type_list"] = [int(k == "full_attention") for k in config.pop("layer_types")]
    for name, published in (
        ("full_attn", "full_attention"),
        ("linear_attn", "linear_attention"),
        ("mlp", "mlp"),
    ):
        for which in ("alpha", "beta"):
            config[f"layernorm_{published}_{which}"] = config.pop(f"{name}_{which}_factor")
    config.update(postnorm=True, shared_intermediate_size=0, rotary_dim=config["head_dim"])


def nemotron(config: Config) -> None:
    letters = {"linear_attention": "M", "mlp": "-", "full_attention": "*"}
    config["hybrid_override_pattern"] = "".join(letters[k] for k in config.pop("layers_block_type"))
    config["norm_eps"] = config.pop("layer_norm_epsilon")
    config["attention_head_dim"] = config.pop("head_dim")


def kimi(config: Config) -> None:
    kinds = config.pop("layer_types")
    config["linear_attn_config"] = {
        "full_attn_layers": [i + 1 for i, k in enumerate(kinds) if k == "full_attention"],
        "kda_layers": [i + 1 for i, k in enumerate(kinds) if k == "linear_attention"],
        "head_dim": config.pop("linear_head_dim"), "num_heads": config.pop("linear_num_heads"),
        "short_conv_kernel_size": config.pop("linear_conv_kernel_dim"),
    }  # fmt: skip
    config["first_k_dense_replace"] = config.pop("mlp_layer_types").count("dense")
    config.update(mla_use_nope=True, moe_router_activation_func="sigmoid", moe_layer_freq=1)


def granite(config: Config) -> None:
    kinds = config.pop("layer_types")
    config["layers_block_type"] = ["attention" if k == "full_attention" else "mamba" for k in kinds]
    config["position_embedding_type"] = "nope"


def lfm2(config: Config) -> None:
    kinds = config.pop("layer_types")
    config["full_attn_idxs"] = [i for i, kind in enumerate(kinds) if kind == "full_attention"]
    config["block_ff_dim"] = config.pop("intermediate_size")
    config["tie_embedding"] = config.pop("tie_word_embeddings")


def qwen3_next(config: Config) -> None:
    config["full_attention_interval"] = len(config.pop("layer_types"))


def zamba(config: Config) -> None:
    kinds = config["layers_block_type"]
    config["layers_block_type"] = ["hybrid" if k == "hybrid" else "mamba" for k in kinds]


@pytest.mark.parametrize(
    ("suite", "respell"),
    [
        (recurrent.TestMiniMax, minimax), (recurrent.TestNemotronH, nemotron),
        (others.TestKimiLinear, kimi), (recurrent.TestGraniteMoeHybrid, granite),
        (recurrent.TestLfm2, lfm2), (recurrent.TestQwen3Next, qwen3_next), (others.TestZamba, zamba),
    ],
)  # fmt: skip
def test_the_published_spelling(
    suite: Any, respell: Callable[[Config], None], tmp_path: Path
) -> None:
    tests = suite()
    tests.make_checkpoint(tmp_path)
    prompt = tests.prompt(12)
    expected = PagedDriver(tests.open(tmp_path)).step({"a": prompt})
    file = tmp_path / "config.json"
    config = json.loads(file.read_text())
    respell(config)
    file.write_text(json.dumps(config))
    assert torch.equal(PagedDriver(tests.open(tmp_path)).step({"a": prompt}), expected)
