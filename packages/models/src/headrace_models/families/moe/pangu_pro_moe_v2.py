"""openPangu Pro MoE V2: learned keys and values before every request, values narrower than keys, norms before
and after both halves, experts routed as DeepSeek V3's. Huawei 2025, openPangu-R-72B-2512.

Block: ``h = x + norm(attention(norm(x))); h + norm(mlp(norm(h)))``.

Letters: T tokens, S learned keys, Hk key-value heads, D size of a query's and a key's head, V of a value's.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

from torch.nn.functional import pad

from headrace_core.attention import KV_PREFIX
from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import MAX_HEAD_DIM, Spelling
from headrace_models.layers.attention.padded_values import PaddedValueAttention
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.blocks import SandwichBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.moe import MOE_RULES, MoEDecoder
from headrace_models.layers.linear import shard_of
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.rotary import rotary_table
from headrace_models.loading.further_layers import further_layers

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

MAX_LEARNED = 4096
_LAYER = "model.layers.{}"
_ATTENTION = f"{_LAYER}.self_attn"


class PrefixedAttention(PaddedValueAttention):
    """Attention to the context and to keys and values of the layer's own, which stand before every request.

    Learned keys pass through the keys' norm and do not turn.

    Args:
        count: S.
        learned_values: True: they have values; else zeros.
        key_norm: of all keys.
        arguments: of :class:`~headrace_models.layers.attention.padded_values.PaddedValueAttention`.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        num_kv_heads: int,
        head_dim: int,
        value_dim: int,
        count: int,
        learned_values: bool,
        key_norm: RMSNorm,
        **arguments: Any,
    ) -> None:
        super().__init__(
            context,
            name,
            num_kv_heads=num_kv_heads,
            head_dim=head_dim,
            value_dim=value_dim,
            key_norm=key_norm,
            features={KV_PREFIX},
            **arguments,
        )
        shard = shard_of(num_kv_heads, context.communicator, what=f"{name}, key-value heads")
        own = Part(num_kv_heads // shard.count, shard)
        self.learned_keys = Learned(f"{name}.param_sink_key", (count, own.size, head_dim), own)
        self.learned_values: Learned | None = None
        if learned_values:
            shape = (count, own.size, value_dim)
            self.learned_values = Learned(f"{name}.param_sink_value", shape, own)

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        super().bind_cache(kv_cache, group)
        assert self.key_norm is not None
        key = self.key_norm(self.learned_keys.weight)
        value = key.new_zeros(key.shape)
        if self.learned_values is not None:
            value = pad(self.learned_values.weight, (0, self.head_dim - self.value_dim))
        own = {"kv_prefix_key": key, "kv_prefix_value": value}
        self.spec = replace(self.spec, extras={**self.spec.extras, **own})


class Learned(WeightLayer):
    """A tensor [S, Hk, size], its heads spread over the ranks."""

    weight: Tensor

    def __init__(self, name: str, shape: tuple[int, int, int], heads: Part) -> None:
        self.name, self.shape, self.heads = name, shape, heads

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot(self.shape, parts=(self.heads,), part_dim=1)}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        self.weight = tensors["weight"]


