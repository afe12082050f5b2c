"""A tiny model whose layers are of every kind that the engine knows, and what a scheduler does with it.

Full attention with narrow and wide heads, a window, chunks, a layer that reads another's cache, and two
recurrences with states of different sizes: four pools of blocks.
"""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from headrace_core.attention import AttentionLayerSpec
from headrace_core.batch import ForwardBatch
from headrace_core.kv import (
    CacheSpec,
    ChunkedLocalSpec,
    FullAttentionSpec,
    KVCacheConfig,
    RecurrentSpec,
    SlidingWindowSpec,
    StateShape,
)
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import SchedulerConfig
from headrace_engine.execution import ModelWorker
from headrace_engine.kv.grouping import plan_groups
from headrace_engine.kv.manager import PagedKVCacheManager
from headrace_engine.kv.states import state_groups
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.worker.settings import WorkerLimits, WorkerSettings
from headrace_reference.attention import attend

VOCAB, HIDDEN, HEADS, BLOCK_SIZE, MAX_LEN = 37, 16, 4, 4, 96
BUDGET = 16
"""Tokens of a step."""


class AttendingLayer:
    """Adds attention to its input. ``wide``: twice as long heads; ``target``: whose keys and values it
    reads."""

    def __init__(
        self,
        index: int,
        backend: Any,
        kind: type[CacheSpec] | None,
        generator: torch.Generator,
        *,
        wide: bool = False,
        target: AttendingLayer | None = None,
    ) -> None:
        self.head_dim, self.target = 8 if wide else 4, target
        own = {SlidingWindowSpec: "sliding_window", ChunkedLocalSpec: "attention_chunk_size"}
        special = {own[kind]: 6} if kind in own else {}
        self.spec = AttentionLayerSpec(
            f"layers.{index}", HEADS, 2, self.head_dim, self.head_dim**-0.5,
            sliding_window=special.get("sliding_window"),
            kv_sharing_target=target and target.spec.name,
            extras={"attention_chunk": 6} if kind is ChunkedLocalSpec else {},
        )  # fmt: skip
        self.kv_spec = kind and kind(BLOCK_SIZE, 2, self.head_dim, "float32", **special)
        self.backend = backend
        self.cache: Tensor | None = None
        self.group = 0
        self.q, self.k, self.v = (
            torch.randn(HIDDEN, heads * self.head_dim, generator=generator) * 0.5
            for heads in (HEADS, 2, 2)
        )
        self.out = torch.randn(HEADS * self.head_dim, HIDDEN, generator=generator) * 0.5
        self.last: tuple[Tensor, Tensor] = (self.k, self.v)

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        self.cache, self.group = kv_cache, group

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        query, key, value = self._project(x)
        metadata = (batch, self.group) if batch.groups else None
        given = (None, None) if self.target else (key, value)
        out = self.backend.forward(self.spec, query, *given, self.cache, metadata)
        return x + out.flatten(1) @ self.out

    def dense(self, x: Tensor) -> Tensor:
        query, *self.last = self._project(x)
        out = attend(
            query, *(self.target or self).last, scale=self.spec.scale,
            sliding_window=self.spec.sliding_window,
            **self.spec.extras,
        )  # fmt: skip
        return x + out.flatten(1) @ self.out

    def _project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        q, k, v = (x @ weight for weight in (self.q, self.k, self.v))
        return tuple(part.view(x.shape[0], -1, self.head_dim) for part in (q, k, v))  # type: ignore[return-value]


