"""Multi-head latent attention: keys and values of all heads are made of one small vector a token.

Letters: T tokens, H heads of this rank, R size of a latent (``kv_lora_rank``), P rotated dimensions,
K dimensions of a head's key that are not rotated, V of its value.

A head's scores are ``q . (W_K c) + q_rope . k_rope``, its output ``W_V sum_j w_j c_j``, with c the
latent of a token. *Absorbed*, W_K^T is applied to the query and W_V to the sum of latents: all heads
then attend to the cached vectors as they are. *Expanded*, keys and values are made first. A step of few
tokens reads the least when absorbed; a long prompt computes the least when expanded: a score and its
weight cost K + P + V products instead of 2 R + P (DeepSeek V3: 320 and 1,088), and each token K R + V R
more products for keys and values of every head.

Source: DeepSeek-AI 2024, arXiv:2405.04434, section 2.1 and appendix C.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace_core.attention import (
    MLA,
    SPARSE_TOPK,
    AttentionLayerSpec,
    AttentionNeed,
    MLABackend,
)
from headrace_core.errors import UnsupportedModel
from headrace_core.kv import CACHE_DTYPES, KVCacheSpec, MLASpec
from headrace_core.linear import LinearSpec
from headrace_core.model import WeightRule
from headrace_core.ops import PackedLinear
from headrace_models.layers.attention.self_attention import CachedAttention, temperature_table
from headrace_models.layers.base import Part, Slot, WeightLayer
from headrace_models.layers.head_view import by_heads
from headrace_models.layers.linear import (
    Linear,
    column_parallel,
    quantizes_floats,
    row_parallel,
    shard_of,
)
from headrace_models.layers.norm import RMSNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.attention import KVScaleMeasure
    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_models.config.rope import RopeSettings
    from headrace_models.lora.head_places import HeadsPlace

EXPAND_FROM = 256
"""Tokens of a step's longest prompt from which expanding pays where it may be done."""


