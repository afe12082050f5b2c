"""The worker's end: copies blocks between the cache's memory and a connector."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, EngineDead
from headrace_core.kv import KVCacheConfig, KVConnector, MLASpec
from headrace_core.model import AttentionLayer
from headrace_core.step import StepResult
from headrace_engine.execution.cache import Buffers
from headrace_engine.kv_transfer.calls import LOAD, SAVE
from headrace_engine.kv_transfer.moves import KVMove, KVMoves
from headrace_engine.kv_transfer.parts import PARTS, GroupParts
from headrace_engine.kv_transfer.rank_blocks import PartSize, part_key
from headrace_engine.kv_transfer.settings import FIELD

logger = logging.getLogger(__name__)


class _MovedPart(NamedTuple):
    """A part of the blocks of a group, and where it lies."""

    mark: str
    views: Sequence[Tensor]
    """By layer, see :func:`_by_share`."""
    share: int
    num_bytes: int


class BlockMover:
    """Moves parts of blocks, as bytes in the order in which they lie.

    Args:
        connector: where to, and from.
        buffers: the cache's memory, by pool.
        config: the cache.
        splits: by group: True if its backend has all keys of a tensor before all values, so that a block
            lies in two places; False: a block is one piece.
        parts: by group, those of this rank.
        others: calls a method of the other ranks' workers, in the order of the passes; results by rank from
            1. None: there are none, or this rank follows.
    """

    def __init__(
        self,
        connector: KVConnector,
        buffers: Buffers,
        config: KVCacheConfig,
        splits: Sequence[bool],
        parts: Sequence[GroupParts],
        others: Callable[[str, Sequence[Any]], list[Future[Any]]] | None = None,
    ) -> None:
        self._connector, self._others = connector, others
        self._parts = [
            _places(
                buffers[group.pool], group.layer_names, config.pools[group.pool], own, splits=split
            )
            for group, split, own in zip(config.groups, splits, parts, strict=True)
        ]
        """By group."""
        self._warned = False
        self._failed_epoch = -1

    @property
    def part_sizes(self) -> list[list[PartSize]]:
        """By group: this rank's parts of a block."""
        return [[(part.mark, part.num_bytes) for part in parts] for parts in self._parts]

    def run(self, moves: KVMoves, execute: Callable[[], StepResult]) -> StepResult:
        """Execute a step with its moves, on all ranks. What one rank could not load counts as not loaded,
        which a step that other stages still compute says once it is finished."""
        try:
            begun = self._tell(
                LOAD, _plain(self._valid(moves.saved_first, moves)), _plain(moves.loaded)
            )
            failed = dict.fromkeys(self.before(moves))
            result = execute()
            if result.remaining is None:
                for answer in begun:
                    failed.update(dict.fromkeys(answer.result()))
        except BaseException:
            self._failed_epoch = moves.epoch
            raise
        if any(part.not_computed for part in result.requests.values()):
            self._failed_epoch = moves.epoch  # others may have computed from blocks without content
        elif not any(part.error for part in result.requests.values()):
            # Now, though other stages may still compute: a later step may overwrite the blocks. Each stage
            # gets this behind its part of the pass.
            for answer in self._tell(SAVE, _plain(self._valid(moves.saved, moves))):
                answer.add_done_callback(self._note)  # nobody waits for it
            self.after(moves)
        result.failed_loads = list(failed)
        if result.remaining is not None:
            result.remaining = partial(self._finish, moves, result, begun, result.remaining)
        return result

    def _finish(
        self,
        moves: KVMoves,
        result: StepResult,
        begun: Sequence[Future[Any]],
        remaining: Callable[[], None],
    ) -> None:
        """Complete a step of several stages, which have answered before they computed."""
        try:
            remaining()
            failed = dict.fromkeys(result.failed_loads)
            for answer in begun:
                failed.update(dict.fromkeys(answer.result()))
        except BaseException:
            self._failed_epoch = max(self._failed_epoch, moves.epoch)
            raise
        result.failed_loads = list(failed)

    def before(self, moves: KVMoves) -> list[bytes]:
        """What a step begins with: saves of what it overwrites, then loads.

        Returns:
            Keys of blocks that could not be loaded; their memory holds anything.
        """
        self.save(self._valid(moves.saved_first, moves))
        return self.load(moves.loaded)

    def after(self, moves: KVMoves) -> None:
        """What follows a step's model: saves."""
        self.save(self._valid(moves.saved, moves))

    def load(self, moves: Sequence[KVMove]) -> list[bytes]:
        """Load this rank's parts; keys of blocks for which that failed."""
        return [move.key for move in moves if not self._load(move)]

    def save(self, moves: Sequence[KVMove]) -> None:
        """Save this rank's parts."""
        for move in moves:
            for part in self._parts[move.group]:
                pieces = [view[:, move.block_id, :, part.share].reshape(-1) for view in part.views]
                content = torch.cat(pieces).cpu()
                try:
                    key = part_key(move.key, part.mark)
                    self._connector.save(key, memoryview(content.numpy().data))
                except OSError as error:
                    self._warn("saved", error)

    def _valid(self, moves: Sequence[KVMove], step: KVMoves) -> Sequence[KVMove]:
        """Blocks that may be saved."""
        return () if step.epoch <= self._failed_epoch else moves

    def _tell(self, method: str, *moves: Sequence[tuple[int, int, bytes]]) -> list[Future[Any]]:
        """Have the other ranks do what this one does."""
        return self._others(method, moves) if self._others is not None and any(moves) else []

    def _note(self, answer: Future[Any]) -> None:
        error = answer.exception()
        if error is not None and not isinstance(error, EngineDead):  # which says so itself
            self._warn("saved", error)

    def _load(self, move: KVMove) -> bool:
        for part in self._parts[move.group]:
            staged = torch.empty(part.num_bytes, dtype=torch.uint8)
            try:
                key = part_key(move.key, part.mark)
                if not self._connector.load(key, memoryview(staged.numpy().data)):
                    return False
            except OSError as error:
                self._warn("loaded", error)
                return False
            start = 0
            for view in part.views:
                block = view[:, move.block_id, :, part.share]
                block.copy_(staged[start : start + block.numel()].view(block.shape))
                start += block.numel()
        return True

    def _warn(self, what: str, error: BaseException) -> None:
        """Log the first failure; a full disk has one for each block."""
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "KV transfer: a block could not be %s: %s", what, error)
        self._warned = True


