"""Rows of a vocabulary over the ranks of tensor parallelism: tables of input vectors, and heads.

Each rank has the rows of neighbouring tokens (Shoeybi et al. 2019, arXiv:1909.08053, section 3). It looks up
its own tokens in a table, zeros stand for the others', and the sum over the ranks has every token's vector.
It computes the logits of its own tokens, and those of all ranks stand side by side. Neither adds two numbers
that are not zero, so the bits are those of a whole table and a whole head.

Letters: V tokens of the vocabulary, N ranks, T tokens of a step, R rows of hidden states, H hidden size.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING

import torch

from headrace_core.errors import HeadraceError
from headrace_models.layers.base import Layer, Part, Span, slot_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec
    from headrace_core.model import BuildContext
    from headrace_core.ops import OpTable
    from headrace_core.parallel import Communicator

_UNITS = (128, 64, 32, 16, 8, 4, 2, 1)
"""Rows that stay together where N does not divide V: kernels' tiles, and blocks of quantized weights."""
_FEWEST_UNITS = 16
"""Units of a rank's share, so that shares differ by a few per cent at most."""
_MOST_IN_A_WORD = 16
"""Rows that quantized weights may have in one number of a tensor: of 2 bits in 32."""


@dataclass(frozen=True, slots=True)
class VocabShard:
    """The tokens that one rank has."""

    vocab_size: int
    """V."""
    width: int
    """Tokens of each rank but the last, which has what is left."""
    start: int
    """This rank's first."""

    @property
    def size(self) -> int:
        """Tokens of this rank."""
        return min(self.width, self.vocab_size - self.start)

    @property
    def part(self) -> Part:
        """This rank's rows of the checkpoint's tensor."""
        return Part(self.size, span=Span(self.start, self.vocab_size))


def vocab_shards(vocab_size: int, group: Communicator) -> list[VocabShard]:
    """Ways to divide a vocabulary, the best first; none if there is one rank, or fewer tokens than ranks.

    Equal shares come first. Then those whose borders are at multiples of blocks, which quantized weights may
    need.
    """
    ranks, rank = group.world_size, group.rank
    if ranks == 1 or vocab_size < ranks:
        return []
    share = -(-vocab_size // ranks)
    widths = [share] if vocab_size % ranks == 0 else []
    # Of a small vocabulary large units would leave too little for the last rank.
    units = sorted(_UNITS, key=lambda unit: unit * _FEWEST_UNITS > share)
    widths += [-(-share // unit) * unit for unit in units]
    return [
        VocabShard(vocab_size, width, rank * width)
        for width in dict.fromkeys(widths)
        if (ranks - 1) * width < vocab_size
    ]


def vocab_shard(vocab_size: int, group: Communicator) -> VocabShard | None:
    """The best way to divide a vocabulary in floats; None: each rank has all of it."""
    return next(iter(vocab_shards(vocab_size, group)), None)


def fitting_shard(
    spec: LinearSpec, group: Communicator, method_of: Callable[[LinearSpec], LinearMethod]
) -> VocabShard | None:
    """The best way to divide a weight that may be quantized; None: each rank has all of it.

    Every rank comes to the same answer.

    Args:
        spec: of the whole weight, whose outputs are the vocabulary.
        method_of: how some rows of it are stored.
    """
    for shard in vocab_shards(spec.out_features, group):
        every = (replace(shard, start=rank * shard.width) for rank in range(group.world_size))
        if all(_can_be_cut(each, spec, method_of) for each in every):
            return shard
    return None


def _can_be_cut(
    shard: VocabShard, spec: LinearSpec, method_of: Callable[[LinearSpec], LinearMethod]
) -> bool:
    """True if a rank's piece can be cut out of each of the weight's tensors."""
    own = replace(spec, out_parts=(shard.size,))
    method = method_of(own)
    if method.is_plain:
        return True
    stored = method.create(spec)
    try:
        return all(
            tensor.part_dim is None or tensor.by_part or _fits(shard, tensor, stored[key])
            for key, tensor in method.create(own).items()
        )
    except HeadraceError:  # the method takes no such number of rows
        return False


def _fits(shard: VocabShard, tensor: TensorSpec, stored: TensorSpec) -> bool:
    """True if a rank's piece can be cut out of one tensor.

    Raises: UnsupportedModel: likewise not.
    """
    assert tensor.part_dim is not None
    is_by_row = tensor.shape[tensor.part_dim] * _MOST_IN_A_WORD >= shard.size
    if not is_by_row and shard.width % _UNITS[0]:
        return False  # a block of rows may be on two ranks
    return slot_of(tensor, [shard.part]).source_shape(0) == tuple(stored.shape)


class OwnRows(Layer):
    """Looks up rows of a table of which other ranks have the rest.

    Args:
        beyond: the token whose row tokens past the vocabulary get; None: there are none.
    """

    def __init__(
        self, context: BuildContext, shard: VocabShard, *, beyond: int | None = None
    ) -> None:
        self.ops, self.communicator = context.ops, context.communicator
        self.beyond = beyond
        tokens = torch.arange(shard.vocab_size, device=context.device) - shard.start
        is_here = (tokens >= 0) & (tokens < shard.size)
        # Tables, as no op of a recorded step compares numbers.
        self.rows = torch.where(is_here, tokens, 0)[:, None]
        """[V, 1] int64; each token's row on this rank, 0 where another one has it."""
        self.is_here = is_here.to(getattr(torch, context.dtype))[:, None]
        """[V, 1]; 1, or 0 where another rank has the row."""

    @property
    def num_bytes(self) -> int:
        """Bytes of its tables."""
        return self.rows.nbytes + self.is_here.nbytes

    def __call__(self, ids: Tensor, look_up: Callable[[Tensor], Tensor]) -> Tensor:
        """ids [T] int64 -> [T, H], the same on every rank.

        Args:
            look_up: of this rank's table; row numbers [T] int64 -> [T, H].
        """
        rows = self.ops.embedding(ids, self.rows, beyond=self.beyond)
        is_here = self.ops.embedding(ids, self.is_here, beyond=self.beyond)
        own = self.ops.gate(look_up(rows.view(-1)), is_here)
        return self.communicator.all_reduce(own)


def gathered_logits(own: Tensor, shard: VocabShard, ops: OpTable, group: Communicator) -> Tensor:
    """Logits [R, V] of all ranks' [R, own tokens], on every rank."""
    rows = own.shape[0]
    if shard.width * group.world_size == shard.vocab_size:
        return group.all_gather(own)
    # The last rank has fewer. Whatever stands in for the others is cut off again.
    equal = own
    if shard.size < shard.width:
        equal = torch.empty(rows, shard.width, dtype=own.dtype, device=own.device)
        ops.copy_rows(own, equal[:, : shard.size])
    logits = torch.empty(rows, shard.vocab_size, dtype=own.dtype, device=own.device)
    ops.copy_rows(group.all_gather(equal)[:, : shard.vocab_size], logits)
    return logits
