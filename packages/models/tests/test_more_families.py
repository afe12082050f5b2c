"""Families with mixtures of experts in further places, or with attention of their own kind, each on a
tiny config in which its own features matter."""

from __future__ import annotations

import shutil
from collections import OrderedDict
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from model_families_conformance import FamilyConformance
from relaid_conformance import RelaidConformance, rewrite
from safetensors.torch import load_file, save_file
from test_families import TINY
from test_latent_families import EXPERTS, YARN
from test_latent_families import TINY as LATENT
from test_moe_families import TINY_MOE, MoEConformance, apart
from torch import Tensor, nn
from torch.nn.functional import gelu, silu

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_core.model import CausalLM, LoadProgress
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_testing.model.decoders import Checkpoint, PagedDriver

gelu_tanh = partial(gelu, approximate="tanh")


class TestJetMoe(MoEConformance):
    """Six heads for each token: three experts, and two key-value heads."""

    stem = "JetMoe"
    own: ClassVar = {"kv_channels": 20, "num_local_experts": 5, "num_experts_per_tok": 3,
                     "rms_norm_eps": 0.03}  # fmt: skip


class TestAfmoe(MoEConformance):
    stem = "Afmoe"
    own: ClassVar = {
        **TINY_MOE, "num_experts": 8, "num_shared_experts": 2, "num_dense_layers": 1, "head_dim": 20,
        "route_scale": 1.7, "sliding_window": 9, "global_attn_every_n_layers": 2,
        "mup_enabled": True, "attention_bias": True,
    }  # fmt: skip


class TestMiMoV2Flash(MoEConformance):
    """Values of 12 beside keys of 20; layers with windows have twice the key-value heads."""

    stem = "MiMoV2Flash"
    own: ClassVar = {
        **TINY_MOE, "n_routed_experts": 8, "n_group": 4, "topk_group": 2, "head_dim": 20,
        "v_head_dim": 12, "attention_value_scale": 0.6, "sliding_window": 9, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "rope_parameters": {
            "full_attention": {"rope_type": "default", "rope_theta": 5000.0,
                               "partial_rotary_factor": 0.334},
            "sliding_attention": {"rope_type": "default", "rope_theta": 100.0,
                                  "partial_rotary_factor": 0.5},
        },
    }  # fmt: skip


class TestMiMoV2FlashAsPublished(TestMiMoV2Flash):
    """The config's own names: lists of 0 and 1, a base for each kind of layer."""

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        plain = {"rope_type": "default", "partial_rotary_factor": 0.334}
        rope = {"full_attention": {**plain, "rope_theta": 5000.0},
                "sliding_attention": {**plain, "rope_theta": 100.0}}  # fmt: skip
        found = super().make_checkpoint(folder, seed, **{"rope_parameters": rope, **overrides})
        rewrite(
            folder,
            drop=("layer_types", "mlp_layer_types", "rope_parameters", "sliding_window"),
            hybrid_layer_pattern=[0, 1, 0],
            moe_layer_freq=[0, 1, 1],
            rope_theta=5000.0,
            swa_rope_theta=100.0,
            partial_rotary_factor=0.334,
            swa_num_key_value_heads=4,
            sliding_window_size=8,
            routed_scaling_factor=None,
        )
        return found


class TestDeepseekV32(FamilyConformance):
    """In contexts in which its indexer picks all."""

    without_adapters = ("indexer",)

    def hf_class(self) -> Any:
        from transformers import DeepseekV32ForCausalLM

        return DeepseekV32ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV32Config

        own = {"first_k_dense_replace": 1, "rope_parameters": YARN, "attention_bias": True,
               "index_topk": 128, "index_head_dim": 16, "index_n_heads": 2}  # fmt: skip
        return DeepseekV32Config(**{**LATENT, **EXPERTS, **own, **overrides})


class PlainMLP(nn.Module):
    """``down(act(gate(x)) * up(x))`` under any names."""

    def __init__(self, names: tuple[str, str, str], hidden: int, inner: int, act: Any) -> None:
        super().__init__()
        self.names, self.act = names, act
        for name, sizes in zip(names, ((hidden, inner), (hidden, inner), (inner, hidden))):
            self.add_module(name, nn.Linear(*sizes, bias=False))

    def forward(self, x: Tensor) -> Tensor:
        gate, up, down = (self.get_submodule(name) for name in self.names)
        found: Tensor = down(self.act(gate(x)) * up(x))
        return found


