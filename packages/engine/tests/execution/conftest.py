"""A tiny model and a tiny attention backend, and the same model computed densely."""

from __future__ import annotations

import dataclasses
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.attention import CHUNKS, SLIDING_WINDOW, AttentionBackend, AttentionLayerSpec
from headrace_core.batch import ForwardBatch
from headrace_core.kv import (
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    SlidingWindowSpec,
)
from headrace_core.model import WeightRule
from headrace_core.multimodal import MediaInput
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.sampling.params import SamplingParams
from headrace_core.step import NewRequest, ScheduledStep, StepResult
from headrace_engine.execution import ModelWorker
from headrace_engine.worker.settings import WorkerLimits, WorkerSettings
from headrace_reference.attention import attend
from headrace_testing.fakes.requests import new_request

for folder in (Path(__file__).parent, Path(__file__).parents[1] / "structured"):
    sys.path.insert(0, str(folder))

VOCAB, HIDDEN, HEADS, KV_HEADS, HEAD_DIM = 37, 16, 4, 2, 4
BLOCK_SIZE = 4
MAX_LEN = 96


class PagedBackend(AttentionBackend):
    """Test-only: straight to the ops."""

    name: ClassVar[str] = "test-paged"
    supported_features = frozenset({SLIDING_WINDOW, CHUNKS})

    def prepare(self, batch: ForwardBatch, group: int) -> ForwardBatch:
        self.prepared = getattr(self, "prepared", 0) + 1
        return batch

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: Tensor,
        key: Tensor | None,
        value: Tensor | None,
        kv_cache: Tensor | None,
        metadata: Any,
    ) -> Tensor:
        if metadata is None:
            return torch.zeros_like(query)
        batch, group = metadata
        where = batch.groups[group]
        caches = self.views(kv_cache)
        if key is not None:
            self.ops.cache_write(key, value, *caches, where.slot_mapping)
        return self.ops.paged_attention(
            query,
            *caches,
            where.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=layer.scale,
            sliding_window=layer.sliding_window,
            **layer.extras,
        )


class BlocksFirst(PagedBackend):
    """The same over another physical order: (N, 2, S, Hk, D)."""

    name = "test-blocks-first"

    def cache_stride_order(self) -> tuple[int, ...]:
        return (1, 0, 2, 3, 4)


