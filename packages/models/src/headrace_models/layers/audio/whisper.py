"""The encoder of Whisper, which other families took over: spectrogram frames -> states.

Letters: F frames, M mel bins, L states of a clip (F / 2), H hidden size.

Convolution over time, as a product of rows with the weight: the same kernels as linear layers.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

import torch
from torch.nn import functional

from headrace_core.attention import AttentionNeed
from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.attention.self_attention import ProjectedAttention
from headrace_models.layers.base import Layer, Slot, WeightLayer
from headrace_models.layers.embedding import Embedding
from headrace_models.layers.mlp import MLP
from headrace_models.layers.norm import LayerNorm

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_core.ops import PackedLinear


_WIDTH = 3


class Conv1d(WeightLayer):
    """Three neighbouring rows make one; the ends are padded with a row of zeros."""

    def __init__(
        self, context: BuildContext, name: str, in_size: int, out_size: int, *, stride: int = 1
    ) -> None:
        self.name = name
        self.ops = context.ops
        self.in_size, self.out_size, self.stride = in_size, out_size, stride
        self.packed: PackedLinear | None = None
        self.bias: Tensor | None = None

    def slots(self) -> Mapping[str, Slot]:
        shape = (self.out_size, self.in_size, _WIDTH)
        return {"weight": Slot(shape), "bias": Slot((self.out_size,))}

    def load(self, tensors: Mapping[str, Tensor]) -> None:
        by_row = tensors["weight"].transpose(1, 2).reshape(self.out_size, -1)
        self.packed = self.ops.linear.pack(by_row.contiguous())
        self.bias = tensors["bias"]

    def activated(self, x: Tensor, activation: str) -> Tensor:
        """Its result after an activation: x [L, in_size] -> [ceil(L / stride), out_size]."""
        assert self.packed is not None, self.name
        padded = torch.zeros((x.shape[0] + 2, x.shape[1]), dtype=x.dtype, device=x.device)
        padded[1:-1] = x
        rows = padded.unfold(0, _WIDTH, self.stride).transpose(1, 2)  # [n, 3, in_size]
        flat = rows.reshape(rows.shape[0], -1)
        return self.ops.linear.activated(flat, self.packed, activation, self.bias)


NORM_EPS = 1e-5
MAX_SIZE = 1 << 16
"""Most numbers of a state: a table is computed by it, before a weight shows that there are fewer."""
_TYPE = "encoder"
_STEM_ACTIVATION = "gelu"
"""Activation after the convolutions; the config's is that of the blocks."""


def encoder_rules(
    source: str, target: str, norm_name: str = "layer_norm"
) -> tuple[WeightRule, ...]:
    """Rules of an :class:`AudioEncoder`: its names in the checkpoint and in the model."""
    layer, own = f"{source}.layers.{{}}", f"{target}.layers.{{}}"
    return (
        WeightRule(f"{source}.conv1", f"{target}.conv1"),
        WeightRule(f"{source}.conv2", f"{target}.conv2"),
        WeightRule(f"{source}.embed_positions", f"{target}.positions"),
        WeightRule(f"{source}.{norm_name}", f"{target}.final_norm"),
        *attention_rules(f"{layer}.self_attn", f"{own}.attention"),
        *block_rules(layer, own),
    )


def attention_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Fused projections of which the key's has no bias."""
    return (
        WeightRule(f"{source}.q_proj", f"{target}.qkv", part=0),
        WeightRule(f"{source}.k_proj", f"{target}.qkv", part=1),
        WeightRule(f"{source}.v_proj", f"{target}.qkv", part=2),
        WeightRule(f"{source}.v_proj.bias", f"{target}.qkv.bias", part=1),
        WeightRule(f"{source}.out_proj", f"{target}.out"),
    )


