"""openPangu Pro MoE V2, beside a plain module."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from plain_reference import (
    PlainConformance,
    PlainDecoder,
    PlainMLP,
    Weight,
    attended,
    linear,
    rms_norm,
    rotated,
)
from torch import Tensor, nn

from headrace_testing.model.decoders import PagedDriver


class PlainAttention(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.config, hidden = config, config.hidden_size
        self.size, wide = config.qk_nope_dim + config.qk_rope_dim, config.v_channels
        heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
        self.q_proj = linear(hidden, heads * self.size)
        self.k_proj = linear(hidden, kv_heads * self.size)
        self.v_proj, self.o_proj = linear(hidden, kv_heads * wide), linear(heads * wide, hidden)
        self.k_layernorm = Weight(self.size)
        windows = config.interleaved_sliding_window
        self.window = windows[index % len(windows)]
        count = config.param_sink_number
        self.param_sink_key = nn.Parameter(torch.ones(count, kv_heads, self.size))
        if config.param_sink_with_value:
            self.param_sink_value = nn.Parameter(torch.ones(count, kv_heads, wide))

    def forward(self, x: Tensor) -> Tensor:
        config, wide = self.config, self.config.v_channels
        query = self.q_proj(x).unflatten(-1, (-1, self.size))
        key = self.k_proj(x).unflatten(-1, (-1, self.size))
        value = self.v_proj(x).unflatten(-1, (-1, wide))
        norm = self.k_layernorm.weight
        first = rms_norm(self.param_sink_key, norm, config.rms_norm_eps)
        more = torch.zeros(*first.shape[:2], wide)
        if config.param_sink_with_value:
            more = self.param_sink_value
        query, key = (
            rotated(part, config.rope_theta, config.qk_rope_dim)
            for part in (query, rms_norm(key, norm, config.rms_norm_eps))
        )
        scale, window = self.size**-0.5, self.window or None
        out = attended(query, key, value, scale, window=window, prefix=(first, more))
        return self.o_proj(out.flatten(1))


class PlainGate(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.config = config
        self.weight = nn.Parameter(torch.zeros(config.n_routed_experts, config.hidden_size))
        self.e_score_correction_bias = nn.Parameter(torch.zeros(config.n_routed_experts))


class PlainMixture(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        hidden, inner = config.hidden_size, config.moe_intermediate_size
        self.config, self.gate = config, PlainGate(config)
        self.experts = nn.ModuleList(
            PlainMLP(hidden, inner) for _ in range(config.n_routed_experts)
        )
        self.shared_experts = PlainMLP(hidden, inner * config.n_shared_experts)

    def forward(self, x: Tensor) -> Tensor:
        scores = (x @ self.gate.weight.T).sigmoid()
        choice = scores + self.gate.e_score_correction_bias
        chosen = choice.topk(self.config.num_experts_per_tok, dim=-1)[1]
        weights = scores.gather(1, chosen)
        weights = self.config.routed_scaling_factor * weights / weights.sum(-1, keepdim=True)
        of_all = torch.zeros_like(scores).scatter(1, chosen, weights)
        found = torch.stack([expert(x) for expert in self.experts], dim=1)
        return (found * of_all[..., None]).sum(1) + self.shared_experts(x)


NORMS = ("input", "post_attention", "pre_mlp", "post_mlp")


class PlainLayer(nn.Module):
    def __init__(self, config: Any, index: int) -> None:
        super().__init__()
        self.eps, self.self_attn = config.rms_norm_eps, PlainAttention(config, index)
        dense = index < config.first_k_dense_replace
        self.mlp: nn.Module = PlainMixture(config)
        if dense:
            self.mlp = PlainMLP(config.hidden_size, config.intermediate_size)
        for name in NORMS:
            setattr(self, f"{name}_layernorm", Weight(config.hidden_size))

    def norm(self, x: Tensor, name: str) -> Tensor:
        return rms_norm(x, getattr(self, f"{name}_layernorm").weight, self.eps)

    def forward(self, x: Tensor) -> Tensor:
        x = x + self.norm(self.self_attn(self.norm(x, "input")), "post_attention")
        return x + self.norm(self.mlp(self.norm(x, "pre_mlp")), "post_mlp")


class TestPanguProMoEV2(PlainConformance):
    """A layer with a window and learned keys, one without a window, a dense one."""

    published = "PanguProMoEV2ForCausalLM"
    flips_ties = False
    settings: ClassVar[dict[str, Any]] = {
        "vocab_size": 131, "hidden_size": 48, "num_hidden_layers": 3, "intermediate_size": 60,
        "num_attention_heads": 4, "num_key_value_heads": 2, "qk_nope_dim": 10, "qk_rope_dim": 6,
        "v_channels": 12, "param_sink_number": 5, "param_sink_with_value": True,
        "interleaved_sliding_window": [9, 0], "rope_theta": 5000.0, "rms_norm_eps": 1e-5,
        "n_routed_experts": 6, "n_shared_experts": 2, "num_experts_per_tok": 2,
        "moe_intermediate_size": 20, "first_k_dense_replace": 1, "routed_scaling_factor": 1.5,
        "norm_topk_prob": True, "router_enable_expert_bias": True, "sandwich_norm": True,
        "hidden_act": "silu", "max_position_embeddings": 128, "tie_word_embeddings": False,
    }  # fmt: skip

    def module(self, config: Any) -> nn.Module:
        count = config.num_hidden_layers
        return PlainDecoder(config, [PlainLayer(config, index) for index in range(count)])

    def test_learned_keys_without_values(self, tmp_path: Path) -> None:
        other = self.make_checkpoint(tmp_path, seed=1, param_sink_with_value=False)
        prompt = self.prompt(12)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        self.assert_close(logits, other.logprobs(prompt))
