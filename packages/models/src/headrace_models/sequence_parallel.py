"""Sequence parallelism: between two divided layers, each rank has a part of the tokens.

With tensor parallelism every rank adds the sums to the stream and norms it, the same rows on all. Here a sum
over the ranks ends with a part of its rows on each (``reduce_scatter`` in place of ``all_reduce``); a rank
adds and norms those, and the normed rows are gathered before the next product. Sums are the same bits either
way, and norms go by rows, so the results are, too.

Source: Korthikanti et al. 2022, arXiv:2205.05198, section 4.2.2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Layer
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Decoder
from headrace_models.layers.mlp import MLP, GatedMLP

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_models.layers.norm import NoNorm, NormLayer

FIELD = "parallel.enable_sp"
LEAST_TOKENS = 1024
"""Tokens of a step from which ranks have a part of them each."""


class TokenShares:
    """The tokens of the pass that runs, if ranks have a part of them each between layers."""

    def __init__(self, group: Communicator, least_tokens: int = LEAST_TOKENS) -> None:
        self.group, self.least_tokens = group, least_tokens
        self.num_tokens = 0
        """Tokens of the pass; 0: every rank has all rows."""
        self.num_shared = 0
        """Passes until now in which ranks had a part each."""

    def shares(self, num_tokens: int) -> bool:
        """True if a pass of so many tokens is shared."""
        return num_tokens >= self.least_tokens

    @contextmanager
    def sharing(self, num_tokens: int) -> Iterator[None]:
        """While this lasts a pass runs, of so many tokens."""
        self.num_tokens = num_tokens if self.shares(num_tokens) else 0
        self.num_shared += self.num_tokens > 0
        try:
            yield
        finally:
            self.num_tokens = 0

    def own(self, x: Tensor) -> Tensor:
        """[T, H] -> this rank's rows; T is filled up with zeros."""
        return self._filled(x).chunk(self.group.world_size)[self.group.rank]

    def summed(self, x: Tensor) -> Tensor:
        """[T, H] of each rank -> this rank's rows of the sum."""
        return self.group.reduce_scatter(self._filled(x), dim=0)

    def gathered(self, x: Tensor) -> Tensor:
        """This rank's rows -> [T, H]."""
        return self.group.all_gather(x, dim=0)[: self.num_tokens]

    def _filled(self, x: Tensor) -> Tensor:
        missing = -x.shape[0] % self.group.world_size
        return torch.cat((x, x.new_zeros((missing, x.shape[1])))) if missing else x


class ScatteredSums(Communicator):
    """The group of a layer that ends with a sum: of shared passes each rank gets its rows."""

    def __init__(self, shares: TokenShares) -> None:
        self._shares, self._group = shares, shares.group

    @property
    def rank(self) -> int:
        return self._group.rank

    @property
    def world_size(self) -> int:
        return self._group.world_size

    def all_reduce(self, tensor: Tensor) -> Tensor:
        """Sum over ranks; of shared passes [T, H] -> this rank's rows of it."""
        shared = self._shares.num_tokens
        return self._shares.summed(tensor) if shared else self._group.all_reduce(tensor)

    def all_gather(self, tensor: Tensor, dim: int = -1) -> Tensor:
        return self._group.all_gather(tensor, dim)

    def broadcast(self, tensor: Tensor, source: int = 0) -> Tensor:
        return self._group.broadcast(tensor, source)

    def barrier(self) -> None:
        self._group.barrier()


class SharedNorm(Layer):
    """A norm between two divided layers: of shared passes it takes a rank's rows, and gives all."""

    def __init__(self, norm: NormLayer | NoNorm, shares: TokenShares) -> None:
        self.norm, self._shares = norm, shares

    def __call__(self, x: Tensor) -> Tensor:
        """x [..., size] -> the same shape."""
        return self.norm(x)

    def add(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """See :meth:`headrace_models.layers.norm.RMSNorm.add`. The first norm of a shared pass gets all rows
        of x."""
        if not self._shares.num_tokens:
            return self.norm.add(x, residual)
        if residual is None:
            normed, stream = self.norm.add(x, None)
            return normed, self._shares.own(stream)
        normed, stream = self.norm.add(x, residual)
        return self._shares.gathered(normed), stream


def share_tokens(model: Any, group: Communicator, least_tokens: int = LEAST_TOKENS) -> TokenShares:
    """Have ranks share the tokens of large passes between a loaded model's layers, from now on.

    Args:
        model: its weights are loaded.
        group: the ranks that its layers are divided over.

    Raises:
        ConfigError: it is not a stack of attention and dense MLPs with a norm before each.
    """
    shares = TokenShares(group, least_tokens)
    sums = ScatteredSums(shares)
    check_shareable(model)
    for block in model.layers:
        block.input_norm = SharedNorm(block.input_norm, shares)
        block.mlp_norm = SharedNorm(block.mlp_norm, shares)
        block.attention.out.communicator = sums
        block.mlp.down.communicator = sums
    model.run_blocks = partial(_run_shared, shares, model.run_blocks)
    return shares


def check_shareable(model: Any) -> None:
    """Refuse models whose tokens ranks cannot share.

    Raises:
        ConfigError: naming what is in the way.
    """
    why = _why_not(model)
    if why:
        raise ConfigError(
            f"{FIELD} = True: must be False for this model: {why}; ranks share the tokens of stacks of "
            "attention and dense MLPs with a norm before each",
            field=FIELD,
        )


def _why_not(model: Any) -> str:
    own = type(model)
    usual = (Decoder.forward, Decoder.run_blocks, Decoder.run_layer)
    if not isinstance(model, Decoder) or (own.forward, own.run_blocks, own.run_layer) != usual:
        return f"{own.__name__} has a pass of its own"
    for index, block in enumerate(model.layers):
        if type(block) is not PreNormBlock:
            return f"layer {index} is a {type(block).__name__}"
        for part, wanted in ((block.attention, (Attention,)), (block.mlp, (GatedMLP, MLP))):
            if type(part) not in wanted:
                return f"layer {index} has a {type(part).__name__}"
        known: Any = block  # of these classes, by now
        if not (known.attention.out.reduce and known.mlp.down.reduce):
            return f"layer {index} is whole on every rank"
    return ""


def _run_shared(
    shares: TokenShares,
    own: Callable[[Tensor, ForwardBatch], tuple[Tensor, Tensor | None]],
    x: Tensor,
    batch: ForwardBatch,
) -> tuple[Tensor, Tensor | None]:
    """The stack, whose stream every rank has whole at the end."""
    with shares.sharing(x.shape[0]):
        x, residual = own(x, batch)
        if not shares.num_tokens:
            return x, residual
        assert residual is not None
        return shares.gathered(x), shares.gathered(residual)