def mla_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a layer whose module is ``source`` (``model.layers.{}.self_attn``) in checkpoints."""
    return (
        WeightRule(f"{source}.q_proj", f"{target}.direct", part=0),
        WeightRule(f"{source}.kv_a_proj_with_mqa", f"{target}.direct", part=1),
        # Only this part of the fused layer has a bias.
        WeightRule(f"{source}.kv_a_proj_with_mqa.bias", f"{target}.direct.bias", part=0),
        WeightRule(f"{source}.q_a_proj", f"{target}.down", part=0),
        WeightRule(f"{source}.kv_a_proj_with_mqa", f"{target}.down", part=1),
        WeightRule(f"{source}.q_a_layernorm", f"{target}.query_norm"),
        WeightRule(f"{source}.q_b_proj", f"{target}.query"),
        WeightRule(f"{source}.kv_a_layernorm", f"{target}.latent_norm"),
        WeightRule(f"{source}.kv_b_proj", f"{target}.heads"),
        WeightRule(f"{source}.o_proj", f"{target}.out"),
    )


class MLASizes(NamedTuple):
    """Sizes of latent attention, of a config."""

    hidden_size: int
    num_heads: int
    q_lora_rank: int | None
    """None: queries are projected directly."""
    kv_lora_rank: int
    nope_head_dim: int
    rope_head_dim: int
    v_head_dim: int


class MLAAttention(CachedAttention):
    """Projections, rotation, cache and attention of one layer; heads are spread over ranks, the cache
    is not.

    Args:
        name: of the attention module, as the checkpoint spells it.
        rotary: cosines and sines [positions, P]; None: nothing turns (Kimi Linear).
        scale: of the scores; default ``(K + P) ** -0.5``.
        latent_scale: latents are multiplied by it once normed (LongCat).
        query_temperature: as :class:`~headrace_models.layers.attention.self_attention.Attention`'s
            (Mistral 4).
        bias: of the projections to latents; out_bias: of the last one.
        expands: whether prompts of :data:`EXPAND_FROM` tokens and more, none of which is cached, are
            computed expanded. That gives other bits than absorbed, so None, the default, means: where
            the ops' bits depend on the batch anyway. It costs W_K's memory once more.
        sparse: whether tokens attend to those that :meth:`topk_indices` says, which is never expanded.

    Raises:
        UnsupportedModel: the checkpoint quantizes the matrix of W_K and W_V.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        sizes: MLASizes,
        *,
        rotary: Tensor | None,
        interleaved: bool = True,
        scale: float | None = None,
        latent_scale: float = 1.0,
        query_temperature: Tensor | None = None,
        norm_eps: float = 1e-6,
        bias: bool = False,
        out_bias: bool = False,
        expands: bool | None = None,
        sparse: bool = False,
    ) -> None:
        self.ops, self.sizes = context.ops, sizes
        self.rotary, self.interleaved = rotary, interleaved
        self.latent_scale = latent_scale
        self.expands = not context.ops.row_invariant if expands is None else expands
        self.expands &= not sparse
        shard = shard_of(sizes.num_heads, context.communicator, what=f"{name}, heads")
        self.num_heads = sizes.num_heads // shard.count
        self._make_projections(context, name, Part(self.num_heads, shard), norm_eps, bias)
        self.out = row_parallel(
            context,
            f"{name}.o_proj",
            sizes.num_heads * sizes.v_head_dim,
            sizes.hidden_size,
            bias=out_bias,
        )
        width = sizes.kv_lora_rank + sizes.rope_head_dim
        head_dim = sizes.nope_head_dim + sizes.rope_head_dim
        self.temperature: Tensor | None = None
        if query_temperature is not None:
            self.temperature = temperature_table(query_temperature, head_dim)
        self.spec = AttentionLayerSpec(
            name=name,
            num_heads=self.num_heads,
            num_kv_heads=1,
            head_dim=width,
            scale=head_dim**-0.5 if scale is None else scale,
            latent_dim=sizes.kv_lora_rank,
        )
        dtype = CACHE_DTYPES.get(context.kv_cache_dtype) or context.dtype
        self.kv_spec: KVCacheSpec | None = MLASpec(context.block_size, 1, width, dtype)
        backend = context.attention(
            AttentionNeed(
                head_dim=width,
                dtype=context.dtype,
                kv_cache_dtype=context.kv_cache_dtype,
                block_size=context.block_size,
                device=context.device,
                features=frozenset({MLA, SPARSE_TOPK} if sparse else {MLA}),
            )
        )
        assert isinstance(backend, MLABackend), backend
        self.backend: MLABackend = backend
        self.kv_copies = context.communicator.world_size
        self.group = 0
        self.kv_cache: Tensor | None = None
        self.scale_measure: KVScaleMeasure | None = None

    def _make_projections(
        self, context: BuildContext, name: str, heads: Part, eps: float, bias: bool
    ) -> None:
        sizes = self.sizes
        head_dim = sizes.nope_head_dim + sizes.rope_head_dim
        latent = Part(sizes.kv_lora_rank + sizes.rope_head_dim)
        self.query: Linear | None = None
        if sizes.q_lora_rank is None:
            names = (f"{name}.q_proj", f"{name}.kv_a_proj_with_mqa")
            parts = (Part(heads.size * head_dim, heads.shard), latent)
            unbiased: tuple[int, ...] = (0,)
        else:
            names = (f"{name}.q_a_proj", f"{name}.kv_a_proj_with_mqa")
            parts, unbiased = (Part(sizes.q_lora_rank), latent), ()
            self.query_norm = RMSNorm(context, f"{name}.q_a_layernorm", sizes.q_lora_rank, eps)
            self.query = column_parallel(
                context,
                f"{name}.q_b_proj",
                sizes.q_lora_rank,
                (sizes.num_heads * head_dim,),
                units=(sizes.num_heads,),
            )
        first = Linear(
            context,
            f"{name}.qkv_a_proj",
            sizes.hidden_size,
            parts,
            bias=bias,
            unbiased=unbiased,
            part_names=names,
        )
        # Two names, as weight rules tell the two kinds apart by them.
        if self.query is None:
            self.direct = first
        else:
            self.down = first
        self.latent_norm = RMSNorm(context, f"{name}.kv_a_layernorm", sizes.kv_lora_rank, eps)
        self.heads = HeadProjections(context, f"{name}.kv_b_proj", sizes, heads, self.expands)

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        """See :meth:`headrace_core.model.AttentionLayer.bind_cache`."""
        self.kv_cache, self.group = kv_cache, group

    def measure_kv_scales(self, measure: KVScaleMeasure | None) -> None:
        """See :meth:`headrace_core.model.MeasuresKVScales.measure_kv_scales`: one scale for a vector, that
        of keys."""
        self.scale_measure = measure

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        """x [T, hidden_size] -> the same shape."""
        asking, latent, rope_key = self.project(x)
        query = self.queries(asking)
        nope, rope = torch.split(
            query, [self.sizes.nope_head_dim, self.sizes.rope_head_dim], dim=-1
        )
        if self.rotary is not None:
            key = rope_key[:, None]
            self.ops.rotary(rope, key, batch.positions, self.rotary, interleaved=self.interleaved)
        if self.temperature is not None:
            self.ops.rotary(
                query, query[:, :0], batch.positions, self.temperature, interleaved=False
            )
        if self.kv_cache is None or not batch.groups:  # memory is being profiled
            metadata, kv_cache = None, None
        else:
            metadata, kv_cache = batch.attention[self.group], self.kv_cache
            slots = self.backend.slots(batch, self.group)
            if self.scale_measure is not None:
                vectors = torch.cat((latent, rope_key), dim=1)[:, None]
                self.spec = self.scale_measure(self.spec, vectors, vectors)
            self.ops.mla_cache_write(latent, rope_key, kv_cache, slots, k_scale=self.spec.k_scale)
        if kv_cache is not None and self.expands and _is_long_and_new(batch):
            out = self.expanded(nope, rope, latent, rope_key, batch)
        else:
            absorbed, topk_indices = self.heads.to_latent(nope), self.topk_indices(x, asking, batch)
            out = self.backend.attend(
                self.spec, absorbed, rope, None, None, kv_cache, metadata, topk_indices=topk_indices
            )
            out = self.heads.to_value(out)
        return self.project_out(out.flatten(1), x)

    def project_out(self, out: Tensor, x: Tensor) -> Tensor:
        """out [T, H * V], what was found for x [T, hidden_size] -> [T, hidden_size]."""
        return self.out(out)

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """x [T, hidden_size] -> what queries are made of, latent [T, R] and rope_key [T, P]."""
        sizes = self.sizes
        both = self.direct(x) if self.query is None else self.down(x)
        cached = sizes.kv_lora_rank + sizes.rope_head_dim
        asking, latent, rope_key = torch.split(
            both, [both.shape[1] - cached, sizes.kv_lora_rank, sizes.rope_head_dim], dim=1
        )
        if self.query is not None:
            asking = self.query_norm(asking)
        latent = self.latent_norm(latent)
        if self.latent_scale != 1.0:
            latent = self.ops.scale(latent, self.latent_scale)
        return asking, latent, rope_key

    def queries(self, asking: Tensor) -> Tensor:
        """The normed latent of queries, or they themselves -> [T, H, K + P]."""
        query = asking if self.query is None else self.query(asking)
        return by_heads(query, self.sizes.nope_head_dim + self.sizes.rope_head_dim)

    def topk_indices(self, x: Tensor, asking: Tensor, batch: ForwardBatch) -> Tensor | None:
        """The tokens that each token attends to, [T, k] (:class:`headrace_core.ops.MLAAttentionOp`);
        None: all before it."""
        return None

    def expanded(
        self, nope: Tensor, rope: Tensor, latent: Tensor, rope_key: Tensor, batch: ForwardBatch
    ) -> Tensor:
        """Attention of prompts of which nothing is cached -> [T, H, V]: the step's own keys and values
        are a paged cache with a token in each block."""
        tokens, sizes = nope.shape[0], self.sizes
        every_head = latent[:, None].expand(-1, self.num_heads, -1)
        turned = rope_key[:, None].expand(-1, self.num_heads, -1)
        key = torch.cat((self.heads.to_key(every_head), turned), dim=-1)
        value = self.heads.to_value(every_head)
        # The op wants keys and values of one width.
        width = max(key.shape[-1], sizes.v_head_dim)
        query, key, value = (
            torch.nn.functional.pad(y, (0, width - y.shape[-1]))
            for y in (torch.cat((nope, rope), dim=-1), key, value)
        )
        starts = batch.cu_seqlens_q[:-1, None]
        at = torch.arange(batch.max_seqlen_q, dtype=torch.int32, device=starts.device)
        out = self.ops.paged_attention(
            query,
            key[:, None],
            value[:, None],
            (starts + at).clamp(max=tokens - 1),
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=self.spec.scale,
        )
        return out[..., : sizes.v_head_dim]


