"""A built model's layers: bytes that each keeps, bytes that a decode step reads, sums over ranks.

For whoever plans a layout, from a model that is built for one rank and not loaded.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from typing import NamedTuple, cast

from headrace_core.model import CausalLM, SupportsRecurrence
from headrace_models.layers.base import Layer, WeightLayer, walk
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.layers.embedding import (
    Embedding,
    PackedEmbedding,
    QuantizedEmbedding,
    QuantizedTableHead,
)
from headrace_models.layers.linear import Linear, TiedLinear
from headrace_models.layers.moe.experts import Experts
from headrace_models.layers.moe.router import Router
from headrace_models.layers.vocabulary import OwnRows
from headrace_models.stages.cut import why_whole
from headrace_models.weight_bytes import kept_bytes, leaf_bytes

_TABLES = (Embedding, PackedEmbedding, QuantizedEmbedding)
HEAD = "head"
"""Last part of the path of what makes logits."""


class RoutedExperts(NamedTuple):
    """A layer's experts, of which a token goes to some."""

    num_bytes: int
    """On this rank."""
    number: int
    """All of them, whatever this rank keeps."""
    top_k: int


@dataclasses.dataclass
class LayerParts:
    """One layer of a stack, or what stands before or behind it. Bytes are of this rank."""

    weights: int = 0
    """With experts."""
    reads: int = 0
    """That a step reads whatever its tokens are: without routed experts and tables of input vectors."""
    experts: tuple[RoutedExperts, ...] = ()
    reduced: int = 0
    """Numbers that are summed over ranks for each token."""
    reductions: int = 0
    """Sums over ranks in a step."""
    gathered: int = 0
    """Numbers of a token's logits that ranks bring together."""
    met: int = 0
    """Numbers of each token that go to all ranks of engines which share experts, and as many come back."""
    meetings: int = 0
    """Mixtures in which they do."""
    caches: tuple[str, ...] = ()
    """Names of what it caches, as :meth:`~headrace_core.model.CausalLM.attention_layers` and
    ``state_layers`` have them."""


@dataclasses.dataclass(frozen=True)
class ModelParts:
    """A model of one rank, by what can be on different stages of a pipeline."""

    layers: tuple[LayerParts, ...]
    front: LayerParts
    """Tables of input vectors, towers."""
    head: LayerParts
    """What makes logits, and the final norm."""
    tables: int
    """Bytes of what is computed from the config (rotary tables), which every stage needs."""
    hidden_size: int
    """Numbers of a token's hidden state; 0 where no decoder says it."""
    layer_costs: tuple[int, ...]
    """Bytes by layer, by which :func:`~headrace_models.stages.division.layers_by_stage` divides them; empty
    if stages cannot."""
    rest_cost: int
    """Likewise, of what is no layer."""
    why_whole: str
    """Why the layers cannot be on several stages; empty: they can."""

    @property
    def weights(self) -> int:
        """Bytes of all of it."""
        parts = (*self.layers, self.front, self.head)
        return self.tables + sum(part.weights for part in parts)


def layer_parts(model: CausalLM, dtype: str) -> ModelParts:
    """Take stock of a model.

    Args:
        model: of :class:`~headrace_models.layers.base.Layer` pieces; built, not loaded.
        dtype: of floating weights.
    """
    root = cast("Layer", model)
    cached = _cached_layers(model)
    pieces = list(walk(root))
    stacks = {_stack_of(path)[0] for path, piece in pieces if id(piece) in cached}
    layers: dict[tuple[str, int], LayerParts] = {}
    front, head = LayerParts(), LayerParts()
    routed = _routed(root, pieces)
    for path, piece in pieces:
        place = _stack_of(path)
        if place[0] in stacks:
            part = layers.setdefault(place, LayerParts())
        elif HEAD in path.split(".") or path.endswith("final_norm"):
            part = head
        else:
            part = front
        _add(part, piece, dtype, routed.get(id(piece), 0))
        part.caches += tuple(cached.get(id(piece), ()))
        if path.split(".")[-1] == HEAD and isinstance(piece, TiedLinear | QuantizedTableHead):
            part.reads += _table_bytes(pieces, dtype)
    front.reads = 0  # of a table a step reads its tokens' rows
    head.gathered = _divided_logits([root, *(piece for _, piece in pieces)])
    hidden_size = _hidden_size([root, *(piece for _, piece in pieces)])
    reason = (
        why_whole(model) if isinstance(model, Decoder) else "it is not one of headrace's decoders"
    )
    costs = () if reason else tuple(kept_bytes(layer, dtype) for layer in _blocks(root))
    kept = [part.weights for part in (*layers.values(), front, head)]
    return ModelParts(
        tuple(layers[place] for place in sorted(layers)), front, head,
        tables=kept_bytes(root, dtype) - sum(kept), hidden_size=hidden_size,
        layer_costs=costs, rest_cost=kept_bytes(root, dtype) - sum(costs), why_whole=reason,
    )  # fmt: skip


