"""The choice of a decoder's attention: over the cache, or in both directions without one."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.attention.encoder_attention import EncoderAttention
from headrace_models.layers.attention.self_attention import Attention, SelfAttention

if TYPE_CHECKING:
    from headrace_core.model import BuildContext


_OVER_THE_CACHE = (
    "attention_chunk_size",
    "kv_sharing_target",
    "alibi_slopes",
    "sinks",
    "query_temperature",
    "extras",
    "features",
)
"""Arguments of what only :class:`Attention` does."""


def self_attention(
    context: BuildContext,
    name: str,
    *,
    sliding_window: int | None = None,
    kind: type[Attention] = Attention,
    **arguments: Any,
) -> SelfAttention:
    """Attention over the cache; or in both directions and without one, if the model pools so.

    A window then reaches as far to either side as it would reach back.

    Args:
        kind: the class of attention over the cache.
        arguments: of :class:`Attention`.

    Raises:
        UnsupportedModel: the model pools in both directions and has what is defined in one only.
    """
    pooling = context.pooling
    if pooling is None or pooling.causal:
        return kind(context, name, sliding_window=sliding_window, **arguments)
    given = {what: arguments.pop(what, None) for what in _OVER_THE_CACHE}
    one_way = [what for what, value in given.items() if value is not None and value is not False]
    if one_way:
        raise UnsupportedModel(
            f"{name} has {', '.join(one_way)}, which attention in both directions does not support: "
            "the model pools with causal attention only"
        )
    window = None if sliding_window is None else sliding_window + 1
    return EncoderAttention(context, name, sliding_window=window, **arguments)
