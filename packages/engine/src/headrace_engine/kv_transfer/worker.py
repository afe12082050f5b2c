"""The worker's end: copies blocks between the cache's memory and a connector."""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig, KVConnector, MLASpec
from headrace_core.model import AttentionLayer
from headrace_core.step import StepResult
from headrace_engine.execution.cache import Buffers
from headrace_engine.kv_transfer.moves import KVMove, KVMoves
from headrace_engine.kv_transfer.settings import FIELD

logger = logging.getLogger(__name__)


class BlockMover:
    """Moves whole blocks, as bytes in the order in which they lie.

    Args:
        connector: where to, and from.
        buffers: the cache's memory, by pool.
        config: the cache.
        splits: by group: True if its backend has all keys of a tensor before all values, so that a block
            lies in two places; False: a block is one piece.
    """

    def __init__(
        self,
        connector: KVConnector,
        buffers: Buffers,
        config: KVCacheConfig,
        splits: list[bool],
    ) -> None:
        self._connector = connector
        self._views = [
            [
                _by_block(buffer, config.pools[group.pool], splits=split)
                for buffer in buffers[group.pool][: len(group.layer_names)]
            ]
            for group, split in zip(config.groups, splits)
        ]
        self._sizes = [
            len(group.layer_names) * config.page_bytes(group.pool) for group in config.groups
        ]
        self._warned = False
        self._failed_epoch = -1

    def run(self, moves: KVMoves, execute: Callable[[], StepResult]) -> StepResult:
        """Execute a step with its moves."""
        try:
            failed = self.before(moves)
            result = execute()
        except BaseException:
            self._failed_epoch = moves.epoch
            raise
        if any(part.not_computed for part in result.requests.values()):
            self._failed_epoch = moves.epoch  # others may have computed from blocks without content
        elif not any(part.error for part in result.requests.values()):
            self.after(moves)
        result.failed_loads = failed
        return result

    def before(self, moves: KVMoves) -> list[bytes]:
        """What a step begins with: saves of what it overwrites, then loads.

        Returns:
            Keys of blocks that could not be loaded; their memory holds anything.
        """
        self._save(moves.saved_first, moves.epoch)
        return [move.key for move in moves.loaded if not self._load(move)]

    def after(self, moves: KVMoves) -> None:
        """What follows a step's model: saves."""
        self._save(moves.saved, moves.epoch)

    def _load(self, move: KVMove) -> bool:
        staged = torch.empty(self._sizes[move.group], dtype=torch.uint8)
        try:
            if not self._connector.load(move.key, memoryview(staged.numpy().data)):
                return False
        except OSError as error:
            self._warn("loaded", error)
            return False
        start = 0
        for view in self._views[move.group]:
            block = view[:, move.block_id]
            block.copy_(staged[start : start + block.numel()].view(block.shape))
            start += block.numel()
        return True

    def _save(self, moves: list[KVMove], epoch: int) -> None:
        if epoch <= self._failed_epoch:
            return
        for move in moves:
            pieces = [view[:, move.block_id].reshape(-1) for view in self._views[move.group]]
            content = torch.cat(pieces).cpu()
            try:
                self._connector.save(move.key, memoryview(content.numpy().data))
            except OSError as error:
                self._warn("saved", error)

    def _warn(self, what: str, error: OSError) -> None:
        """Log the first failure; a full disk has one for each block."""
        level = logging.DEBUG if self._warned else logging.WARNING
        logger.log(level, "KV transfer: a block could not be %s: %s", what, error)
        self._warned = True


def splits_of_groups(layers: Mapping[str, AttentionLayer], config: KVCacheConfig) -> list[bool]:
    """By group: True if keys of all blocks of a tensor lie before all values.

    Raises:
        ConfigError: a backend cuts blocks into more pieces.
    """
    splits = []
    for group in config.groups:
        backend = layers[group.layer_names[0]].backend
        order = tuple(backend.cache_stride_order())
        is_whole = order[0] == (0 if isinstance(group.spec, MLASpec) else 1)
        if not is_whole and (isinstance(group.spec, MLASpec) or order[:2] != (0, 1)):
            raise ConfigError(
                f"{FIELD}: must be left out with the attention backend {backend.name!r}, which lays a block "
                f"out in several pieces (its order is {order})",
                field=FIELD,
            )
        splits.append(not is_whole)
    return splits


def _by_block(buffer: Tensor, num_blocks: int, *, splits: bool) -> Tensor:
    """[pieces, N, bytes] of a tensor of blocks."""
    return buffer.view(2 if splits else 1, num_blocks, -1)
