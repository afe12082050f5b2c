"""Pieces that the Gemmas share: the factor of their embeddings, rotary tables of windowed and full layers,
upper layers that read a lower layer's cache, and inputs for each layer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.config.rope import of_windows, rope_settings
from headrace_models.layers.attention.self_attention import SelfAttention
from headrace_models.layers.decoders.llama import LlamaDecoder
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.per_layer_inputs import PerLayerGate, PerLayerInputs
from headrace_models.layers.rotary import rotary_table

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.config.settings import Settings

LOCAL_THETA, GLOBAL_THETA = 10_000.0, 1_000_000.0
"""Rotary bases of windowed and of full layers, from Gemma 3 on."""
UNUSED_KEYS: Mapping[str, str] = {
    r"model\.layers\.\d+\.self_attn\.(k_proj|v_proj|k_norm)\.weight": (
        "the layer reads another one's cache"
    )
}
"""Checkpoints hold projections to keys and values that no layer uses."""


def embedding_scale(context: BuildContext, hidden_size: int) -> float:
    """The root of ``hidden_size``, rounded to the activations' dtype first, as the models were trained."""
    dtype: torch.dtype = getattr(torch, context.dtype)
    return float(torch.tensor(hidden_size**0.5, dtype=dtype))


def gemma3_rotary_tables(
    context: BuildContext, settings: Settings, head_dim: int
) -> tuple[Tensor, Tensor]:
    """Tables of the full layers, and of the windowed ones."""
    limit = settings.integer("max_position_embeddings", 131_072)
    full = rope_settings(context.config, "full_attention", theta=GLOBAL_THETA)
    local = rope_settings(
        of_windows(context.config, context.config.get("rope_local_base_freq", LOCAL_THETA)),
        "sliding_attention",
        theta=LOCAL_THETA,
    )
    return (
        rotary_table(context, full, head_dim, max_positions=limit),
        rotary_table(context, local, head_dim, max_positions=limit),
    )


def cache_source(
    index: int, num_layers: int, num_shared: int, is_sliding: Callable[[int], bool]
) -> int | None:
    """The layer whose cache layer ``index`` reads: the last of its kind that has one of its own.

    Args:
        num_shared: the upper layers that have no cache of their own.
        is_sliding: tells which layers have a window.

    Returns:
        None: the layer has its own.

    Raises:
        UnsupportedModel: no layer below is of its kind.
    """
    own = num_layers - num_shared
    if index < own:
        return None
    kind = is_sliding(index)
    source = next((i for i in reversed(range(own)) if is_sliding(i) == kind), None)
    if source is None:
        raise UnsupportedModel(
            f"config.json: num_kv_shared_layers = {num_shared}: no layer below has a cache that layer "
            f"{index} could read"
        )
    return source


def cache_sharing_attention(
    decoder: LlamaDecoder,
    context: BuildContext,
    name: str,
    *,
    index: int,
    source: int | None,
    **differences: Any,
) -> SelfAttention:
    """The attention of layer ``index``: norms of queries, keys and values, scores as they are.

    Args:
        source: the layer whose cache it reads, see :func:`cache_source`.
        differences: further arguments of :class:`SelfAttention`.
    """
    bias, eps = decoder.settings.flag("attention_bias", False), decoder.norm_eps()
    size = differences.get("head_dim", decoder.head_dim())
    value_norm, target = None, None
    if source is None:
        value_norm = RMSNorm(context, f"{name}.v_norm", size, eps, weight=False)
    else:
        target = f"{name.removesuffix(f'{index}.self_attn')}{source}.self_attn"
    return decoder.attention(
        context,
        name,
        scale=1.0,
        qkv_bias=bias,
        out_bias=bias,
        head_norm_eps=eps,
        value_norm=value_norm,
        kv_sharing_target=target,
        **differences,
    )


def per_layer_inputs(decoder: LlamaDecoder, context: BuildContext, prefix: str) -> PerLayerInputs:
    """Every layer's own input, looked up by token id."""
    settings = decoder.settings
    vocab = settings.integer("vocab_size")
    return PerLayerInputs(
        context,
        f"{prefix}model.",
        vocab_size=vocab,
        num_rows=settings.integer("vocab_size_per_layer_input", vocab),
        hidden_size=decoder.hidden_size(),
        num_layers=decoder.num_layers(),
        size=settings.integer("hidden_size_per_layer_input", 256),
        eps=decoder.norm_eps(),
    )


def per_layer_gate(
    decoder: LlamaDecoder, context: BuildContext, name: str, size: int
) -> PerLayerGate:
    """The gate by which the block ``name`` takes its own input of ``size``."""
    return PerLayerGate(
        context,
        name,
        hidden_size=decoder.hidden_size(),
        size=size,
        activation=decoder.settings.activation("hidden_activation", "hidden_act"),
        eps=decoder.norm_eps(),
    )
