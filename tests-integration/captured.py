"""Workers whose steps are captured, and what compares replayed steps with eager ones."""

from __future__ import annotations

import dataclasses

import torch

from headrace.assembly import resolve_engine, worker_factory
from headrace.engine_args import EngineArgs
from headrace_core.batch import GroupBatch
from headrace_core.kv import KVCacheConfig
from headrace_engine.kv.grouping import plan_groups
from headrace_engine.kv.states import state_groups
from headrace_engine.startup import StartupTimeline
from headrace_engine.weights.worker import ModelWorker
from headrace_testing.graphs.steps import make_batch
from headrace_testing.ops import bits_equal

BLOCK_SIZE, NUM_BLOCKS = 8, 80
SETTINGS = {
    "skip_tokenizer_init": True, "max_model_len": 128, "block_size": BLOCK_SIZE, "num_threads": 1,
    "max_num_seqs": 8, "use_tqdm_on_load": False,
}  # fmt: skip


def make_worker(folder, **changes) -> ModelWorker:
    config = EngineArgs(model=str(folder), **{**SETTINGS, **changes}).create_engine_config()
    worker = worker_factory(resolve_engine(config), StartupTimeline())()
    worker.load()
    groups = plan_groups(worker.kv_specs())
    pools = (NUM_BLOCKS,) * (1 + max(group.pool for group in groups))
    worker.allocate_cache(KVCacheConfig(pools, groups))
    worker.warm_up()
    return worker


def places_of_states(begins, seed) -> GroupBatch:
    """Every other request's state stays in its block; those that begin have none."""
    order = torch.randperm(NUM_BLOCKS - 1, generator=torch.Generator().manual_seed(seed)) + 1
    before, after = order[: len(begins)].clone(), order[len(begins) : 2 * len(begins)].clone()
    after[1::2] = before[1::2]
    before[torch.tensor(begins)] = -1
    return GroupBatch(
        torch.zeros((len(begins), 0), dtype=torch.int32),
        torch.zeros(0, dtype=torch.int64),
        state_in=before,
        state_out=after,
    )


class Comparison:
    """One worker's steps, replayed and eager, on the same cache.

    Args:
        worker: whose steps are captured.
        vocab_size: of the tokens that batches have.
    """

    def __init__(self, worker: ModelWorker, vocab_size: int) -> None:
        self.runner, self.vocab_size = worker._ready(), vocab_size
        caches = {id(c): c for c in (layer.kv_cache for layer in worker._layers.values())}
        states = [state for layer in worker._states.values() for state in layer.states]
        self.caches = [*caches.values(), *states]
        self.state_groups = state_groups(worker._cache)
        for cache in self.caches:
            cache.copy_(torch.randn(cache.shape).to(cache.dtype))
        self.graph = self.runner.graph
        assert self.graph is not None, "every family is captured"

    def batch(self, lengths, **options):
        batch = make_batch(
            lengths, num_groups=len(self.runner.backends), block_size=BLOCK_SIZE,
            num_blocks=NUM_BLOCKS, vocab_size=self.vocab_size, **options,
        )  # fmt: skip
        begins = [num_new == length for num_new, length in lengths]
        groups = [
            places_of_states(begins, seed) if seed in self.state_groups else group
            for seed, group in enumerate(batch.groups)
        ]
        return dataclasses.replace(batch, groups=tuple(groups))

    @torch.inference_mode()
    def check(self, batch) -> None:
        before = [cache.clone() for cache in self.caches]
        expected = self.runner.whole_step(batch)
        written = [cache.clone() for cache in self.caches]
        for cache, content in zip(self.caches, before):
            cache.copy_(content)
        assert bits_equal(self.graph.replay(batch), expected)
        assert all(map(bits_equal, self.caches, written))
