"""PLaMo 2: a state-space scan and attention in turns, norms before and after both halves, whose weights
are stored less different numbers. Preferred Networks 2025, arXiv:2509.04897.

The scan is Mamba 2's; step, keys and queries come of what was convolved, as Mamba's do.

Block: ``h = x + norm(mixer(norm(x))); h + norm(mlp(norm(h)))``, the mixer being a scan or attention.

Letters: T tokens, H heads of P channels, N length of a channel's state, R rank of the step.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.kv import StateShape
from headrace_core.model import EACH_KV_HEAD, WeightRule
from headrace_models.config.recurrent_settings import MAX_TAPS
from headrace_models.config.settings import MAX_HEAD_DIM, Spelling
from headrace_models.layers.attention.heads_norm import HeadRMSNorm
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Part
from headrace_models.layers.blocks import Mixer
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import Linear, column_parallel, dividing_shard, row_parallel
from headrace_models.layers.mlp import GatedMLP, MLPLayer
from headrace_models.layers.norm import NormLayer, RMSNorm
from headrace_models.layers.recurrent.causal_conv import CausalConv
from headrace_models.layers.recurrent.mamba2 import Mamba2Sizes, StateSpaceScan
from headrace_models.layers.recurrent.state_layer import RecurrentLayer
from headrace_models.loading.mapping import ALL_PARTS

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext

VECTOR_NORMS = ("B_norm", "C_norm", "dt_norm")
"""Norms of keys, queries and steps, in the order in which they are projected."""
AFTER_MIXER, AFTER_MLP = 1 / 5, 1 / 5**1.5
"""Numbers that the weights of the norms behind the halves lack; of all other norms it is 1."""
_LAYER = "model.layers.layers.{}"
_MIXER = f"{_LAYER}.mixer"
_HEAD_EPS = 1e-6
"""Epsilon of the norms of queries and keys; the config's value is ignored."""
_LEAST_RANK = 64
"""Least rank of the step."""


