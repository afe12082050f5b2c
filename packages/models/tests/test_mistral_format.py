"""Checkpoints in Mistral's own layout: ``params.json`` and ``consolidated*.safetensors``."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_families import TestMistral as MistralSuite
from test_families import TestMixtral as MixtralSuite
from test_gated_families import TestMinistral3 as Ministral3Suite
from test_more_families import TestMistral4 as Mistral4Suite
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_core.platform import CpuPlatform
from headrace_models.formats.mistral import transformers_name
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import PagedDriver, build_context
from headrace_testing.model.published_mistral import params_of, relaid

LATENT_NAMES = {
    "self_attn.q_a_proj": "attention.wq_a", "self_attn.q_a_layernorm": "attention.q_a_norm",
    "self_attn.q_b_proj": "attention.wq_b", "self_attn.kv_b_proj": "attention.wkv_b",
    "self_attn.kv_a_proj_with_mqa": "attention.wkv_a_with_mqa",
    "self_attn.kv_a_layernorm": "attention.kv_a_norm", "mlp.gate": "gate", "mlp.experts": "experts",
    "mlp.shared_experts.gate_proj": "shared_experts.w1",
    "mlp.shared_experts.up_proj": "shared_experts.w3",
    "mlp.shared_experts.down_proj": "shared_experts.w2",
}  # fmt: skip


ENCODER = {
    "hidden_size": 8, "intermediate_size": 12, "num_hidden_layers": 1, "num_attention_heads": 2,
    "patch_size": 4, "image_size": 16,
}  # fmt: skip
"""What sees, beside a language model; its tensors are not all there."""


def latent_params_of(config: Any) -> dict[str, Any]:
    """As of Mistral Large 3."""
    rope = config.rope_parameters
    original = rope["original_max_position_embeddings"]
    latent = ("q_lora_rank", "kv_lora_rank", "qk_nope_head_dim", "qk_rope_head_dim", "v_head_dim")
    return {
        **params_of(config),
        **{name: getattr(config, name) for name in latent},
        "moe": {
            "num_experts": config.n_routed_experts,
            "num_experts_per_tok": config.num_experts_per_tok,
            "expert_hidden_dim": config.moe_intermediate_size,
            "num_shared_experts": config.n_shared_experts,
            "first_k_dense_replace": config.first_k_dense_replace,
            "route_every_n": 1,
            "routed_scale": config.routed_scaling_factor,
            "num_expert_groups": config.n_group,
            "num_expert_groups_per_tok": config.topk_group,
        },
        "yarn": {
            "factor": rope["factor"],
            "original_max_position_embeddings": original,
            "beta": rope["beta_fast"],
            "alpha": rope["beta_slow"],
            "apply_scale": "attention_factor" not in rope,
        },
        "llama_4_scaling": {
            "beta": rope["llama_4_scaling_beta"],
            "original_max_position_embeddings": original,
        },
    }


def by_expert(tensors: Mapping[str, Tensor], gate_up: str, down: str) -> dict[str, Tensor]:
    """Stacked experts as published: each matrix by itself. ``gate_up``, ``down``: ends of names."""
    result = {}
    for name, tensor in tensors.items():
        for expert, matrix in enumerate(tensor if name.endswith((gate_up, down)) else ()):
            stem = name.rpartition(".")[0]
            parts = matrix.chunk(2) if name.endswith(gate_up) else (matrix,)
            for part, each in zip(("w1", "w3") if len(parts) == 2 else ("w2",), parts):
                result[f"{stem}.{expert}.{part}.weight"] = each.contiguous()
        if not name.endswith((gate_up, down)):
            result[name] = tensor
    return result


class Published:
    """A tiny model, and its folder in Mistral's layout."""

    def __init__(self, suite: Any, folder: Path, *, shards: int = 1, **more: Any) -> None:
        self.suite, self.folder = suite, folder
        self.checkpoint = suite.make_checkpoint(folder / "transformers")
        config = suite.hf_config()
        tensors = relaid(load_file(folder / "transformers/model.safetensors"), int(config.head_dim))
        (folder / "params.json").write_text(json.dumps({**params_of(config), **more}))
        names = sorted(tensors)
        for index in range(shards):
            part = {name: tensors[name] for name in names[index::shards]}
            file = "consolidated" + (f"-{index + 1:05}-of-{shards:05}" if shards > 1 else "")
            save_file(part, folder / f"{file}.safetensors")

    def logits(self, prompt: list[int], **settings: Any) -> Tensor:
        load = LoadConfig(**settings)
        config = ModelConfig(
            model=str(self.folder), max_model_len=64, limit_mm_per_prompt={"image": 0}
        )
        info = resolve(config, load, CpuPlatform())
        model = load_model(info, build_context(info), load=load)
        return PagedDriver(model).step({"a": prompt})

    def check(self, **settings: Any) -> None:
        prompt = self.suite.prompt(self.suite.prompt_len)
        expected = self.checkpoint.logprobs(prompt)
        self.suite.assert_close(self.logits(prompt, **settings), expected)


