"""Pre-norm blocks of towers for images. Letters: T patches of all images, H hidden size, D head size."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

import torch

from headrace_core.attention import AttentionNeed
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.attention.self_attention import HeadsNorm, ProjectedAttention
from headrace_models.layers.base import Layer
from headrace_models.layers.mlp import MLPLayer
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.mlp import vision_mlp

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TYPE = "encoder"


@dataclass(frozen=True, slots=True)
class Segments:
    """Runs of patches that see each other, and no others."""

    cu_seqlens: Tensor
    """[segments + 1] int32."""
    longest: int

    @classmethod
    def of(cls, sizes: Sequence[int], device: torch.device) -> Segments:
        bounds = list(itertools.accumulate(sizes, initial=0))
        return cls(torch.tensor(bounds, dtype=torch.int32, device=device), max(sizes))


class VisionAttention(ProjectedAttention):
    """Attention in both directions within segments.

    Args:
        names: of the module's query, key and value and of its output, below ``name``; one name for the
            three that are stored together.
        unbiased: those of query, key and value that have no bias all the same.
        head_norms: of query and key, before they turn.
        interleaved: the pairs of numbers that turn together are neighbours; otherwise each number's
            partner is half a head behind it.
    """

    def __init__(
        self,
        context: BuildContext,
        name: str,
        *,
        hidden_size: int,
        num_heads: int,
        bias: bool = True,
        names: tuple[tuple[str, ...], str] = (("q_proj", "k_proj", "v_proj"), "out_proj"),
        out_bias: bool | None = None,
        unbiased: tuple[int, ...] = (),
        head_norms: tuple[HeadsNorm, HeadsNorm] | None = None,
        interleaved: bool = False,
    ) -> None:
        parts, out_name = names
        head_dim = hidden_size // num_heads
        super().__init__(
            context,
            name,
            hidden_size=hidden_size,
            num_heads=num_heads,
            num_kv_heads=num_heads,
            head_dim=head_dim,
            rotary=None,
            qkv_bias=bias,
            out_bias=bias if out_bias is None else out_bias,
            unbiased=unbiased,
            qkv_name=parts[0] if len(parts) == 1 else "qkv_proj",
            part_names=() if len(parts) == 1 else parts,
            out_name=out_name,
            query_norm=None if head_norms is None else head_norms[0],
            key_norm=None if head_norms is None else head_norms[1],
            attention_type=_TYPE,
        )
        self.interleaved = interleaved
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

    def __call__(self, x: Tensor, segments: Segments, rotary: Tensor | None = None) -> Tensor:
        """x [T, H] -> [T, H].

        Args:
            rotary: [T, D]; half cosines, half sines, a row for each patch.
        """
        query, key, value = self.project(x)
        query, key = self.normed(query, key)
        if rotary is not None:
            rows = torch.arange(x.shape[0], device=x.device)
            self.ops.rotary(query, key, rows, rotary, interleaved=self.interleaved)
        found = self.backend.attend(
            self.spec, query, key, value, segments.cu_seqlens, segments.longest
        )
        return self.out(found.flatten(1))


class VisionBlock(Layer):
    """Norm, attention, residual; norm, MLP, residual."""

    def __init__(
        self,
        attention_norm: LayerNorm | RMSNorm,
        attention: VisionAttention,
        mlp_norm: LayerNorm | RMSNorm,
        mlp: MLPLayer,
    ) -> None:
        self.attention_norm, self.attention = attention_norm, attention
        self.mlp_norm, self.mlp = mlp_norm, mlp

    def __call__(
        self,
        x: Tensor,
        residual: Tensor | None,
        segments: Segments,
        rotary: Tensor | None = None,
    ) -> tuple[Tensor, Tensor]:
        """x [T, H] is what the block before added to the residual; both are handed on."""
        x, stream = self.attention_norm.add(x, residual)
        x = self.attention(x, segments, rotary)
        x, stream = self.mlp_norm.add(x, stream)
        return self.mlp(x), stream


def pre_norm_block(context: BuildContext, settings: Settings, name: str, eps: float) -> VisionBlock:
    """A block by the settings, and in the names, of CLIP and SigLIP."""
    hidden = settings.integer("hidden_size")
    return VisionBlock(
        LayerNorm(context, f"{name}.layer_norm1", hidden, eps),
        VisionAttention(
            context,
            f"{name}.self_attn",
            hidden_size=hidden,
            num_heads=settings.integer("num_attention_heads"),
        ),
        LayerNorm(context, f"{name}.layer_norm2", hidden, eps),
        vision_mlp(
            context,
            settings,
            f"{name}.mlp.fc1",
            f"{name}.mlp.fc2",
            (hidden, settings.integer("intermediate_size")),
        ),
    )


def block_rules(source: str, target: str) -> tuple[WeightRule, ...]:
    """Rules of a :class:`VisionBlock` in CLIP's and SigLIP's names."""
    return (
        WeightRule(f"{source}.layer_norm1", f"{target}.attention_norm"),
        WeightRule(f"{source}.self_attn.q_proj", f"{target}.attention.qkv", part=0),
        WeightRule(f"{source}.self_attn.k_proj", f"{target}.attention.qkv", part=1),
        WeightRule(f"{source}.self_attn.v_proj", f"{target}.attention.qkv", part=2),
        WeightRule(f"{source}.self_attn.out_proj", f"{target}.attention.out"),
        WeightRule(f"{source}.layer_norm2", f"{target}.mlp_norm"),
        WeightRule(f"{source}.mlp.fc1", f"{target}.mlp.up"),
        WeightRule(f"{source}.mlp.fc2", f"{target}.mlp.down"),
    )