class RecurrentLayer:
    """A decaying sum of its inputs, and the input before; ``twice``: keeps the sum in two halves."""

    def __init__(self, index: int, generator: torch.Generator, *, twice: bool = False) -> None:
        self.name = f"layers.{index}"
        shapes = [(2, HIDDEN // 2), (3,)] if twice else [(HIDDEN,)]
        self.kv_spec = RecurrentSpec(
            BLOCK_SIZE, tuple(StateShape(shape, "float32") for shape in (*shapes, (HIDDEN,)))
        )
        self.weight = torch.randn(HIDDEN, HIDDEN, generator=generator) * 0.5
        self.states: Sequence[Tensor] | None = None
        self.group = 0

    def bind_states(self, states: Sequence[Tensor] | None, group: int) -> None:
        self.states, self.group = states, group

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        parts, bounds = [], batch.cu_seqlens_q.tolist()
        for b, (start, end) in enumerate(itertools.pairwise(bounds)):
            total, before = torch.zeros(HIDDEN), torch.zeros(HIDDEN)
            if self.states is not None:
                where = batch.groups[self.group]
                assert where.state_in is not None
                assert where.state_out is not None
                first, last = self.states[0], self.states[-1]
                if where.state_in[b] >= 0:
                    total = first[where.state_in[b]].flatten().clone()
                    before = last[where.state_in[b]].clone()
            part, total, before = self._run(x[start:end], total, before)
            if self.states is not None:
                first[where.state_out[b]] = total.view(first.shape[1:])
                last[where.state_out[b]] = before
            parts.append(part)
        return torch.cat(parts)

    def dense(self, x: Tensor) -> Tensor:
        return self._run(x, torch.zeros(HIDDEN), torch.zeros(HIDDEN))[0]

    def _run(self, x: Tensor, total: Tensor, before: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        rows = []
        for row in x:
            total = 0.7 * total + torch.tanh(row @ self.weight) - 0.3 * torch.tanh(before)
            before = row
            rows.append(row + total)
        return torch.stack(rows), total, before


class HybridLM(torch.nn.Module):
    """A tiny model whose layers are of every kind that the engine knows."""

    weight_rules = ()

    def __init__(self, backend: type[Any]) -> None:
        super().__init__()
        ops: OpTable = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
        generator = torch.Generator().manual_seed(7)
        one = backend(ops)
        self.embed = torch.randn(VOCAB, HIDDEN, generator=generator)
        self.head = torch.randn(HIDDEN, VOCAB, generator=generator)
        full = AttendingLayer(0, one, FullAttentionSpec, generator)
        self.layers = [
            full,
            RecurrentLayer(1, generator),
            AttendingLayer(2, one, SlidingWindowSpec, generator),
            RecurrentLayer(3, generator, twice=True),
            AttendingLayer(4, one, FullAttentionSpec, generator, wide=True),
            AttendingLayer(5, one, ChunkedLocalSpec, generator),
            AttendingLayer(6, one, None, generator, target=full),
        ]

    def attention_layers(self) -> Mapping[str, AttendingLayer]:
        return {x.spec.name: x for x in self.layers if isinstance(x, AttendingLayer)}

    def state_layers(self) -> Mapping[str, RecurrentLayer]:
        return {x.name: x for x in self.layers if isinstance(x, RecurrentLayer)}

    def forward(self, batch: ForwardBatch) -> Tensor:
        x = self.embed[batch.input_ids]
        for layer in self.layers:
            x = _normed(layer(x, batch))
        return x if batch.logits_rows is None else x[batch.logits_rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        return hidden @ self.head

    @torch.no_grad()
    def dense_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        """Without cache, pages or batch."""
        tokens = list(prompt)
        for _ in range(count):
            x = self.embed[torch.tensor(tokens)]
            for layer in self.layers:
                x = _normed(layer.dense(x))
            tokens.append(int((x[-1] @ self.head).argmax()))
        return tokens[len(prompt) :]


def _normed(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6)


def make_worker(model: HybridLM, max_num_seqs: int = 8) -> ModelWorker:
    """One that has loaded the model."""
    limits = WorkerLimits(
        vocab_size=VOCAB,
        max_model_len=MAX_LEN,
        max_num_batched_tokens=BUDGET,
        max_num_seqs=max_num_seqs,
    )
    ops = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
    worker = ModelWorker(
        WorkerSettings(
            build_model=lambda: model, ops=ops, device="cpu", dtype="float32", limits=limits
        )
    )
    worker.load()
    return worker


class Engine:
    """A worker over the model behind a real scheduler and a real manager.

    Args:
        num_blocks, num_states: of each pool of that sort, null blocks not counted.
    """

    def __init__(
        self,
        model: HybridLM,
        *,
        num_blocks: int = 200,
        num_states: int = 40,
        overlapped: bool = False,
        caching: bool = True,
        max_num_seqs: int = 8,
    ) -> None:
        self.worker = make_worker(model, max_num_seqs)
        groups = plan_groups(self.worker.kv_specs())
        self.worker.profile()
        config = KVCacheConfig((), groups)
        states = {groups[g].pool for g in state_groups(config)}
        pools = 1 + max(group.pool for group in groups)
        counts = (num_states if pool in states else num_blocks for pool in range(pools))
        self.config = KVCacheConfig(tuple(count + 1 for count in counts), groups)
        self.worker.allocate_cache(self.config)
        self.worker.warm_up()
        self.kv = PagedKVCacheManager(self.config, caching, MAX_LEN, BUDGET)
        self.scheduler = Scheduler(
            SchedulerConfig(max_num_batched_tokens=BUDGET, max_num_seqs=max_num_seqs),
            self.kv, max_model_len=MAX_LEN, async_scheduling=overlapped,
        )  # fmt: skip
        self.overlapped = overlapped
        self.outputs: dict[str, list[int]] = {}
        self.num_preemptions = self.num_cached_tokens = 0

    def generate(self, prompts: Mapping[str, Sequence[int]], count: int) -> dict[str, list[int]]:
        """All at once, greedily."""
        for request_id, prompt in prompts.items():
            self.outputs[request_id] = []
            params = SamplingParams(temperature=0.0, max_tokens=count)
            self.scheduler.add(
                CoreRequest(request_id, list(prompt), params, frozenset(), count, arrival_time=0.0)
            )
        in_flight: deque[Any] = deque()
        while self.scheduler.has_unfinished:
            step = self.scheduler.schedule()
            if step is not None:
                in_flight.append(step)
            if in_flight and (step is None or not self.overlapped or len(in_flight) == 2):
                self._land(in_flight.popleft())
        return {request_id: self.outputs[request_id] for request_id in prompts}

    def _land(self, step: Any) -> None:
        for output in self.scheduler.update(step, self.worker.execute(step)):
            assert output.error is None
            self.outputs[output.request_id] += output.new_token_ids
            if output.finish_reason is not None:
                self.num_preemptions += output.num_preemptions
                self.num_cached_tokens += output.num_cached_tokens
