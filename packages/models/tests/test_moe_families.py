"""Families with mixtures of experts, each on a tiny config in which its own features matter."""

from __future__ import annotations

import json
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, ClassVar

import torch
from safetensors.torch import save_file
from test_families import TINY
from test_gated_families import GatedConformance
from torch import Tensor

from headrace_testing.model.decoders import Checkpoint, PagedDriver, randomise

TINY_MOE = {"moe_intermediate_size": 40, "num_experts_per_tok": 3}
DEEPSEEK = {
    **TINY_MOE, "n_routed_experts": 8, "n_shared_experts": 2, "n_group": 4, "topk_group": 2,
    "routed_scaling_factor": 1.7, "first_k_dense_replace": 1,
}  # fmt: skip


def randomise_corrections(model: torch.nn.Module) -> None:
    """So large that they change choices."""
    generator = torch.Generator().manual_seed(5)
    named = [*model.named_buffers(), *model.named_parameters()]
    with torch.no_grad():
        for name, tensor in named:
            if name.endswith(("e_score_correction_bias", "expert_bias")):
                tensor.copy_(0.4 * torch.randn(tensor.shape, generator=generator))


class MoEConformance(GatedConformance):
    """With corrections in which something is; also in the layout of transformers 5."""

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        reference = self.hf_class()._from_config(
            self.hf_config(**overrides), attn_implementation="eager", dtype=torch.float32
        )
        reference.eval()
        randomise(reference, seed)
        randomise_corrections(reference)
        reference.save_pretrained(folder)
        return Checkpoint(reference, folder)

    def test_experts_stacked(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path, save_original_format=False)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, checkpoint.logprobs(prompt))


class TestQwen2Moe(MoEConformance):
    stem = "Qwen2Moe"
    own: ClassVar = {**TINY_MOE, "num_experts": 6, "shared_expert_intermediate_size": 36,
                     "mlp_only_layers": [1], "use_sliding_window": True, "sliding_window": 9,
                     "max_window_layers": 2}  # fmt: skip


class TestPhimoe(MoEConformance):
    stem = "Phimoe"
    own: ClassVar = {
        "num_local_experts": 5, "router_jitter_noise": 0.2, "attention_bias": True,
        "lm_head_bias": True, "sliding_window": 13, "max_position_embeddings": 256,
        "rope_parameters": {
            "rope_type": "longrope", "rope_theta": 500.0, "short_mscale": 1.2, "long_mscale": 1.3,
            "original_max_position_embeddings": 64,
            "short_factor": [1.0, 1.1, 1.2, 1.5, 1.9, 2.5, 2.6, 2.7, 3.0],
            "long_factor": [1.0, 2.1, 3.2, 4.5, 5.9, 7.5, 8.0, 8.5, 9.0],
        },
    }  # fmt: skip


GRANITE = {
    "num_local_experts": 5, "num_experts_per_tok": 2, "embedding_multiplier": 3.0,
    "attention_multiplier": 0.3, "residual_multiplier": 0.6, "logits_scaling": 1.5,
}  # fmt: skip


class TestGraniteMoe(MoEConformance):
    stem = "GraniteMoe"
    own: ClassVar = {**GRANITE, "attention_bias": True}


class TestGraniteMoeShared(MoEConformance):
    stem = "GraniteMoeShared"
    own: ClassVar = {**GRANITE, "shared_intermediate_size": 44}


class TestGraniteMoeSWA(MoEConformance):
    stem = "GraniteMoeSWA"
    own: ClassVar = {**GRANITE, "shared_intermediate_size": 44, "sliding_window": 9,
                     "layer_rope_theta": [0, 300.0, 70.0]}  # fmt: skip


class TestOlmoe(MoEConformance):
    stem = "Olmoe"
    own: ClassVar = {"num_experts": 6, "num_experts_per_tok": 3}


class TestFlexOlmo(MoEConformance):
    stem = "FlexOlmo"
    own: ClassVar = {"num_experts": 6, "num_experts_per_tok": 3, "norm_topk_prob": True}