class PanguProMoEV2ForCausalLM(MoEDecoder):
    """openPangu-R-72B-2512."""

    weight_rules: ClassVar[Sequence[WeightRule]] = (
        *(r for r in MOE_RULES if not r.target.endswith("mlp_norm")),
        WeightRule(f"{_LAYER}.post_attention_layernorm", "layers.{}.attention_out_norm"),
        WeightRule(f"{_LAYER}.pre_mlp_layernorm", "layers.{}.mlp_norm"),
        WeightRule(f"{_LAYER}.post_mlp_layernorm", "layers.{}.mlp_out_norm"),
        WeightRule(f"{_ATTENTION}.k_layernorm", "layers.{}.attention.key_norm"),
        WeightRule(f"{_ATTENTION}.param_sink_key", "layers.{}.attention.learned_keys.weight"),
        WeightRule(f"{_ATTENTION}.param_sink_value", "layers.{}.attention.learned_values.weight"),
    )
    spelling: ClassVar[Spelling] = {
        "n_routed_experts": ("num_routed_experts", "num_experts"),
        "n_shared_experts": ("num_shared_experts",),
        "first_k_dense_replace": ("num_dense_layers",),
    }

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """See :class:`headrace_core.model.IgnoresWeights`."""
        return further_layers(self.settings, self.num_layers())

    def prepare(self, context: BuildContext, prefix: str) -> None:
        for key in ("use_mhc", "use_mome", "param_sink_of_head_num", "param_sink_of_head_dim"):
            self.settings.refuse(key, False)
        for key in ("param_sink_scalar", "index_topk", "kv_lora_rank"):
            self.settings.refuse(key)
        self.settings.refuse("block_post_layernorm_idx", [])
        self.settings.refuse("sandwich_norm", True)
        self.key_dims = [
            self.settings.integer(key, maximum=MAX_HEAD_DIM)
            for key in ("qk_nope_dim", "qk_rope_dim")
        ]
        size = self.head_dim()
        rope = rope_settings(self.settings.config, theta=self.default_theta)
        # Half a dimension more, as the product of share and size is rounded down.
        rope = replace(rope, partial_rotary_factor=(self.key_dims[1] + 0.5) / size)
        limit = self.settings.integer("max_position_embeddings", 2048)
        self.rotary = rotary_table(context, rope, size, max_positions=limit)

    def head_dim(self) -> int:
        return sum(self.key_dims)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        return SandwichBlock(
            self.make_norm(context, f"{name}.input_layernorm"),
            self.make_attention(context, index, f"{name}.self_attn"),
            self.make_norm(context, f"{name}.post_attention_layernorm"),
            self.make_norm(context, f"{name}.pre_mlp_layernorm"),
            self.make_mlp(context, index, f"{name}.mlp"),
            self.make_norm(context, f"{name}.post_mlp_layernorm"),
        )

    def make_attention(self, context: BuildContext, index: int, name: str) -> SelfAttention:
        bias = self.settings.flag("attention_bias", self.settings.flag("bias", False))
        size, count = self.head_dim(), self.learned_keys()
        arguments: dict[str, Any] = {
            "hidden_size": self.hidden_size(),
            "num_heads": self.settings.integer("num_attention_heads"),
            "num_kv_heads": self.settings.num_kv_heads(),
            "head_dim": size,
            "value_dim": self.settings.integer("v_channels", maximum=MAX_HEAD_DIM),
            "rotary": self.rotary,
            "key_norm": RMSNorm(context, f"{name}.k_layernorm", size, self.norm_eps()),
            "sliding_window": self.window(index),
            "qkv_bias": self.settings.flag("qkv_bias", bias),
            "out_bias": bias,
        }
        if not count:
            return PaddedValueAttention(context, name, **arguments)
        values = self.settings.flag("param_sink_with_value", False)
        return PrefixedAttention(context, name, count=count, learned_values=values, **arguments)

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        """Without the switch there is a correction, as published configs have one."""
        corrected = self.settings.flag("router_enable_expert_bias", True)
        return super().make_mixture(
            context, index, name, corrected=corrected, exact_router=True, **differences
        )

    def learned_keys(self) -> int:
        """Number of keys that stand before every request."""
        return self.settings.integer("param_sink_number", 0, minimum=0, maximum=MAX_LEARNED)

    def window(self, index: int) -> int | None:
        """One for all layers, or a list that they repeat; None and what is not above 0: everything."""
        stated = self.settings.config.get("interleaved_sliding_window")
        windows: list[Any] = stated if isinstance(stated, list) and stated else [stated]
        if not all(w is None or (type(w) is int and abs(w) < 2**31) for w in windows):
            raise UnsupportedModel(
                f"config.json: interleaved_sliding_window = {stated!r:.200}: must be a number of "
                "tokens below 2**31 or a list of them"
            )
        window = windows[index % len(windows)]
        return window if window is not None and window > 0 else None
