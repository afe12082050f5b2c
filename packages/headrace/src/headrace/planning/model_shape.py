"""What a step of a model reads, multiplies and starts on one rank: the input of the model of scaling.

A shape comes from a model that is built without weights (:func:`shape_of`), or from the sizes of a dense
decoder alone (:class:`DecoderSizes`), for which nothing is imported.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any, NamedTuple

if TYPE_CHECKING:
    from headrace.planning.rank_model import RankModel

SMALL_KERNELS = 3
"""Of a layer, beside products and attention: two norms with their sums, and heads' norms with rotation and
the write to the cache."""


class Product(NamedTuple):
    """Equal linear layers, or experts, whose rows of outputs threads share."""

    outputs: int
    inputs: int
    num_bytes: float
    """Bytes of one layer's weight, as it is packed."""
    number: int = 1
    """Layers; of experts, all of them."""
    share: float = 1.0
    """Part of them that one token goes to: less than 1 of experts."""
    gated: bool = False
    """True if an output takes two rows of the weight, which one thread multiplies together."""
    is_head: bool = False
    """True if it makes logits: of a prompt only the last row's."""

    def pieces(self, panel: int) -> int:
        """Into which its outputs can be divided."""
        return math.ceil(self.outputs / (panel * (2 if self.gated else 1)))

    def reads(self, rows: int) -> float:
        """Layers that so many rows go to, if they choose experts evenly and independently."""
        return self.number * (1.0 - (1.0 - self.share) ** rows)

    def operations(self, rows: int) -> float:
        """Multiplications and additions of all layers."""
        return 2.0 * rows * self.outputs * self.inputs * self.number * self.share


class ModelShape(NamedTuple):
    """A model as one rank has it."""

    products: tuple[Product, ...]
    layers: int
    """With attention."""
    hidden_size: int
    context_bytes: float
    """Bytes of the cache that a step reads for each token of a request's context."""
    pair_operations: float
    """Operations of attention for each pair of a query and a key that it sees, over all layers."""
    reductions: int = 0
    """Sums over ranks in a step."""
    reduced_bytes: float = 0.0
    """Bytes that each token has summed in a step, over all of them."""

    def weight_bytes(self, rows: int) -> float:
        """Bytes that a step of so many tokens reads."""
        return sum(each.num_bytes * each.reads(rows) for each in self.products)

    @property
    def starts(self) -> int:
        """Kernels of a step that all threads share: products, of which a layer's experts are two, and
        attention."""
        dense = sum(each.number for each in self.products if each.share >= 1.0)
        experts = 2 * self.layers * any(each.share < 1.0 for each in self.products)
        return dense + experts + self.layers

    @property
    def small_kernels(self) -> int:
        return SMALL_KERNELS * self.layers


class DecoderSizes(NamedTuple):
    """Sizes of a dense decoder with grouped heads and gated MLPs."""

    hidden: int
    layers: int
    heads: int
    kv_heads: int
    head_dim: int
    intermediate: int
    vocabulary: int
    item_bytes: float = 2.0
    """Bytes of a weight; a number of the cache and of the activations has 2."""

    def shape(self, ranks: int = 1) -> ModelShape:
        """As each of some ranks has it, which divide heads, inner columns and vocabulary."""
        heads, kv_heads = self.heads / ranks, max(1.0, self.kv_heads / ranks)
        inner = math.ceil(self.intermediate / ranks)
        queries = math.ceil(heads * self.head_dim)
        qkv = math.ceil((heads + 2 * kv_heads) * self.head_dim)

        def product(outputs: int, inputs: int, count: int, **marks: bool) -> Product:
            return Product(outputs, inputs, self.item_bytes * outputs * inputs, count, **marks)

        return ModelShape(
            products=(
                product(qkv, self.hidden, self.layers),
                product(self.hidden, queries, self.layers),
                product(2 * inner, self.hidden, self.layers, gated=True),
                product(self.hidden, inner, self.layers),
                product(math.ceil(self.vocabulary / ranks), self.hidden, 1, is_head=True),
            ),
            layers=self.layers,
            hidden_size=self.hidden,
            context_bytes=2 * 2 * kv_heads * self.head_dim * self.layers,
            pair_operations=4 * heads * self.head_dim * self.layers,
            reductions=2 * self.layers if ranks > 1 else 0,
            reduced_bytes=2.0 * 2 * self.hidden * self.layers if ranks > 1 else 0.0,
        )


QWEN3_06B = DecoderSizes(1024, 28, 16, 8, 128, 3072, 151936)
"""The published sizes of Qwen3-0.6B."""
QWEN3_8B = DecoderSizes(4096, 36, 32, 8, 128, 12288, 151936)
"""Of Qwen3-8B."""


def shape_of(
    model: RankModel, config: Mapping[str, Any], item_bytes: int, ranks: int = 1
) -> ModelShape:
    """The shape of a rank's model that is built.

    Args:
        config: the checkpoint's, of its text part; without heads in it attention's operations are left out.
        item_bytes: of a number of the activations.
        ranks: that divide the model, and so its heads.
    """
    from headrace.planning.memory import token_bytes

    parts, specs, reads = model
    products: dict[Product, int] = {}
    for read in reads:
        spec = read.spec
        key = Product(spec.out_features, spec.in_features, read.num_bytes, 1, read.share,
                      read.is_gated, read.is_head)  # fmt: skip
        products[key] = products.get(key, 0) + 1
    every = (*parts.layers, parts.front, parts.head)
    return ModelShape(
        tuple(key._replace(number=count) for key, count in products.items()),
        layers=sum(bool(part.caches) for part in parts.layers),
        hidden_size=parts.hidden_size,
        context_bytes=token_bytes(specs),
        pair_operations=_pair_operations(config, len(parts.layers)) / ranks,
        reductions=sum(part.reductions for part in every),
        reduced_bytes=float(item_bytes * sum(part.reduced for part in every)),
    )


def _pair_operations(config: Mapping[str, Any], layers: int) -> float:
    heads = config.get("num_attention_heads") or 0
    head_dim = config.get("head_dim") or config.get("hidden_size", 0) // max(1, heads)
    return float(4 * heads * head_dim * layers)