class PublishedMixture:
    """A tiny mixture of experts in Mistral's layout."""

    def __init__(self, suite: Any, folder: Path, **overrides: Any) -> None:
        self.suite, self.folder = suite, folder
        self.checkpoint = suite.make_checkpoint(folder / "transformers", **overrides)
        config = self.checkpoint.reference.config
        latent = hasattr(config, "kv_lora_rank")
        params = latent_params_of(config) if latent else params_of(config)
        if not latent:
            count, chosen = config.num_local_experts, config.num_experts_per_tok
            params["moe"] = {"num_experts": count, "num_experts_per_tok": chosen}
        (folder / "params.json").write_text(json.dumps({**params, "vision_encoder": ENCODER}))
        tensors = load_file(folder / "transformers/model.safetensors")
        tensors = by_expert(tensors, "experts.gate_up_proj", "experts.down_proj")
        names = LATENT_NAMES if latent else {"block_sparse_moe": "feed_forward"}
        for theirs, own in names.items():
            tensors = {name.replace(f".{theirs}.", f".{own}."): x for name, x in tensors.items()}
        size = config.hidden_size // config.num_attention_heads
        tensors = relaid(tensors, 0 if latent else size)
        tensors["vision_encoder.ln_pre.weight"] = torch.zeros(8)
        save_file(tensors, folder / "consolidated.safetensors")

    logits, check = Published.logits, Published.check


def test_mixtral(tmp_path: Path) -> None:
    PublishedMixture(MixtralSuite(), tmp_path).check()


@pytest.mark.parametrize(("scales", "rank"), [(True, 18), (False, None)])
def test_mistral_large_3(tmp_path: Path, scales: bool, rank: int | None) -> None:
    """Latent attention beside a shared expert; ``apply_scale`` scales scores. What sees is passed over."""
    rope = {
        "rope_type": "yarn", "rope_theta": 500.0, "factor": 4.0, "beta_fast": 4, "beta_slow": 1,
        "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4,
        **({"mscale": 1.0, "mscale_all_dim": 1.0} if scales else {"attention_factor": 1.0}),
    }  # fmt: skip
    found = PublishedMixture(
        Mistral4Suite(), tmp_path, rope_parameters=rope, attention_bias=False, rms_norm_eps=1e-5,
        q_lora_rank=rank,
    )  # fmt: skip
    found.check()


@pytest.mark.parametrize("shards", [1, 3])
def test_mistral(tmp_path: Path, shards: int) -> None:
    Published(MistralSuite(), tmp_path, shards=shards).check()


def test_ministral_3(tmp_path: Path) -> None:
    Published(
        Ministral3Suite(),
        tmp_path,
        yarn={"factor": 16.0, "original_max_position_embeddings": 8, "apply_scale": False},
        llama_4_scaling={"beta": 0.3, "original_max_position_embeddings": 8},
    ).check()