def _cached_layers(model: CausalLM) -> Mapping[int, list[str]]:
    """Names of what a piece caches, by the piece's id."""
    states = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
    found: dict[int, list[str]] = {}
    for name, layer in [*model.attention_layers().items(), *states.items()]:
        found.setdefault(id(layer), []).append(name)
    return found


def _stack_of(path: str) -> tuple[str, int]:
    """``text.layers.3.mlp`` -> (``text.layers``, 3); a path without a number is a stack of one."""
    words = path.split(".")
    at = next((index for index, word in enumerate(words) if word.isdigit()), None)
    return (path, 0) if at is None else (".".join(words[:at]), int(words[at]))


def _routed(model: Layer, pieces: list[tuple[str, Layer]]) -> Mapping[int, int]:
    """Experts that a token goes to, by the id of the :class:`Experts`."""
    found: dict[int, int] = {}
    for piece in [model, *(piece for _, piece in pieces)]:
        children = [child for _, child in piece.children()]
        chosen = [child.routing.top_k for child in children if isinstance(child, Router)]
        for child in children:
            if isinstance(child, Experts):
                found[id(child)] = chosen[0] if chosen else 1
    return found


def _add(part: LayerParts, piece: Layer, dtype: str, top_k: int) -> None:
    for size in _sums(piece):
        part.reduced += size
        part.reductions += 1
    if isinstance(piece, OwnRows):
        part.weights += piece.num_bytes
    if isinstance(piece, Experts) and piece.exchange is not None:
        part.met += piece.every[0][1].spec.out_features
        part.meetings += 1
    if not isinstance(piece, WeightLayer):
        return
    size = leaf_bytes(piece, dtype)
    part.weights += size
    if isinstance(piece, Experts) and len(piece.every) > 1:
        part.experts += (RoutedExperts(size, len(piece.every), top_k),)
    else:
        part.reads += size


def _sums(piece: Layer) -> Iterator[int]:
    """Numbers of each sum over ranks that a piece makes for a token."""
    if isinstance(piece, Linear):
        if piece.reduce:
            yield piece.spec.out_features
    elif isinstance(piece, _TABLES):
        if piece.own_rows is not None:
            yield piece.spec.in_features if isinstance(piece, QuantizedEmbedding) else piece.size
    elif hasattr(piece, "communicator") and piece.communicator.world_size > 1:
        for _, child in piece.children():
            if isinstance(child, Experts) and child.exchange is None:
                yield child.every[0][1].spec.out_features


def _blocks(model: Layer) -> list[Block]:
    assert isinstance(model, Decoder)
    return model.layers


def _hidden_size(pieces: list[Layer]) -> int:
    return next((piece.hidden_size() for piece in pieces if isinstance(piece, Decoder)), 0)


def _divided_logits(pieces: list[Layer]) -> int:
    shards = (piece.head_shard for piece in pieces if isinstance(piece, Decoder))
    return next((shard.vocab_size for shard in shards if shard is not None), 0)


def _table_bytes(pieces: list[tuple[str, Layer]], dtype: str) -> int:
    tables = (leaf_bytes(piece, dtype) for _, piece in pieces if isinstance(piece, _TABLES))
    return max(tables, default=0)
