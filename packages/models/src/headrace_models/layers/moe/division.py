"""Whole experts of mixtures, divided over ranks: which rank has which, and how tokens find them.

Letters: T tokens, E experts of a mixture, I further ones that give back what they get, k experts per token,
S slots of this rank, each of which holds one expert.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_models.layers.base import walk
from headrace_models.layers.moe.exchange import RowExchange

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext
    from headrace_models.layers.base import Layer
    from headrace_models.layers.moe.experts import Experts

LINEAR, ROUND_ROBIN = STRATEGIES = ("linear", "round_robin")
CHOICES = 60
"""Ways in which a token may choose among copies of an expert; up to 6 copies, 10 and 12 divide it."""
LEAST_COUNTED = 2048
"""Tokens for whose experts there is room at least: steps are recorded with more than they may have."""

Places = Sequence[Sequence[int]]
"""By rank, the expert in each of its slots."""


def initial_places(
    experts: int, ranks: int, strategy: str = LINEAR, redundant: int = 0
) -> list[list[int]]:
    """Each rank's experts in the beginning, in its order of slots.

    Args:
        strategy: ``linear``: runs of neighbours, the first ranks have one more if ``ranks`` does not divide
            their number; ``round_robin``: every ``ranks``-th.
        redundant: further copies, of experts from 0 on.
    """
    slots = [slot % experts for slot in range(experts + redundant)]
    if strategy == ROUND_ROBIN:
        return [slots[rank::ranks] for rank in range(ranks)]
    size, more = divmod(len(slots), ranks)
    starts = [rank * size + min(rank, more) for rank in range(ranks + 1)]
    return [slots[start:end] for start, end in pairwise(starts)]


class ExpertDivision:
    """Mixtures of one model whose experts are divided whole.

    Args:
        strategy: of :data:`STRATEGIES`.
        redundant: copies of experts that each mixture has beside the experts themselves.
        may_move: experts change places while the model serves, so that ranks have equally many.
        counts: remember where tokens go, for so many tokens of a step at most; 0: do not.
        engine: number of this engine among those that share the experts.
        num_engines: how many these are.
    """

    def __init__(
        self,
        strategy: str = LINEAR,
        *,
        redundant: int = 0,
        may_move: bool = False,
        counts: int = 0,
        engine: int = 0,
        num_engines: int = 1,
    ) -> None:
        self.strategy, self.redundant, self.may_move = strategy, redundant, may_move
        self.counts = counts
        self.engine, self.num_engines = engine, num_engines
        self.exchange: RowExchange | None = None
        """Of rows with the other engines; None: there are none, or no mixture is built yet."""
        self.mixtures: list[Experts] = []
        """In the order of their making."""

    def keep(self, model: Layer) -> None:
        """Forget the mixtures that are not in the model: those of layers that other stages have."""
        own = {id(layer) for _, layer in walk(model)}
        self.mixtures = [mixture for mixture in self.mixtures if id(mixture) in own]

    def forget(self) -> None:
        """Forget the mixtures of a model that has gone."""
        self.mixtures.clear()
        self.exchange = None

    def divide(
        self, experts: Experts, context: BuildContext, count: int, identities: int, top_k: int
    ) -> Placement:
        """The placement of a mixture, which is one of :attr:`mixtures` from now on.

        Raises:
            UnsupportedModel: there are fewer experts than ranks.
            ConfigError: experts may move, and the ranks do not divide the number of slots, or another
                mixture has another number of experts.
        """
        of_engine = context.communicator
        ranks = self.num_engines * of_engine.world_size
        if count < ranks:
            engines = f"data_parallel_size = {self.num_engines} times " * (self.num_engines > 1)
            raise UnsupportedModel(
                f"{experts.name}: {count} experts cannot be divided over {engines}tensor_parallel_size = "
                f"{of_engine.world_size}: with enable_expert_parallel it must be at most their number"
            )
        if self.may_move:
            self._check_slots(experts.name, count, of_engine.world_size)
        if self.num_engines > 1 and self.exchange is None:
            self.exchange = RowExchange(of_engine, self.engine, self.num_engines)
        self.mixtures.append(experts)
        places = initial_places(count, ranks, self.strategy, self.redundant)
        rank = self.engine * of_engine.world_size + of_engine.rank
        return Placement(
            context, rank, places, count, identities, top_k, self.counts, self.may_move
        )

    def _check_slots(self, name: str, count: int, ranks_of_engine: int) -> None:
        ranks = self.num_engines * ranks_of_engine
        of = f"data_parallel_size = {self.num_engines} times " * (self.num_engines > 1)
        field = "parallel.eplb_config.num_redundant_experts"
        if (count + self.redundant) % ranks:
            raise ConfigError(
                f"{field} = {self.redundant}: {name} has {count} experts: with the redundant ones their "
                f"number must be a multiple of {of}tensor_parallel_size = {ranks_of_engine}: set "
                f"{-count % ranks}, or that and a multiple of {ranks}",
                field=field,
            )
        for other in self.mixtures[:1]:
            assert other.placement is not None
            if other.placement.count != count:
                raise ConfigError(
                    f"parallel.enable_eplb = True: {name} has {count} experts, and {other.name} has "
                    f"{other.placement.count}: all mixtures of a model must have equally many",
                    field="parallel.enable_eplb",
                )


class Placement:
    """Where a mixture's experts are, and this rank's tables of them.

    Args:
        rank: this one, among all that have experts.
        places: see :data:`Places`.
        identities: I.
        top_k: k.
        counts: see :class:`ExpertDivision`.
        may_move: likewise.
    """

    def __init__(
        self,
        context: BuildContext,
        rank: int,
        places: Places,
        count: int,
        identities: int,
        top_k: int,
        counts: int,
        may_move: bool,
    ) -> None:
        self.ops, self.rank = context.ops, rank
        self.count, self.identities = count, identities
        self.places: list[list[int]] = []
        self.num_slots = len(places[self.rank])
        self.has_copies = sum(map(len, places)) > count
        self.may_move = may_move
        width = CHOICES if self.has_copies else 1
        # Written in place when experts move: captured steps know where the tables lie.
        self._slots = torch.zeros(
            (count + identities) * width, 1, dtype=torch.int64, device=context.device
        )
        self._here = torch.zeros_like(self._slots, dtype=torch.float32)
        rows = max(counts, LEAST_COUNTED) * top_k if counts else 0
        self._seen = torch.full((rows, 1), -1, dtype=torch.int64, device=context.device)
        """Experts that the last step's tokens went to; -1: none."""
        self.put(places)

    @property
    def own(self) -> list[int]:
        """Experts in this rank's slots."""
        return self.places[self.rank]

    @property
    def absent(self) -> int:
        """Number that stands, among those of slots, for whatever this rank has nothing of. Before it, from S
        on, come those that give back what they get."""
        return self.num_slots + self.identities

    @property
    def gives_back(self) -> bool:
        """True if this rank is the one that gives back for the others, too: in the ranks' sum it may be
        there once."""
        return self.identities > 0 and self.rank == 0

    def put(self, places: Places) -> None:
        """Let tokens find experts at other places, of as many slots as before."""
        self.places = [list(slots) for slots in places]
        copies: list[list[int]] = [[] for _ in range(self.count)]
        for rank, experts in enumerate(self.places):
            for index, expert in enumerate(experts):
                copies[expert].append(index if rank == self.rank else self.absent)
        back = (
            range(self.num_slots, self.absent)
            if self.gives_back
            else [self.absent] * self.identities
        )
        width = len(self._slots) // (self.count + self.identities)
        wanted = [
            each[choice % len(each)]
            for each in [*copies, *([number] for number in back)]
            for choice in range(width)
        ]
        self._slots.copy_(torch.tensor(wanted)[:, None])
        self._here.copy_((self._slots != self.absent).float())

    def find(self, x: Tensor, ids: Tensor) -> tuple[Tensor, Tensor | None]:
        """Where this rank has a token's experts.

        Args:
            x: [T, H]; what chooses among copies, so that a token's choice depends on itself alone.
            ids: [T, k] int64, within [0, E + I).

        Returns:
            Slots [T, k] int64, :attr:`absent` where it has none; and of a rank that gives back [T, k]
            float32, 0 where it has none, else 1.
        """
        if len(self._seen):
            flat = ids.reshape(-1, 1)[: len(self._seen)]
            self.ops.copy_rows(flat, self._seen[: flat.shape[0]])
        asked = ids
        if self.has_copies:
            asked = ids * CHOICES + _choice(x)[:, None]
        flat = asked.reshape(-1)
        slots = self.ops.embedding(flat, self._slots).view(ids.shape)
        if not self.gives_back:
            return slots, None
        return slots, self.ops.embedding(flat, self._here).view(ids.shape)

    def take_counts(self) -> Tensor:
        """[E] int64: tokens of the last steps that went to each expert; counting starts again."""
        seen = self._seen.flatten()
        counts = torch.bincount(seen[seen >= 0], minlength=self.count)[: self.count]
        self._seen.fill_(-1)
        return counts


def _choice(x: Tensor) -> Tensor:
    """[T] int64 within [0, CHOICES), by the last bits of x [T, H], which are as good as random."""
    whole: Any = torch.int32 if x.element_size() == 4 else torch.int16
    bits = x[:, :2].contiguous().view(whole).to(torch.int64)
    return (bits[:, 0] * 31 + bits[:, -1]) % CHOICES