def test_of_both_layouts_the_user_chooses(tmp_path: Path) -> None:
    """Repositories hold both: transformers' is taken unless Mistral's is asked for."""
    found = Published(MistralSuite(), tmp_path)
    for file in (tmp_path / "transformers").iterdir():
        file.rename(tmp_path / file.name)
    found.check(load_format="mistral")
    (tmp_path / "consolidated.safetensors").unlink()
    (tmp_path / "params.json").unlink()
    found.check()


@pytest.mark.parametrize(
    ("activations", "scheme"), [(None, "dynamic"), ("NO_SCALES", "dynamic"), ("TENSOR", "static")]
)
def test_weights_in_fp8(tmp_path: Path, activations: str | None, scheme: str) -> None:
    """What they are served as; tests-integration has the numbers."""
    block = {"qformat_weight": "fp8_e4m3", "qscheme_act": activations}
    found = Published(MistralSuite(), tmp_path, quantization=block)
    info = resolve(ModelConfig(model=str(found.folder)), LoadConfig(), CpuPlatform())
    assert info.config["quantization_config"] == {
        "quant_method": "fp8",
        "activation_scheme": scheme,
    }


def test_names_of_scales() -> None:
    for last in ("qscale_weight", "qscale_act"):
        stem = "model.layers.3.mlp.experts.7.down_proj"
        assert transformers_name(f"layers.3.experts.7.w2.{last}") == f"{stem}.{last}"


@pytest.mark.parametrize(
    ("more", "words"),
    [
        ({"moe": {"num_experts": 8}}, r"params\.json has no 'num_experts_per_tok'"),
        ({"multimodal": {"whisper_model_args": {}}}, "'multimodal' is not supported"),
        ({"quantization": [8]}, r"quantization = \[8\]: must be an object"),
        ({"quantization": {"qformat_weight": "int8"}}, "quantization.qformat_weight = 'int8'"),
        ({"quantization": {"config_groups": {}}}, "qformat_weight = None: must be 'fp8_e4m3'"),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "qscheme_act": "TOKEN"}},
            "quantization.qscheme_act = 'TOKEN': must be None or 'NO_SCALES' or 'TENSOR'",
        ),
        (
            {"quantization": {"qformat_weight": "fp8_e4m3", "kv_cache": "fp8"}},
            "quantization.kv_cache = 'fp8': must be None",
        ),
        ({"sliding_window": [9, None]}, "sliding_window is a list"),
        ({"dim": "72"}, r"params\.json: dim = '72'"),
        ({"head_dim": None, "n_heads": 5}, "dim = 72: must be a multiple of n_heads = 5"),
        ({"yarn": [1]}, r"yarn = \[1\]: must be an object"),
        ({"llama_4_scaling": {"beta": 0.1, "original_max_position_embeddings": 8}}, "must be yarn's"),
    ],
)  # fmt: skip
def test_what_is_not_served_is_named(tmp_path: Path, more: dict[str, Any], words: str) -> None:
    params = {**params_of(MistralSuite().hf_config()), **more}
    (tmp_path / "params.json").write_text(json.dumps(params))
    with pytest.raises(UnsupportedModel, match=words):
        resolve(ModelConfig(model=str(tmp_path)), LoadConfig(), CpuPlatform())


def test_unknown_and_misshapen_tensors_are_named(tmp_path: Path) -> None:
    found = Published(MistralSuite(), tmp_path)
    file = tmp_path / "consolidated.safetensors"
    tensors = load_file(file)
    save_file({**tensors, "layers.0.attention.wz.weight": torch.zeros(2)}, file)
    with pytest.raises(WeightsError, match=r"layers\.0\.attention\.wz"):
        found.logits([1, 2])
    save_file({**tensors, "layers.0.attention.wq.weight": torch.zeros(7, 72)}, file)
    with pytest.raises(WeightsError, match=r"layers\.0\.attention\.wq.*whole heads of 18"):
        found.logits([1, 2])