class PlainMixture(nn.Module):
    """Every expert computes every token; weights of those not chosen are 0."""

    def __init__(
        self, experts: list[PlainMLP], hidden: int, *, soft_cap: float, renormalise: bool
    ) -> None:
        super().__init__()
        self.gate = nn.Linear(hidden, len(experts), bias=False)
        self.experts = nn.ModuleList(experts)
        self.soft_cap, self.renormalise = soft_cap, renormalise

    def forward(self, x: Tensor) -> Tensor:
        scores = self.gate(x)
        if self.soft_cap:
            scores = self.soft_cap * torch.tanh(scores / self.soft_cap)
        chosen, ids = scores.softmax(-1).topk(2, dim=-1)
        if self.renormalise:
            chosen = chosen / chosen.sum(-1, keepdim=True)
        weights = torch.zeros_like(scores).scatter(-1, ids, chosen)
        parts = [weights[..., i, None] * expert(x) for i, expert in enumerate(self.experts)]
        return torch.stack(parts).sum(0)


class ArcticLayer(nn.Module):
    """A block of Llama's with what stands behind its attention replaced."""

    def __init__(self, layer: Any, config: Any, *, sparse: bool) -> None:
        super().__init__()
        hidden, inner, names = config.hidden_size, config.intermediate_size, ("w1", "w3", "w2")
        self.self_attn = layer.self_attn
        self.input_layernorm = layer.input_layernorm
        self.post_attention_layernorm = layer.post_attention_layernorm
        self.sparse = sparse
        if sparse:
            self.residual_layernorm = type(self.input_layernorm)(hidden, config.rms_norm_eps)
            self.residual_mlp = PlainMLP(names, hidden, hidden, silu)
            experts = [PlainMLP(names, hidden, inner, silu) for _ in range(5)]
            self.block_sparse_moe = PlainMixture(experts, hidden, soft_cap=0.0, renormalise=True)
        else:
            mlp = PlainMLP(names, hidden, inner, silu)
            self.block_sparse_moe = nn.Sequential(OrderedDict(mlp=mlp))

    def forward(self, x: Tensor, **how: Any) -> Tensor:
        attended, _ = self.self_attn(hidden_states=self.input_layernorm(x), **how)
        h: Tensor = x + attended
        if not self.sparse:
            return h + self.block_sparse_moe(self.post_attention_layernorm(h))
        small = self.residual_mlp(self.residual_layernorm(h))
        return h + small + self.block_sparse_moe(self.post_attention_layernorm(x))


class TestArctic(RelaidConformance):
    """The second of three blocks has a mixture."""

    published = "ArcticForCausalLM"

    def hf_class(self) -> Any:
        from transformers import LlamaForCausalLM

        return LlamaForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import LlamaConfig

        rope = {"rope_type": "default", "rope_theta": 500.0}
        return LlamaConfig(**{**TINY, "rope_parameters": rope, **overrides})

    def prepare(self, reference: Any) -> None:
        layers = reference.model.layers
        for index, layer in enumerate(layers):
            layers[index] = ArcticLayer(layer, reference.config, sparse=index == 1)

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        return {**config, "model_type": "arctic", "num_local_experts": 5, "num_experts_per_tok": 2,
                "moe_layer_frequency": 2, "parallel_attn_mlp_res": True}  # fmt: skip


GROK_NORMS = {
    "input_layernorm": "pre_attn_norm",
    "post_attention_layernorm": "post_attn_norm",
    "pre_feedforward_layernorm": "pre_moe_norm",
    "post_feedforward_layernorm": "post_moe_norm",
}


class TestGrok1(RelaidConformance):
    """Gemma 2's blocks, whose norms' weights lack 1, with mixtures and without windows."""

    published = "Grok1ModelForCausalLM"
    experts = ("linear", "linear_v", "linear_1")

    def hf_class(self) -> Any:
        from transformers import Gemma2ForCausalLM

        return Gemma2ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Gemma2Config

        own = {"head_dim": 18, "query_pre_attn_scalar": 18, "attn_logit_softcapping": 0.8,
               "final_logit_softcapping": None, "layer_types": ["full_attention"] * 3,
               "tie_word_embeddings": False, "rms_norm_eps": 1e-5}  # fmt: skip
        return Gemma2Config(**{**TINY, **own, **overrides})

    def prepare(self, reference: Any) -> None:
        for layer in reference.model.layers:
            layer.mlp = self.mixture()

    def mixture(self) -> nn.Module:
        experts = [PlainMLP(self.experts, 72, 100, gelu_tanh) for _ in range(5)]
        return PlainMixture(experts, 72, soft_cap=0.7, renormalise=False)

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        return super().logits(model, ids, mask) * 0.6

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        dropped = ("head_dim", "layer_types", "sliding_window", "attn_logit_softcapping")
        kept = {key: value for key, value in config.items() if key not in dropped}
        return {**kept, "model_type": "grok-1", "num_experts": 5, "num_experts_per_tok": 2,
                "max_attn_value": 0.8, "attn_output_multiplier": 18**-0.5, "hidden_act": "gelu",
                "output_multiplier_scale": 0.6, "router_logit_softcapping": 0.7,
                "embedding_multiplier_scale": 72**0.5}  # fmt: skip

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        return {self.spelled(n): t + 1 if "norm" in n else t for n, t in tensors.items()}

    def spelled(self, name: str) -> str:
        name = name.replace("self_attn", "attn").replace(".mlp.", ".moe_block.")
        for own, published in GROK_NORMS.items():
            name = name.replace(own, published)
        return name.replace("norm.weight", "norm.scale")