class TestDbrx(MoEConformance):
    stem = "Dbrx"
    flips_ties: ClassVar[bool] = False

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DbrxConfig

        mixture = {"ffn_hidden_size": 40, "moe_num_experts": 5, "moe_top_k": 2}
        own = {"vocab_size": 131, "d_model": 72, "n_heads": 4, "n_layers": 2, "max_seq_len": 128,
               "attn_config": {"kv_n_heads": 2, "clip_qkv": 0.8, "rope_theta": 10000.0},
               "ffn_config": mixture}  # fmt: skip
        return DbrxConfig(**{**own, **overrides})


class TestHunYuanMoEV1(MoEConformance):
    stem = "HunYuanMoEV1"
    own: ClassVar = {"num_experts": 6, "moe_topk": [2, 3, 1], "head_dim": 20}


class TestErnie45Moe(MoEConformance):
    stem = "Ernie4_5_Moe"
    own: ClassVar = {"moe_intermediate_size": 40, "moe_num_experts": 5, "moe_k": 4,
                     "moe_num_shared_experts": 2, "moe_layer_end_index": 1}  # fmt: skip


class TestErnie45VLMoe(MoEConformance):
    """Experts for images stand beside those of text, with another size; text never reaches them."""

    # Where images can be taken, the class is the one that sees, whose shared experts take both kinds.
    without_adapters = (
        "vision_tower",
        "resampler",
        *(["shared_experts"] if find_spec("headrace_multimodal") else []),
    )
    own: ClassVar = {"moe_intermediate_size": [40, 24], "moe_num_experts": 5, "moe_k": 4,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                         "mrope_section": [3, 3, 3]}}  # fmt: skip

    def hf_class(self) -> Any:
        import transformers

        return transformers.Ernie4_5_VLMoeForConditionalGeneration

    def hf_config(self, **overrides: Any) -> Any:
        import transformers

        whole = transformers.Ernie4_5_VLMoeConfig
        text, vision = type(whole().text_config), type(whole().vision_config)
        own = {**TINY, **self.own, **overrides}
        tower = vision(hidden_size=32, intermediate_size=48, depth=1, num_heads=2)
        return whole(text_config=text(**own), vision_config=tower, vocab_size=own["vocab_size"],
                     tie_word_embeddings=own.get("tie_word_embeddings", False))  # fmt: skip

    def architecture(self) -> str:
        return "Ernie4_5_VLMoeForCausalLM"

    def test_its_weights_have_names(self, checkpoint: Checkpoint, model: Any) -> None:
        """Less than the files hold: neither the tower nor the experts for images."""
        names = [name for name, _ in model.named_parameters()]
        assert len(set(names)) == len(names)

    def test_a_flat_config_with_lists_by_kind(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        """As Baidu publishes it."""
        checkpoint.reference.save_pretrained(tmp_path)
        said = json.loads((tmp_path / "config.json").read_text())
        text = said.pop("text_config")
        layers = len(text.pop("mlp_layer_types"))
        text |= {"moe_num_experts": [5, 5], "moe_layer_start_index": [1, 1], "rope_3d": True,
                 "moe_layer_end_index": [layers + 1, layers]}  # fmt: skip
        text.pop("rope_parameters")
        flat = {**said, **text, "model_type": "ernie4_5_moe_vl", "rope_theta": 500.0}
        (tmp_path / "config.json").write_text(json.dumps(flat))
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, checkpoint.logprobs(prompt))


class TestAriaText(MoEConformance):
    stem = "AriaText"
    own: ClassVar = {"moe_num_experts": 6, "moe_topk": 3, "moe_num_shared_experts": 2,
                     "intermediate_size": 40, "attention_bias": True}  # fmt: skip


class TestGlm4Moe(MoEConformance):
    stem = "Glm4Moe"
    own: ClassVar = {**DEEPSEEK, "use_qk_norm": True, "attention_bias": True, "head_dim": 24}


class TestSolarOpen(MoEConformance):
    stem = "SolarOpen"
    own: ClassVar = {**DEEPSEEK, "head_dim": 20, "norm_topk_prob": False}