def block_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of encoder and decoder blocks, but for their attention."""
    return (
        WeightRule(f"{source}.self_attn_layer_norm", f"{target}.input_norm"),
        WeightRule(f"{source}.final_layer_norm", f"{target}.mlp_norm"),
        WeightRule(f"{source}.fc1", f"{target}.mlp.up"),
        WeightRule(f"{source}.fc2", f"{target}.mlp.down"),
    )


def heads_of(settings: Settings, name: str) -> tuple[int, int]:
    """(heads, head size) of ``d_model`` cut into as many as ``name`` says."""
    hidden, heads = settings.integer("d_model"), settings.integer(name)
    if hidden % heads:
        raise UnsupportedModel(
            f"config.json: d_model = {hidden}: must be a multiple of {name} = {heads}"
        )
    return heads, hidden // heads


class AudioEncoder(Layer):
    """Two convolutions, positions, pre-norm blocks without a mask, a norm.

    Args:
        settings: the encoder's part of the config.
        name: as the checkpoint spells it.
        pools: before the last norm, two neighbouring states become their mean; an odd last one is
            dropped (Qwen2-Audio).
        chunk: frames after which a clip is cut: each piece has convolutions, positions and attention of
            its own (Qwen2.5-Omni). Positions are sines then, which no checkpoint stores. 0: not at all.
        norm_name: of the last norm in the checkpoint.
    """

    def __init__(
        self,
        context: BuildContext,
        settings: Settings,
        name: str,
        *,
        pools: bool = False,
        chunk: int = 0,
        norm_name: str = "layer_norm",
    ) -> None:
        self.ops = context.ops
        self.dtype: torch.dtype = getattr(torch, context.dtype)
        self.pools, self.chunk = pools, chunk
        hidden = settings.integer("d_model", maximum=MAX_SIZE)
        bins = settings.integer("num_mel_bins", 80)
        self.num_positions = settings.integer("max_source_positions", 1500)
        self.conv1 = Conv1d(context, f"{name}.conv1", bins, hidden)
        self.conv2 = Conv1d(context, f"{name}.conv2", hidden, hidden, stride=2)
        if chunk:
            self.sines = sines((chunk + 1) // 2, hidden).to(context.device, self.dtype)
        else:
            table = f"{name}.embed_positions"
            self.positions = Embedding(context, table, self.num_positions, hidden)
        self.layers = [
            EncoderBlock(context, settings, f"{name}.layers.{index}")
            for index in range(settings.integer("encoder_layers", maximum=MAX_LAYERS))
        ]
        self.final_norm = LayerNorm(context, f"{name}.{norm_name}", hidden, NORM_EPS)

    def __call__(self, clips: Sequence[Tensor], lengths: Sequence[int] | None = None) -> Tensor:
        """Encode clips of any lengths at once; they do not see each other.

        Args:
            clips: [F, M] each.
            lengths: states of each clip that are kept, and attend; None: all.

        Returns:
            [sum of L, H], or with pooling about half as many.
        """
        if self.chunk:
            return self._encoded([self._pieces(clip) for clip in clips])
        parts = [self._begin(clip) for clip in clips]
        if lengths is not None:
            parts = [part[:length] for part, length in zip(parts, lengths, strict=True)]
        return self._encoded([[part] for part in parts])

    def partly_seen(self, clip: Tensor, length: int, seen: int) -> Tensor:
        """Encode a clip of which only the first states are seen, by all.

        Args:
            clip: [F, M].
            length: states that are wanted, at most what the clip has.
            seen: states that are seen.

        Returns:
            [length, H], or fewer where the clip has fewer.
        """
        x, residual = self._begin(clip)[:length], None
        for layer in self.layers:
            x, residual = layer(x, residual, None, seen)
        hidden, _ = self.final_norm.add(x, residual)
        return hidden

    def in_blocks(self, clip: Tensor, size: int) -> Tensor:
        """Encode a clip whose states see those of their own block and of the blocks before it.

        Args:
            clip: [F, M].
            size: states of a block; 0: all states see each other.

        Returns:
            [L, H].
        """
        if not size:
            return self([clip])
        x, residual = self._begin(clip), None
        block = torch.arange(x.shape[0], device=x.device) // size
        mask = block[:, None] >= block[None, :]
        for layer in self.layers:
            x, residual = layer(x, residual, None, x.shape[0], mask)
        hidden, _ = self.final_norm.add(x, residual)
        return hidden

    def _encoded(self, clips: Sequence[Sequence[Tensor]]) -> Tensor:
        """
        Args:
            clips: what the first block gets, [L, H] each; states of a piece see each other.
        """
        parts = [part for clip in clips for part in clip]
        sizes = [part.shape[0] for part in parts]
        bounds = list(itertools.accumulate(sizes, initial=0))
        x, residual = torch.cat(parts), None
        cu_seqlens = torch.tensor(bounds, dtype=torch.int32, device=x.device)
        for layer in self.layers:
            x, residual = layer(x, residual, cu_seqlens, max(sizes))
        if not self.pools:
            hidden, _ = self.final_norm.add(x, residual)
            return hidden
        total = x if residual is None else self.ops.add(x, residual)
        whole = [sum(part.shape[0] for part in clip) for clip in clips]
        return self.final_norm(torch.cat([_halved(part) for part in torch.split(total, whole)]))

    def _pieces(self, clip: Tensor) -> list[Tensor]:
        """[F, M] -> [L, H] of each piece."""
        return [self._begin(piece) for piece in torch.split(clip, self.chunk)]

    def _begin(self, clip: Tensor) -> Tensor:
        """[F, M] -> [L, H]: what the first block gets."""
        x = self.conv1.activated(clip.to(self.dtype), _STEM_ACTIVATION)
        x = self.conv2.activated(x, _STEM_ACTIVATION)
        table = self.sines if self.chunk else self.positions.weight
        return self.ops.add(x, table[: x.shape[0]])


def sines(length: int, size: int) -> Tensor:
    """[length, size] float32: sines, then cosines, of wavelengths from 2 pi to 10,000 times that
    (Vaswani et al. 2017, arXiv:1706.03762, section 3.5)."""
    step = math.log(10_000) / (size // 2 - 1)
    turns = torch.arange(length)[:, None] * torch.exp(-step * torch.arange(size // 2).float())
    return torch.cat([turns.sin(), turns.cos()], dim=1)


class EncoderBlock(Layer):
    """Attention and a feed-forward layer, each behind a norm.

    Args:
        key_bias: keys have a bias; Whisper's have none.
    """

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, *, key_bias: bool = False
    ) -> None:
        hidden = settings.integer("d_model")
        self.input_norm = LayerNorm(context, f"{name}.self_attn_layer_norm", hidden, NORM_EPS)
        self.attention = _Attention(context, settings, f"{name}.self_attn", key_bias=key_bias)
        self.mlp_norm = LayerNorm(context, f"{name}.final_layer_norm", hidden, NORM_EPS)
        self.mlp = MLP(
            context,
            f"{name}.fc1",
            f"{name}.fc2",
            hidden,
            settings.integer("encoder_ffn_dim"),
            settings.activation("activation_function"),
        )

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        mask: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """
        Args:
            cu_seqlens: bounds of pieces whose states see each other; None: all states see the first
                ``max_seqlen``.
            mask: [L, L], true where a state sees another; of these, where there is one.
        """
        x, stream = self.input_norm.add(x, residual)
        x = self.attention(x, cu_seqlens, max_seqlen, mask)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


class _Attention(ProjectedAttention):
    """Every state of a clip sees every other."""

    def __init__(
        self, context: BuildContext, settings: Settings, name: str, *, key_bias: bool
    ) -> None:
        heads, head_dim = heads_of(settings, "encoder_attention_heads")
        super().__init__(
            context,
            name,
            hidden_size=heads * head_dim,
            num_heads=heads,
            num_kv_heads=heads,
            head_dim=head_dim,
            rotary=None,
            qkv_bias=True,
            out_bias=True,
            unbiased=() if key_bias else (1,),
            out_name="out_proj",
            attention_type=_TYPE,
        )
        self.backend = context.encoder_attention(
            AttentionNeed(
                head_dim=head_dim,
                dtype=context.dtype,
                kv_cache_dtype="auto",
                block_size=context.block_size,
                device=context.device,
                attention_type=_TYPE,
            )
        )

    def __call__(
        self,
        x: Tensor,
        cu_seqlens: Tensor | None,
        max_seqlen: int,
        mask: Tensor | None = None,
    ) -> Tensor:
        query, key, value = self.project(x)
        if cu_seqlens is None:
            q, k, v = (y.transpose(0, 1) for y in (query, key[:max_seqlen], value[:max_seqlen]))
            seen = functional.scaled_dot_product_attention(q, k, v, mask)
            return self.out(seen.transpose(0, 1).flatten(1))
        out = self.backend.attend(self.spec, query, key, value, cu_seqlens, max_seqlen)
        return self.out(out.flatten(1))


def _halved(states: Tensor) -> Tensor:
    """[L, H] -> [L // 2, H]."""
    half = states.shape[0] // 2
    pairs = states[: 2 * half].view(half, 2, states.shape[1])
    return pairs.mean(1, dtype=torch.float32).to(states.dtype)
