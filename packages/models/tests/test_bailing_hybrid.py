"""Ling 2.5 and 3, Ring-linear: the last beside transformers, the others beside plain modules."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from model_families_conformance import FamilyConformance
from plain_reference import (
    PlainConformance,
    PlainMLP,
    Weight,
    attended,
    linear,
    rms_norm,
    rotated,
)
from relaid_conformance import rewrite
from safetensors.torch import load_file
from torch import Tensor, nn

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.decoders import Checkpoint, PagedDriver


class PlainGate(nn.Module):
    """The best experts of the best groups, by sigmoids and a correction."""

    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.num_experts, config.hidden_size))
        self.expert_bias = nn.Parameter(torch.zeros(config.num_experts))

    def forward(self, x: Tensor) -> Tensor:
        """[L, E]: weights, 0 of those that were not chosen."""
        config = self.config
        scores = (x @ self.weight.T).sigmoid()
        by_group = (scores + self.expert_bias).unflatten(-1, (config.n_group, -1))
        best = by_group.topk(2, dim=-1)[0].sum(-1).topk(config.topk_group, dim=-1)[1]
        allowed = torch.zeros(by_group.shape[:2]).scatter(1, best, 1.0)
        choice = by_group.masked_fill(allowed[..., None] == 0, -torch.inf).flatten(1)
        chosen = choice.topk(config.num_experts_per_tok, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights = config.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        return torch.zeros_like(scores).scatter(1, chosen, weights)


class PlainMixture(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.gate = PlainGate(config)
        self.experts = nn.ModuleList(PlainMLP(hidden, inner) for _ in range(config.num_experts))
        self.shared_experts = PlainMLP(hidden, inner * config.num_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        found = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (found * self.gate(x)[..., None]).sum(1) + self.shared_experts(x)


class PlainLinearAttention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config, heads = config, config.num_attention_heads
        size = heads * config.head_dim
        self.query_key_value = linear(config.hidden_size, 3 * size, config.use_qkv_bias)
        self.query_layernorm, self.key_layernorm = Weight(config.head_dim), Weight(config.head_dim)
        self.g_proj, self.dense = linear(config.hidden_size, size), linear(size, config.hidden_size)
        self.g_norm = Weight(size)
        slopes = torch.tensor([2.0 ** (-8 * (head + 1) / heads) for head in range(heads)])
        depth = (index - 1) / (config.num_hidden_layers - 1)
        self.decay = torch.exp(-slopes * (1 - depth + 1e-5))[:, None, None]

    def forward(self, x: Tensor) -> Tensor:
        config = self.config
        heads, size, eps = config.num_attention_heads, config.head_dim, config.rms_norm_eps
        qkv = self.query_key_value(x)
        if config.linear_silu:
            qkv = nn.functional.silu(qkv)
        query, key, value = qkv.unflatten(-1, (3 * heads, size)).chunk(3, dim=1)
        turning = int(size * config.partial_rotary_factor)
        query, key = (
            rotated(rms_norm(part, norm.weight, eps), config.rope_theta, turning)
            for part, norm in ((query, self.query_layernorm), (key, self.key_layernorm))
        )
        state, rows = torch.zeros(heads, size, size), []
        for t in range(x.shape[0]):
            state = self.decay * state + key[t, :, :, None] * value[t, :, None, :]
            rows.append(torch.einsum("hn,hnp->hp", query[t] * size**-0.5, state).flatten())
        groups = torch.stack(rows).unflatten(-1, (config.group_norm_size, -1))
        normed = rms_norm(groups, eps=eps).flatten(1) * self.g_norm.weight
        return self.dense(normed * self.g_proj(x).sigmoid())


class PlainGroupedAttention(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, size = config, config.head_dim
        self.heads, self.kv_heads = config.num_attention_heads, config.num_key_value_heads
        rows = (self.heads + 2 * self.kv_heads) * size
        self.query_key_value = linear(config.hidden_size, rows, config.use_qkv_bias)
        self.query_layernorm, self.key_layernorm = Weight(size), Weight(size)
        self.dense = linear(self.heads * size, config.hidden_size)

    def forward(self, x: Tensor) -> Tensor:
        config, size = self.config, self.config.head_dim
        parts = self.query_key_value(x).unflatten(-1, (-1, size))
        query, key, value = parts.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        turning = int(size * config.partial_rotary_factor)
        query, key = (
            rotated(rms_norm(part, norm.weight, config.rms_norm_eps), config.rope_theta, turning)
            for part, norm in ((query, self.query_layernorm), (key, self.key_layernorm))
        )
        return self.dense(attended(query, key, value, size**-0.5).flatten(1))


class PlainMLA(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config, self.heads = config, config.num_attention_heads
        self.nope, self.rope = config.qk_nope_head_dim, config.qk_rope_head_dim
        hidden, rank = config.hidden_size, config.q_lora_rank
        self.q_a_proj, self.q_a_layernorm = linear(hidden, rank), Weight(rank)
        self.q_b_proj = linear(rank, self.heads * (self.nope + self.rope))
        self.kv_a_proj_with_mqa = linear(hidden, config.kv_lora_rank + self.rope)
        self.kv_a_layernorm = Weight(config.kv_lora_rank)
        rows = self.heads * (self.nope + config.v_head_dim)
        self.kv_b_proj = linear(config.kv_lora_rank, rows)
        self.dense = linear(self.heads * config.v_head_dim, hidden)

    def forward(self, x: Tensor) -> Tensor:
        theta = self.config.rope_theta
        query = self.q_b_proj(rms_norm(self.q_a_proj(x), self.q_a_layernorm.weight))
        query = query.unflatten(-1, (self.heads, -1))
        latent, turning = self.kv_a_proj_with_mqa(x).split(
            [self.config.kv_lora_rank, self.rope], -1
        )
        both = self.kv_b_proj(rms_norm(latent, self.kv_a_layernorm.weight))
        key, value = both.unflatten(-1, (self.heads, -1)).tensor_split([self.nope], dim=-1)
        still, asking = query.tensor_split([self.nope], dim=-1)
        query = torch.cat((still, rotated(asking, theta, interleaved=True)), dim=-1)
        turned = rotated(turning[:, None], theta, interleaved=True).expand(-1, self.heads, -1)
        key = torch.cat((key, turned), dim=-1)
        return self.dense(attended(query, key, value, query.shape[-1] ** -0.5).flatten(1))


class PlainLayer(nn.Module):
    def __init__(self, config: Any, index: int, attention: nn.Module) -> None:
        super().__init__()
        self.eps, self.attention = config.rms_norm_eps, attention
        self.input_layernorm = Weight(config.hidden_size)
        self.post_attention_layernorm = Weight(config.hidden_size)
        dense = index < config.first_k_dense_replace
        self.mlp: nn.Module = PlainMixture(config)
        if dense:
            self.mlp = PlainMLP(config.hidden_size, config.intermediate_size)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.attention(rms_norm(x, self.input_layernorm.weight, self.eps))
        return x + self.mlp(rms_norm(x, self.post_attention_layernorm.weight, self.eps))


class PlainBailing(nn.Module):
    def __init__(self, config: Any, attends: type[nn.Module]) -> None:
        super().__init__()
        self.config, self.model = config, nn.Module()
        self.model.word_embeddings = nn.Embedding(config.vocab_size, config.hidden_size)
        self.model.layers = nn.ModuleList()
        count, size = config.num_hidden_layers, config.layer_group_size
        for index in range(count):
            full = (index + 1) % size == 0 or index >= count // size * size
            mixer = attends(config) if full else PlainLinearAttention(config, index)
            self.model.layers.append(PlainLayer(config, index, mixer))
        self.model.norm = Weight(config.hidden_size)
        self.lm_head = linear(config.hidden_size, config.vocab_size)

    def forward(self, ids: Tensor) -> Tensor:
        x = self.model.word_embeddings(ids)
        for layer in self.model.layers:
            x = layer(x)
        return self.lm_head(rms_norm(x, self.model.norm.weight, self.config.rms_norm_eps))


class TestBailingMoeLinearV2(PlainConformance):
    """A group of two layers and one that fills none, a dense layer, groups of experts and of channels."""

    published = "BailingMoeLinearV2ForCausalLM"
    flips_ties = False
    settings: ClassVar[dict[str, Any]] = {
        "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 60,
        "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 12, "layer_group_size": 2,
        "partial_rotary_factor": 0.5, "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
        "group_norm_size": 2, "use_qk_norm": True, "use_qkv_bias": True, "linear_silu": True,
        "num_experts": 6, "num_experts_per_tok": 2, "num_shared_experts": 2, "n_group": 3,
        "topk_group": 2, "moe_intermediate_size": 20, "first_k_dense_replace": 1,
        "routed_scaling_factor": 2.5, "score_function": "sigmoid", "max_position_embeddings": 128,
        "tie_word_embeddings": False, "hidden_act": "silu", "num_nextn_predict_layers": 0,
    }  # fmt: skip

    def module(self, config: Any) -> nn.Module:
        return PlainBailing(config, PlainGroupedAttention)


class TestBailingMoeV2_5(TestBailingMoeLinearV2):
    """Latent attention, of whose turning part all turns."""

    published = "BailingMoeV2_5ForCausalLM"
    settings: ClassVar[dict[str, Any]] = {
        **TestBailingMoeLinearV2.settings, "q_lora_rank": 18, "kv_lora_rank": 12,
        "qk_nope_head_dim": 10, "qk_rope_head_dim": 6, "v_head_dim": 14, "linear_silu": False,
    }  # fmt: skip

    def module(self, config: Any) -> nn.Module:
        return PlainBailing(config, PlainMLA)


class TestBailingHybrid(FamilyConformance):
    """Both mixers, decays with a bound, heads of two sizes."""

    flips_ties = False

    def hf_class(self) -> Any:
        from transformers import BailingHybridForCausalLM

        return BailingHybridForCausalLM

    def hf_config(self, **overrides: Any) -> Any:
        from transformers import BailingHybridConfig

        own = {
            "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 60,
            "num_attention_heads": 4, "num_key_value_heads": 4, "head_dim": 18,
            "layer_group_size": 2, "layer_types": ["linear_attention", "full_attention", "linear_attention"],
            "kv_lora_rank": 12, "qk_rope_head_dim": 6,
            "qk_nope_head_dim": 10, "v_head_dim": 14, "short_conv_kernel_size": 3, "n_group": 3,
            "topk_group": 2, "num_local_experts": 6, "num_experts_per_tok": 2,
            "moe_intermediate_size": 20, "n_shared_experts": 2, "first_k_dense_replace": 1,
            "kda_lower_bound": -2.0, "rope_theta": 5000.0, "pad_token_id": 0, "eos_token_id": 2,
            "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "routed_scaling_factor": 1.5,
        }  # fmt: skip
        return BailingHybridConfig(**{**own, **overrides})

    def test_published_name(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        checkpoint.reference.save_pretrained(tmp_path)
        rewrite(tmp_path, architectures=["BailingMoeV3ForCausalLM"], no_kda_lora=True)
        names = load_file(tmp_path / "model.safetensors").keys()
        assert any(".attention.q_conv1d." in name for name in names), "as published"
        prompt = self.prompt(self.prompt_len)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, checkpoint.logprobs(prompt))

    def test_decays_without_a_bound(self, tmp_path: Path) -> None:
        other = self.make_checkpoint(tmp_path, seed=1, kda_safe_gate=False)
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, other.logprobs(prompt))

    def test_no_gates_of_a_billion_heads(self, checkpoint: Checkpoint) -> None:
        with pytest.raises(UnsupportedModel, match=r"g_proj: 2147483647 heads: must be at most"):
            self.open(checkpoint.path, hf_overrides={"num_attention_heads": 2**31 - 1})