class TestDots1(MoEConformance):
    stem = "Dots1"
    own: ClassVar = {**DEEPSEEK, "sliding_window": 9, "max_window_layers": 2}


class TestMiniMaxM2(MoEConformance):
    stem = "MiniMaxM2"
    own: ClassVar = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 20,
                     "rope_parameters": {"rope_type": "default", "rope_theta": 500.0,
                                         "partial_rotary_factor": 0.6}}  # fmt: skip


class TestExaoneMoe(MoEConformance):
    stem = "ExaoneMoe"
    own: ClassVar = {**TINY_MOE, "num_experts": 8, "n_group": 2, "topk_group": 1,
                     "sliding_window": 9, "sliding_window_pattern": 2}  # fmt: skip


class TestGptOss(MoEConformance):
    stem = "GptOss"
    own: ClassVar = {"num_local_experts": 6, "num_experts_per_tok": 3, "head_dim": 20,
                     "sliding_window": 9}  # fmt: skip


class TestCohere2Moe(MoEConformance):
    stem = "Cohere2Moe"
    own: ClassVar = {"num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2,
                     "expert_selection_fn": "sigmoid", "head_dim": 20, "sliding_window": 9,
                     "sliding_window_pattern": 2, "prefix_dense_intermediate_size": 52,
                     "first_k_dense_replace": 1, "logit_scale": 0.3}  # fmt: skip


class TestHYV3(MoEConformance):
    stem = "HYV3"
    own: ClassVar = {**TINY_MOE, "num_experts": 6, "head_dim": 20, "router_scaling_factor": 1.9,
                     "num_shared_experts": 2}  # fmt: skip


class TestFlint(MoEConformance):
    stem = "Flint"
    own: ClassVar = {
        **TINY_MOE, "num_experts": 6, "shared_expert_intermediate_size": 44, "head_dim": 20,
        "mlp_only_layers": [0], "sliding_window": 9,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
    }  # fmt: skip


class Relaid:
    """A transformers model whose checkpoints have another family's config and names."""

    def __init__(
        self, model: Any, config: Mapping[str, Any], tensors: Mapping[str, Tensor]
    ) -> None:
        self.model, self.config, self.tensors = model, config, tensors

    def __call__(self, *arguments: Any) -> Any:
        return self.model(*arguments)

    def save_pretrained(self, folder: Path, max_shard_size: str = "") -> None:
        (folder / "config.json").write_text(json.dumps(self.config))
        if not max_shard_size:
            save_file(dict(self.tensors), folder / "model.safetensors", metadata={"format": "pt"})
            return
        names, where = sorted(self.tensors), {}
        for index in range(3):
            file = f"model-{index}.safetensors"
            save_file({name: self.tensors[name] for name in names[index::3]}, folder / file)
            where.update(dict.fromkeys(names[index::3], file))
        index_file = folder / "model.safetensors.index.json"
        index_file.write_text(json.dumps({"weight_map": where}))