def _is_long_and_new(batch: ForwardBatch) -> bool:
    """True if a step is worth expanding and its requests have nothing cached; asks the device only if
    it is long."""
    if batch.max_seqlen_q < EXPAND_FROM or batch.max_seqlen_q != batch.max_seqlen_k:
        return False
    return torch.equal(batch.cu_seqlens_q.diff(), batch.seq_lens)


class HeadProjections(WeightLayer):
    """W_K and W_V of each head, [H * (K + V), R] in checkpoints; what they make is in the module's
    docstring."""

    low_rank: HeadsPlace | None = None
    """See :class:`~headrace_models.layers.linear.Linear`."""

    def __init__(
        self, context: BuildContext, name: str, sizes: MLASizes, heads: Part, expands: bool
    ) -> None:
        self.name, self.ops, self.sizes = name, context.ops, sizes
        self.expands = expands
        self.shape = (heads.size, sizes.nope_head_dim + sizes.v_head_dim, sizes.kv_lora_rank)
        rows = heads.size * self.shape[1]
        self.part = Part(rows, heads.shard)
        spec = LinearSpec(name, sizes.kv_lora_rank, (rows,), context.dtype)
        method = context.quant.for_layer(spec)
        if not (method.is_plain or quantizes_floats(method, spec)):
            raise UnsupportedModel(
                f"{name} is quantized; latent attention needs the projections of heads in float16, "
                "bfloat16 or float32: leave the module out of the quantization"
            )
        self.latent: PackedLinear | None = None
        self.key: PackedLinear | None = None
        self.value: PackedLinear | None = None

    def slots(self) -> Mapping[str, Slot]:
        return {"weight": Slot((self.part.size, self.shape[2]), parts=(self.part,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        both = tensors["weight"].view(self.shape)
        rows = [self.sizes.nope_head_dim, self.sizes.v_head_dim]
        key, value = torch.split(both, rows, dim=1)
        pack = self.ops.head_linear.pack
        self.latent, self.value = pack(key.transpose(1, 2)), pack(value)
        if self.expands:
            self.key = pack(key)

    def to_latent(self, query: Tensor) -> Tensor:
        """query [T, H, K] -> [T, H, R]."""
        return self._times(self.latent, "latent", query)

    def to_value(self, latent: Tensor) -> Tensor:
        """latent [T, H, R] -> [T, H, V]."""
        return self._times(self.value, "value", latent)

    def to_key(self, latent: Tensor) -> Tensor:
        """latent [T, H, R] -> [T, H, K], of a layer that expands."""
        return self._times(self.key, "key", latent)

    def _times(self, weight: PackedLinear | None, product: str, x: Tensor) -> Tensor:
        """x [T, H, in] by each head's weight, with what adapters add -> [T, H, out]."""
        assert weight is not None, self.name
        out = self.ops.head_linear(x, weight)
        if self.low_rank is not None and self.low_rank.is_chosen:
            return self.low_rank(product, out, x)
        return out


def mla_scale(rope: RopeSettings, head_dim: int) -> float:
    """Scale of the scores: YaRN's temperature (``mscale_all_dim``) is in it twice, for query and key."""
    scale = float(head_dim**-0.5)
    if rope.kind == "default" or not rope.scaling.get("mscale_all_dim"):
        return scale
    factor, mscale = rope.number("factor"), rope.number("mscale_all_dim")
    temperature = 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0
    return scale * temperature**2