class GrokTwoHalves(nn.Module):
    """A mixture and an MLP that all tokens go to."""

    def __init__(self, mixture: nn.Module, mlp: nn.Module) -> None:
        super().__init__()
        self.block_sparse_moe, self.mlp = mixture, mlp

    def forward(self, x: Tensor) -> Tensor:
        both: Tensor = (self.block_sparse_moe(x) + self.mlp(x)) / 2**0.5
        return both


GROK_GROWS_BEHIND = 9
"""Positions from which on Grok 2's scores grow, fewer than the prompts have."""


def grok_attention(
    module: Any, query: Tensor, key: Tensor, value: Tensor, mask: Tensor, **_: Any
) -> Any:
    """Grok 2's, of whole sequences: capped scores grow with the query's position."""
    groups = query.shape[1] // key.shape[1]
    key, value = (x.repeat_interleave(groups, dim=1) for x in (key, value))
    scores = query @ key.transpose(2, 3) * module.scaling
    scores = torch.tanh(scores / 0.8) * 0.8
    position = torch.arange(query.shape[2]).clamp(min=1)
    grown = position.log() / torch.tensor(float(GROK_GROWS_BEHIND)).log()
    scores = scores * torch.where(position > GROK_GROWS_BEHIND, grown, 1.0)[:, None]
    weights = torch.softmax(scores + mask, dim=-1)
    return (weights @ value).transpose(1, 2).contiguous(), weights