class RelaidConformance(GatedConformance):
    """Of architectures that transformers has not: one that computes the same, under another's names."""

    named: ClassVar[str]
    flips_ties: ClassVar[bool] = False

    def architecture(self) -> str:
        return self.named

    def config(self) -> dict[str, Any]:
        """``config.json``."""
        raise NotImplementedError

    def relaid(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """The checkpoint, of transformers' tensors in memory."""
        raise NotImplementedError

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        model = self.hf_class()._from_config(
            self.hf_config(**overrides), attn_implementation="eager", dtype=torch.float32
        )
        model.eval()
        randomise(model, seed)
        randomise_corrections(model)
        config = {**TINY, "hidden_act": "silu", "torch_dtype": "float32", **self.config(),
                  "architectures": [self.named]}  # fmt: skip
        tensors = {name: t.contiguous() for name, t in self.relaid(model.state_dict()).items()}
        relaid = Relaid(model, config, tensors)
        relaid.save_pretrained(folder)
        return Checkpoint(relaid, folder)


def apart(name: str, stacked: Tensor) -> dict[str, Tensor]:
    """Experts' tensors, each by itself."""
    start, _, kind = name.rpartition(".")
    found = {}
    for index, expert in enumerate(stacked.unbind(0)):
        own = f"{start}.{index}"
        if kind == "gate_up_proj":
            gate, up = expert.clone().chunk(2)
            found |= {f"{own}.gate_proj.weight": gate, f"{own}.up_proj.weight": up}
        else:
            found[f"{own}.down_proj.weight"] = expert.clone()
    return found


class TestDeepseek(RelaidConformance):
    """By Granite, whose multipliers can be 1 and whose shared MLP is one tensor for gate and up."""

    named = "DeepseekForCausalLM"
    stem = "GraniteMoeShared"
    own: ClassVar = {"num_local_experts": 6, "num_experts_per_tok": 3, "intermediate_size": 40,
                     "shared_intermediate_size": 80, "attention_multiplier": 18**-0.5}  # fmt: skip

    def config(self) -> dict[str, Any]:
        return {**TINY_MOE, "model_type": "deepseek", "n_routed_experts": 6, "n_shared_experts": 2,
                "norm_topk_prob": True, "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip

    def relaid(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found = {}
        for name, tensor in tensors.items():
            name = name.replace("block_sparse_moe.router", "mlp.gate")
            name = name.replace("block_sparse_moe", "mlp")
            name = name.replace("shared_mlp.output_linear", "mlp.shared_experts.down_proj")
            if ".experts." in name:
                found |= apart(name, tensor)
            elif "shared_mlp.input_linear" in name:
                gate, up = tensor.clone().chunk(2)
                start = name.replace("shared_mlp.input_linear.weight", "mlp.shared_experts")
                found |= {f"{start}.gate_proj.weight": gate, f"{start}.up_proj.weight": up}
            else:
                found[name] = tensor.clone()
        return found


def bailing_names(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Ling's names of what all its layers have."""
    found = {}
    for name, tensor in tensors.items():
        if ".self_attn.q_proj" in name:
            parts = [tensors[name.replace("q_proj", f"{part}_proj")] for part in "qkv"]
            start, suffix = name.split(".self_attn.")[0], name.rpartition(".")[2]
            found[f"{start}.attention.query_key_value.{suffix}"] = torch.cat(parts)
        elif ".k_proj" not in name and ".v_proj" not in name:
            name = name.replace("embed_tokens", "word_embeddings")
            name = name.replace("self_attn.o_proj", "attention.dense")
            name = name.replace("self_attn.q_norm", "attention.query_layernorm")
            found[name.replace("self_attn.k_norm", "attention.key_layernorm")] = tensor
    return found


class TestBailingMoe(TestDeepseek):
    named = "BailingMoeForCausalLM"

    def config(self) -> dict[str, Any]:
        return {**TINY_MOE, "model_type": "bailing_moe", "num_experts": 6, "num_shared_experts": 2,
                "norm_topk_prob": True, "rope_theta": 10000.0, "tie_word_embeddings": False}  # fmt: skip

    def relaid(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        return bailing_names(super().relaid(tensors))


class TestBailingMoeV2(RelaidConformance):
    """By GLM-4.5."""

    named = "BailingMoeV2ForCausalLM"
    stem = "Glm4Moe"
    own: ClassVar = {**DEEPSEEK, "use_qk_norm": True, "head_dim": 20, "rms_norm_eps": 1e-6}

    def config(self) -> dict[str, Any]:
        routing = {key: DEEPSEEK[key] for key in ("n_group", "topk_group", "routed_scaling_factor")}
        return {**TINY_MOE, **routing, "model_type": "bailing_moe", "num_experts": 8, "head_dim": 20,
                "num_shared_experts": 2, "first_k_dense_replace": 1, "use_qk_norm": True,
                "rope_theta": 10000.0, "partial_rotary_factor": 0.5, "norm_topk_prob": True,
                "tie_word_embeddings": False}  # fmt: skip

    def relaid(self, tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            name = name.replace("e_score_correction_bias", "expert_bias")
            found |= apart(name, tensor) if ".experts." in name else {name: tensor.clone()}
        return bailing_names(found)