class PlamoMamba(RecurrentLayer):
    """``out(scan(x) * silu(gate))``. Heads are spread over the ranks.

    Args:
        step_rank: R.
        norm_eps: of the norms of step, key and query.

    Raises:
        UnsupportedModel: several groups; keys and queries are of all heads.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: Mamba2Sizes,
        *,
        step_rank: int,
        norm_eps: float,
    ) -> None:
        if sizes.num_groups != 1:
            raise UnsupportedModel(f"{name}: {sizes.num_groups} groups of heads: must be 1")
        shard = dividing_shard(sizes.num_heads, context.communicator, what=f"{name}, heads")
        heads = Part(sizes.num_heads // shard.count, shard)
        channels = Part(sizes.channels // shard.count, shard)
        conv = CausalConv(
            context, f"{name}.conv1d", (channels,), sizes.taps, bias=False, activation="silu"
        )
        scanned = StateShape((heads.size, sizes.head_dim, sizes.state_size), "float32")
        super().__init__(context, name, (conv.state_shape(), scanned))
        self.ops, self.sizes = context.ops, sizes
        length = sizes.state_size
        self.vectors = [length, length, step_rank]
        self.in_proj = column_parallel(
            context,
            f"{name}.in_proj",
            sizes.hidden_size,
            (sizes.channels, sizes.channels),
            units=(sizes.num_heads,) * 2,
        )
        self.conv = conv
        self.bcdt_proj = row_parallel(
            context, f"{name}.bcdt_proj", sizes.channels, sum(self.vectors)
        )
        self.norms = [
            RMSNorm(context, f"{name}.{norm}", size, norm_eps)
            for norm, size in zip(VECTOR_NORMS, self.vectors)
        ]
        self.dt_proj = Linear(context, f"{name}.dt_proj", step_rank, (heads,))
        self.scan = StateSpaceScan(context, name, heads, (0.0, float("inf")))
        self.out_proj = row_parallel(context, f"{name}.out_proj", sizes.channels, sizes.hidden_size)

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        gate, inner = self.in_proj(x).chunk(2, dim=-1)
        inner = self.conv(inner, self.state(0, batch))
        vectors = torch.split(self.bcdt_proj(inner), self.vectors, dim=-1)
        key, query, step = (norm(v) for norm, v in zip(self.norms, vectors))
        length = self.sizes.state_size
        out = self.scan(
            by_heads(inner, self.sizes.head_dim),
            self.dt_proj(step),
            by_heads(key, length),
            by_heads(query, length),
            self.state(1, batch),
        )
        return self.out_proj(self.ops.gate(out.flatten(1), gate, activation="silu"))


class Plamo2Block(Block):
    """``h = x + norm(mixer(norm(x))); h + norm(mlp(norm(h)))``, the mixer being a scan or attention."""

    def __init__(
        self,
        input_norm: NormLayer,
        mixer: Mixer,
        mixer_out_norm: NormLayer,
        mlp_norm: NormLayer,
        mlp: MLPLayer,
        mlp_out_norm: NormLayer,
    ) -> None:
        self.input_norm = input_norm
        self.mixer = mixer
        self.mixer_out_norm = mixer_out_norm
        self.mlp_norm = mlp_norm
        self.mlp = mlp
        self.mlp_out_norm = mlp_out_norm

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.mixer_out_norm(self.mixer(x, batch))
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp_out_norm(self.mlp(x)), stream


class Plamo2ForCausalLM(LlamaDecoder):
    """PLaMo 2 1B and 8B, 2.1 and 2.2."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule("model.embed_tokens", "embed"),
        WeightRule(f"{_LAYER}.pre_mixer_norm", "layers.{}.input_norm"),
        WeightRule(f"{_MIXER}.qkv_proj", "layers.{}.mixer.qkv", split=ALL_PARTS),
        WeightRule(f"{_MIXER}.q_weight", "layers.{}.mixer.query_norm.weight"),
        WeightRule(f"{_MIXER}.k_weight", "layers.{}.mixer.key_norm.weight"),
        WeightRule(f"{_MIXER}.o_proj", "layers.{}.mixer.out"),
        WeightRule(
            f"{_MIXER}.in_proj", "layers.{}.mixer.in_proj", split=ALL_PARTS, groups=EACH_KV_HEAD
        ),
        WeightRule(f"{_MIXER}.conv1d", "layers.{}.mixer.conv"),
        WeightRule(f"{_MIXER}.bcdt_proj", "layers.{}.mixer.bcdt_proj"),
        *(
            WeightRule(f"{_MIXER}.{norm}_weight", f"layers.{{}}.mixer.norms.{index}.weight")
            for index, norm in enumerate(VECTOR_NORMS)
        ),
        WeightRule(f"{_MIXER}.dt_proj", "layers.{}.mixer.dt_proj"),
        *(
            WeightRule(f"{_MIXER}.{name}", f"layers.{{}}.mixer.scan.{name}")
            for name in ("A_log", "D", "dt_bias")
        ),
        WeightRule(f"{_MIXER}.out_proj", "layers.{}.mixer.out_proj"),
        WeightRule(f"{_LAYER}.post_mixer_norm", "layers.{}.mixer_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_norm", "layers.{}.mlp_norm"),
        WeightRule(f"{_LAYER}.mlp.gate_up_proj", "layers.{}.mlp.gate_up", split=ALL_PARTS),
        WeightRule(f"{_LAYER}.mlp.down_proj", "layers.{}.mlp.down"),
        WeightRule(f"{_LAYER}.post_mlp_norm", "layers.{}.mlp_out_norm"),
        WeightRule("model.norm", "final_norm"),
        WeightRule("lm_head", "head"),
    )
    blocks_name: ClassVar[str] = "model.layers.layers"
    spelling: ClassVar[Spelling] = {"head_dim": ("hidden_size_per_head",)}
    ties_embeddings: ClassVar[bool] = True

    def prepare(self, context: BuildContext, prefix: str) -> None:
        self.settings.refuse("linear_type", "normal")
        self.settings.refuse("eval_attention_n_bit")
        self.settings.refuse("eval_mlp_n_bit")
        super().prepare(context, prefix)

    def head_dim(self) -> int:
        return self.settings.integer("head_dim", 128, maximum=MAX_HEAD_DIM)

    def attends(self, index: int) -> bool:
        """True if the layer's mixer is attention: one of a period, the last one in short stacks."""
        if not self.settings.flag("mamba_enabled", True):
            return True
        step, count = self.settings.integer("mamba_step", 2), self.num_layers()
        if count <= step // 2:
            return index == count - 1
        return index % step == step // 2

    def make_norm(self, context: BuildContext, name: str, offset: float = 1.0) -> NormLayer:
        return RMSNorm(context, name, self.hidden_size(), self.norm_eps(), offset=offset)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return Plamo2Block(
            self.make_norm(context, f"{name}.pre_mixer_norm"),
            self.make_mixer(context, index, f"{name}.mixer"),
            self.make_norm(context, f"{name}.post_mixer_norm", AFTER_MIXER),
            self.make_norm(context, f"{name}.pre_mlp_norm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_norm", AFTER_MLP),
        )

    def make_mixer(self, context: BuildContext, index: int, name: str) -> Mixer:
        if self.attends(index):
            return self.make_attention(context, index, name)
        sizes = Mamba2Sizes(
            hidden_size=self.hidden_size(),
            num_heads=self.settings.integer("mamba_num_heads", 64),
            head_dim=self.head_dim(),
            num_groups=1,
            state_size=self.settings.integer("mamba_d_state", 64),
            taps=self.settings.integer("mamba_d_conv", 4, maximum=MAX_TAPS),
        )
        rank = max(_LEAST_RANK, self.hidden_size() // 16)
        return PlamoMamba(context, name, sizes, step_rank=rank, norm_eps=self.norm_eps())

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        """The published window does not count the token itself."""
        whole = index in self.settings.integers("full_attention_idx")
        size, heads = self.head_dim(), self.settings.integer("num_attention_heads")
        kv_heads = self.settings.num_kv_heads()
        return self.attention(
            context,
            name,
            sliding_window=None
            if whole
            else self.settings.integer("attention_window_size", 2048) + 1,
            query_norm=HeadRMSNorm(context, f"{name}.q_weight", heads, size, _HEAD_EPS),
            key_norm=HeadRMSNorm(context, f"{name}.k_weight", kv_heads, size, _HEAD_EPS),
            part_names=(),
        )

    def make_mlp(self, context: BuildContext, index: int, name: str) -> MLPLayer:
        return GatedMLP(
            context,
            name,
            self.hidden_size(),
            self.settings.integer("intermediate_size"),
            self.settings.activation("hidden_act", default="silu"),
            stored_fused=True,
        )