class TinyLayer:
    def __init__(
        self, name: str, backend: AttentionBackend, window: int | None, generator: torch.Generator
    ) -> None:
        self.spec = AttentionLayerSpec(
            name, HEADS, KV_HEADS, HEAD_DIM, HEAD_DIM**-0.5, sliding_window=window
        )
        self.kv_spec: KVCacheSpec = (
            FullAttentionSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, "float32")
            if window is None
            else SlidingWindowSpec(BLOCK_SIZE, KV_HEADS, HEAD_DIM, "float32", sliding_window=window)
        )
        self.backend = backend
        self.cache: Tensor | None = None
        self.group = 0
        sizes = (HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM, KV_HEADS * HEAD_DIM)
        self.q, self.k, self.v = (
            torch.randn(HIDDEN, size, generator=generator) * 0.5 for size in sizes
        )

    def bind_cache(self, kv_cache: Tensor | None, group: int) -> None:
        self.cache, self.group = kv_cache, group

    def project(self, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        n = x.shape[0]
        return (
            (x @ self.q).view(n, HEADS, HEAD_DIM),
            (x @ self.k).view(n, KV_HEADS, HEAD_DIM),
            (x @ self.v).view(n, KV_HEADS, HEAD_DIM),
        )

    def __call__(self, x: Tensor, batch: ForwardBatch) -> Tensor:
        metadata = (batch, self.group) if batch.groups else None
        out = self.backend.forward(self.spec, *self.project(x), self.cache, metadata)
        return x + out.reshape(x.shape)

    def dense(self, x: Tensor) -> Tensor:
        q, k, v = self.project(x)
        out = attend(q, k, v, scale=self.spec.scale, sliding_window=self.spec.sliding_window)
        return x + out.reshape(x.shape)


class TinyLM(torch.nn.Module):
    """Embedding, attention layers, output matrix. Positions enter as an added vector.

    ``poison``: a token whose presence as the newest token makes the row's logits NaN.
    """

    weight_rules: ClassVar[Sequence[WeightRule]] = ()

    def __init__(
        self,
        windows: Sequence[int | None] = (None, None),
        backend: type[AttentionBackend] = PagedBackend,
        poison: int | None = None,
    ) -> None:
        super().__init__()
        ops: OpTable = bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"})
        generator = torch.Generator().manual_seed(5)
        self.embed = torch.nn.Parameter(torch.randn(VOCAB, HIDDEN, generator=generator))
        self.place = torch.nn.Parameter(torch.randn(MAX_LEN + 8, HIDDEN, generator=generator))
        self.head = torch.nn.Parameter(torch.randn(HIDDEN, VOCAB, generator=generator))
        one = backend(ops)
        self.layers = [
            TinyLayer(f"layers.{i}", one, window, generator) for i, window in enumerate(windows)
        ]
        self.poison = poison
        self.forwards: list[int] = []
        self.logit_rows: list[int] = []

    def attention_layers(self) -> Mapping[str, TinyLayer]:
        return {layer.spec.name: layer for layer in self.layers}

    def forward(self, batch: ForwardBatch) -> Tensor:
        self.forwards.append(batch.num_tokens)
        x = self.embed[batch.input_ids] + self.place[batch.positions]
        for layer in self.layers:
            x = layer(x, batch)
        if self.poison is not None:
            x = x.masked_fill((batch.input_ids == self.poison)[:, None], torch.nan)
        return x if batch.logits_rows is None else x[batch.logits_rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        self.logit_rows.append(hidden.shape[0])
        return hidden @ self.head

    @torch.no_grad()
    def dense_logits(self, token_ids: Sequence[int]) -> Tensor:
        """[L, V], without cache, pages or batch."""
        ids = torch.tensor(token_ids)
        x = self.embed[ids] + self.place[torch.arange(len(ids))]
        for layer in self.layers:
            x = layer.dense(x)
        return x @ self.head

    def dense_greedy(self, prompt: Sequence[int], count: int) -> list[int]:
        tokens = list(prompt)
        for _ in range(count):
            tokens.append(int(self.dense_logits(tokens)[-1].argmax()))
        return tokens[len(prompt) :]


class Harness:
    """A worker over a TinyLM, and the least of a scheduler: blocks are handed out in order."""

    def __init__(self, model: TinyLM, **settings: Any) -> None:
        self.model = model
        groups = self._groups(model)
        told = WorkerSettings(
            build_model=lambda *slots: model,
            ops=bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"}),
            device="cpu",
            dtype="float32",
            limits=WorkerLimits(
                vocab_size=VOCAB,
                max_model_len=MAX_LEN,
                max_num_batched_tokens=64,
                max_num_seqs=16,
            ),
        )
        self.worker = ModelWorker(dataclasses.replace(told, **settings))
        self.worker.load()
        self.config = KVCacheConfig((400,), groups)
        self.worker.allocate_cache(self.config)
        self.next_block = 1
        self.num_steps = 0
        self.num_blocks: dict[str, int] = {}
        self.encoder_tokens: dict[str, int] = {}
        self.computed: dict[str, int] = {}

    @staticmethod
    def _groups(model: TinyLM) -> tuple[KVCacheGroup, ...]:
        by_spec: dict[KVCacheSpec, list[str]] = {}
        for name, layer in model.attention_layers().items():
            by_spec.setdefault(layer.kv_spec, []).append(name)
        return tuple(KVCacheGroup(tuple(names), spec) for spec, names in by_spec.items())

    def blocks(self, request_id: str, num_tokens: int) -> tuple[list[int], ...]:
        """Enough further blocks for that many tokens, odd ones first so that nothing is in order."""
        have = self.num_blocks.get(request_id, 0)
        need = max(0, -(-num_tokens // BLOCK_SIZE) - have)
        self.num_blocks[request_id] = have + need
        gained = []
        for group in self.config.groups:
            count = need
            if isinstance(group.spec, CrossAttentionSpec):
                count = 0 if have else -(-self.encoder_tokens.get(request_id, 0) // BLOCK_SIZE)
            ids = list(range(self.next_block, self.next_block + count))
            self.next_block += count
            gained.append(ids[1::2] + ids[::2])
        return tuple(gained)

    def new(
        self,
        request_id: str,
        prompt: Sequence[int],
        params: SamplingParams | None = None,
        *,
        output: Sequence[int] = (),
        stop_token_ids: Sequence[int] = (),
        bad_words: Sequence[Sequence[int]] = (),
        first: int | None = None,
        media: Sequence[MediaInput] = (),
    ) -> NewRequest:
        """A request whose first step has ``first`` tokens (default: all); media without a place in
        the prompt are for an encoder."""
        tokens = [*prompt, *output]
        self.num_blocks.pop(request_id, None)
        states = sum(item.num_tokens for item in media if item.offset < 0)
        self.encoder_tokens[request_id] = states
        self.computed[request_id] = 0
        return new_request(
            request_id,
            tokens,
            self.blocks(request_id, len(tokens) if first is None else first),
            params,
            num_prompt_tokens=len(prompt),
            stop_token_ids=stop_token_ids,
            bad_words_token_ids=bad_words,
            media=list(media),
            num_encoder_tokens=states,
        )

    def step(
        self,
        scheduled: Mapping[str, int],
        new: Sequence[NewRequest] = (),
        gone: Sequence[str] = (),
        *,
        allows_late: bool = False,
    ) -> StepResult:
        self.num_steps += 1
        fresh = {request.request_id for request in new}
        grown = {}
        for request_id, count in scheduled.items():
            self.computed[request_id] = self.computed.get(request_id, 0) + count
            if request_id not in fresh:
                grown[request_id] = self.blocks(request_id, self.computed[request_id])
        return self.worker.execute(
            ScheduledStep(
                self.num_steps,
                dict(scheduled),
                new_requests=list(new),
                new_block_ids=grown,
                gone_request_ids=list(gone),
                allows_late=allows_late,
            )
        )

    def generate(self, new: NewRequest, count: int) -> list[int]:
        """Alone, the prompt in one step."""
        known = len(new.token_ids)
        request_id = new.request_id
        tokens = self.step({request_id: known}, [new]).requests[request_id].token_ids
        while len(tokens) < count:
            tokens = tokens + self.step({request_id: 1}).requests[request_id].token_ids
        self.step({}, gone=[request_id])
        return tokens


@pytest.fixture
def tiny() -> SimpleNamespace:
    """The classes of this file."""
    return SimpleNamespace(
        LM=TinyLM,
        Harness=Harness,
        Layer=TinyLayer,
        PagedBackend=PagedBackend,
        BlocksFirst=BlocksFirst,
        VOCAB=VOCAB,
        BLOCK_SIZE=BLOCK_SIZE,
        MAX_LEN=MAX_LEN,
    )


@pytest.fixture
def harness() -> Callable[..., Harness]:
    """``harness(windows=..., backend=..., poison=..., **worker settings)``."""

    def make(
        windows: Sequence[int | None] = (None, None),
        backend: type[AttentionBackend] = PagedBackend,
        poison: int | None = None,
        **settings: Any,
    ) -> Harness:
        return Harness(TinyLM(windows, backend, poison), **settings)

    return make