class TestGrok2(TestGrok1):
    published = "Grok1ForCausalLM"
    experts = ("w1", "w3", "w2")

    def mixture(self) -> nn.Module:
        names = ("gate_proj", "up_proj", "down_proj")
        return GrokTwoHalves(super().mixture(), PlainMLP(names, 72, 60, gelu_tanh))

    def logits(self, model: Any, ids: Tensor, mask: Tensor | None) -> Tensor:
        found = super().logits(model, ids, mask)
        return torch.tanh(found / 3.0) * 3.0

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        config = super().config_of(config)
        renamed = {"num_local_experts": config.pop("num_experts"),
                   "attn_logit_softcapping": config.pop("max_attn_value")}  # fmt: skip
        return {**config, **renamed, "model_type": "git", "residual_moe": True,
                "moe_intermediate_size": 100, "intermediate_size": 60, "rope_type": "original",
                "final_logit_softcapping": 3.0, "attn_temperature_len": GROK_GROWS_BEHIND}  # fmt: skip

    def spelled(self, name: str) -> str:
        for own, published in GROK_NORMS.items():
            name = name.replace(own, published)
        return name.replace(".mlp.block_sparse_moe", ".block_sparse_moe").replace(
            ".mlp.mlp", ".mlp"
        )

    def prepare(self, reference: Any) -> None:
        from transformers.masking_utils import ALL_MASK_ATTENTION_FUNCTIONS, eager_mask
        from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

        ALL_ATTENTION_FUNCTIONS.register("grok", grok_attention)
        ALL_MASK_ATTENTION_FUNCTIONS.register("grok", eager_mask)
        reference.set_attn_implementation("grok")
        super().prepare(reference)

    def test_experts_in_the_parts_of_ranks(
        self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path
    ) -> None:
        """As published: files for each rank hold a piece of each expert's matrices, all others are
        common."""
        self.write_parts(checkpoint, tmp_path)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))

    def test_progress_over_the_parts_of_ranks(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self.write_parts(checkpoint, tmp_path)
        seen: list[LoadProgress] = []
        for _ in SafetensorsFormat(LoadConfig()).tensors(tmp_path, seen.append):
            pass
        done = [each.done for each in seen]
        assert done == sorted(done)
        assert {each.total for each in seen} == {done[-1]}

    def write_parts(self, checkpoint: Checkpoint, folder: Path) -> None:
        shutil.copy(checkpoint.path / "config.json", folder)
        tensors = load_file(checkpoint.path / "model.safetensors")
        experts = {name: x for name, x in tensors.items() if ".experts." in name}
        common = {name: x for name, x in tensors.items() if name not in experts}
        save_file(common, folder / "pytorch_model-00000-TP-common.safetensors")
        for number, part in enumerate(("w1", "w2", "w3"), 1):
            own = {name: x for name, x in experts.items() if f".{part}." in name}
            for rank in range(4):
                file = folder / f"pytorch_model-{number:05}-TP-{rank:03}.safetensors"
                cut = {
                    n: x.chunk(4, dim=int(part == "w2"))[rank].contiguous() for n, x in own.items()
                }
                save_file(cut, file)

    def test_a_rank_that_is_missing(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self.write_parts(checkpoint, tmp_path)
        (tmp_path / "pytorch_model-00002-TP-001.safetensors").unlink()
        with pytest.raises(WeightsError, match=r"pytorch_model-00002-TP-001\.safetensors: file is"):
            self.open(tmp_path)

    def test_ranks_that_do_not_agree(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        self.write_parts(checkpoint, tmp_path)
        file = tmp_path / "pytorch_model-00002-TP-001.safetensors"
        tensors = load_file(file)
        name = min(tensors)
        save_file({**tensors, name: tensors[name][:-1].contiguous()}, file)
        with pytest.raises(WeightsError, match=r"pieces of ranks have the shapes"):
            self.open(tmp_path)
        del tensors[name]
        save_file(tensors, file)
        with pytest.raises(WeightsError, match="is not in the files of all ranks"):
            self.open(tmp_path)


class TestPanguUltraMoE(RelaidConformance):
    """DeepSeek V3, whose last projections are followed by norms; the first release's names of sizes."""

    published = "PanguUltraMoEForCausalLM"
    flips_ties: ClassVar[bool] = False

    def hf_class(self) -> Any:
        from transformers import DeepseekV3ForCausalLM

        return DeepseekV3ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import DeepseekV3Config

        own = {"first_k_dense_replace": 1, "rope_parameters": {"rope_theta": 300.0}, "n_group": 1,
               "topk_group": 1}  # fmt: skip
        return DeepseekV3Config(**{**LATENT, **EXPERTS, **own, **overrides})

    def prepare(self, reference: Any) -> None:
        for layer in reference.model.layers:
            norm = type(layer.input_layernorm)
            attention = layer.self_attn
            attention.o_proj = nn.Sequential(attention.o_proj, norm(72))
            layer.mlp = nn.Sequential(layer.mlp, norm(72))

    def config_of(self, config: dict[str, Any]) -> dict[str, Any]:
        names = {
            "q_lora_rank": "attention_q_lora_dim", "kv_lora_rank": "attention_kv_lora_dim",
            "qk_nope_head_dim": "attention_qk_dim", "qk_rope_head_dim": "attention_qk_rope_dim",
            "v_head_dim": "attention_v_dim", "first_k_dense_replace": "num_dense_layers",
            "n_routed_experts": "num_routed_experts", "n_shared_experts": "num_shared_experts",
        }  # fmt: skip
        renamed = {names.get(key, key): value for key, value in config.items()}
        return {**renamed, "model_type": "pangu_ultra_moe", "sandwich_norm": True}

    def tensors_of(self, tensors: dict[str, Tensor]) -> dict[str, Tensor]:
        found: dict[str, Tensor] = {}
        for name, tensor in tensors.items():
            name = name.replace("post_attention_layernorm", "pre_mlp_layernorm")
            name = name.replace("self_attn.o_proj.1", "post_attention_layernorm")
            name = name.replace("o_proj.0", "o_proj").replace("mlp.1.", "post_mlp_layernorm.")
            name = name.replace("mlp.0.", "mlp.")
            found |= apart(name, tensor) if ".experts." in name else {name: tensor}
        return found


class TestMistral4(FamilyConformance):
    """Mistral Large 3's kind; queries grow from the fifth token on."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import Mistral4ForCausalLM

        return Mistral4ForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import Mistral4Config

        rope = {**YARN, "original_max_position_embeddings": 5, "llama_4_scaling_beta": 0.4}
        own = {"first_k_dense_replace": 1, "rope_parameters": rope, "attention_bias": True}
        return Mistral4Config(**{**LATENT, **EXPERTS, **own, **overrides})


class TestLaguna(MoEConformance):
    """Six heads in the layer with a window, four in the others; a gate for each head."""

    stem = "Laguna"
    own: ClassVar = {
        **TINY_MOE, "num_experts": 8, "shared_expert_intermediate_size": 44, "head_dim": 20,
        "num_attention_heads_per_layer": [4, 6, 4], "sliding_window": 9, "attention_bias": True,
        "layer_types": ["full_attention", "sliding_attention", "full_attention"],
        "moe_routed_scaling_factor": 1.7, "moe_router_logit_softcapping": 0.7,
    }  # fmt: skip


class TestLagunaByElement(TestLaguna):
    own: ClassVar = {**TestLaguna.own, "gating": "per-element"}