def splits_of_groups(
    layers: Mapping[str, AttentionLayer], config: KVCacheConfig, parts: Sequence[GroupParts]
) -> list[bool]:
    """By group: True if keys of all blocks of a tensor lie before all values.

    Raises:
        ConfigError: a backend cuts blocks into more pieces; or a rank has several parts of a block, and a
            head's keys are not together.
    """
    splits = []
    for group, own in zip(config.groups, parts):
        if not group.layer_names:  # which another stage has
            splits.append(False)
            continue
        backend = layers[group.layer_names[0]].backend
        order = tuple(backend.cache_stride_order())
        is_whole = order[0] == (0 if isinstance(group.spec, MLASpec) else 1)
        if not is_whole and (isinstance(group.spec, MLASpec) or order[:2] != (0, 1)):
            raise ConfigError(
                f"{FIELD}: must be left out with the attention backend {backend.name!r}, which lays a block "
                f"out in several pieces (its order is {order})",
                field=FIELD,
            )
        if any(part.shares > 1 for part in own.parts) and order[2:] != (3, 2, 4):
            raise ConfigError(
                f"{FIELD}.{PARTS}: must be left out with the attention backend {backend.name!r}, which does "
                f"not keep a head's keys together (its order is {order})",
                field=f"{FIELD}.{PARTS}",
            )
        splits.append(not is_whole)
    return splits


def _places(
    buffers: Sequence[Tensor],
    names: Sequence[str],
    num_blocks: int,
    own: GroupParts,
    *,
    splits: bool,
) -> list[_MovedPart]:
    """Where the parts of a group's blocks lie.

    Args:
        buffers: the j-th has the blocks of the j-th layer.
    """
    tensor_of = dict(zip(names, buffers))
    found = []
    for layers, mark, share, shares in own.parts:
        views = [
            _by_share(tensor_of[name], num_blocks, splits=splits, shares=shares) for name in layers
        ]
        size = sum(view[:, 0, :, share].numel() for view in views)
        found.append(_MovedPart(mark, views, share, size))
    return found


def _by_share(buffer: Tensor, num_blocks: int, *, splits: bool, shares: int) -> Tensor:
    """[pieces, N, keys and values, shares, bytes] of a tensor of blocks; in a block that is one share, keys
    and values are not told apart."""
    kinds = 2 if shares > 1 and not splits else 1
    return buffer.view(2 if splits else 1, num_blocks, kinds, shares, -1)


def _plain(moves: Sequence[KVMove]) -> list[tuple[int, int, bytes]]:
    """Moves as they are sent."""
    return [(move.group, move.block_id, move.key) for move in moves]
