"""Which attention a layer of a decoder has."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_models.layers.attention import Attention, SelfAttention
from headrace_models.layers.encoder_attention import EncoderAttention

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


def self_attention(
    context: BuildContext, name: str, *, sliding_window: int | None = None, **arguments: Any
) -> SelfAttention:
    """Over the cache; or in both directions and without one, if the model pools so.

    A window then reaches as far to either side as it would reach back.

    Args:
        arguments: of :class:`SelfAttention`.
    """
    pooling = context.pooling
    if pooling is None or pooling.causal:
        return Attention(context, name, sliding_window=sliding_window, **arguments)
    window = None if sliding_window is None else sliding_window + 1
    return EncoderAttention(context, name, sliding_window=window, **arguments)
