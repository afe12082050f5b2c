"""Apertus: Llama with head norms and an MLP without a gate, whose activation (xIELU) learns two numbers.

Swiss AI Initiative 2025, arXiv:2509.14233; the activation: Huang & Schlag 2024, arXiv:2411.13010.

Letters: T tokens, I intermediate size.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, ClassVar

import torch.nn.functional as F

from headrace_core.model import WeightRule
from headrace_core.ops.optional.xielu import XIELU as XIELU_OP
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.linear import column_parallel, row_parallel
from headrace_models.layers.mlp import MLPLayer
from headrace_models.loading.rules.llama import HEAD_NORM_RULES, NON_GATED_RULES

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_BETA, _EPS = 0.5, -1e-6


class XIELU(WeightLayer):
    """See :class:`headrace_core.ops.optional.xielu.XIELUOp`. Stored are ``alpha_p`` and ``alpha_n`` [1],
    before their softplus, and perhaps the constants ``beta`` and ``eps`` []."""

    def __init__(self, context: BuildContext, name: str) -> None:
        self.name, self.xielu = name, context.ops.optional(XIELU_OP)

    def slots(self) -> Mapping[str, Slot]:
        learned = Slot((1,), "float32", any_float=True)
        constant = Slot((), "float32", any_float=True, required=False)
        return {"alpha_p": learned, "alpha_n": learned, "beta": constant, "eps": constant}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.beta = float(tensors["beta"]) if "beta" in tensors else _BETA
        self.eps = float(tensors["eps"]) if "eps" in tensors else _EPS
        self.alpha_p = float(F.softplus(tensors["alpha_p"]))
        self.alpha_n = self.beta + float(F.softplus(tensors["alpha_n"]))

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, I] -> the same shape."""
        return self.xielu(x, self.alpha_p, self.alpha_n, beta=self.beta, eps=self.eps)


class XIELUMLP(MLPLayer):
    """``down(xielu(up(x)))``."""

    def __init__(
        self, context: BuildContext, name: str, hidden_size: int, intermediate_size: int
    ) -> None:
        self.up = column_parallel(context, f"{name}.up_proj", hidden_size, (intermediate_size,))
        self.activation = XIELU(context, f"{name}.act_fn")
        self.down = row_parallel(context, f"{name}.down_proj", intermediate_size, hidden_size)

    def __call__(self, x: Tensor) -> Tensor:
        return self.down(self.activation(self.up(x)))


class ApertusForCausalLM(LlamaDecoder):
    """Apertus 8B and 70B."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(rule for rule in NON_GATED_RULES if not rule.target.endswith(("input_norm", "mlp_norm"))),
        *HEAD_NORM_RULES,
        WeightRule("model.layers.{}.attention_layernorm", "layers.{}.input_norm"),
        WeightRule("model.layers.{}.feedforward_layernorm", "layers.{}.mlp_norm"),
        WeightRule("model.layers.{}.mlp.act_fn", "layers.{}.mlp.activation"),
    )
    default_theta: ClassVar[float] = 12_000_000.0
    default_eps: ClassVar[float] = 1e-5

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return PreNormBlock(
            self.make_norm(context, f"{name}.attention_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.feedforward_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", False)
        eps = self.norm_eps()
        return self.attention(context, name, qkv_bias=bias, out_bias=bias, head_norm_eps=eps)

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        self.settings.refuse("hidden_act", "xielu")
        size = self.settings.integer("intermediate_size")
        return XIELUMLP(context, name, self.hidden_size(), size)
