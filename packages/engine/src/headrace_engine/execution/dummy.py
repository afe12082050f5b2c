"""Steps of made-up requests whose results nobody wants: to measure, to settle, to warm up."""

from __future__ import annotations

import dataclasses

import torch

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import NULL_BLOCK, PAD_SLOT, KVCacheConfig
from headrace_core.model import (
    CausalLM,
    SupportsEncoderDecoder,
    SupportsMultiModal,
    SupportsPooling,
)
from headrace_core.multimodal import MediaInput
from headrace_core.pooling import PoolingInfo
from headrace_engine.execution.cache import cross_groups
from headrace_engine.execution.media import embed, encode
from headrace_engine.execution.pooling import pool_once
from headrace_engine.execution.runner import ModelRunner
from headrace_engine.kv.states import state_groups
from headrace_engine.lora.step_adapters import StepAdapters
from headrace_engine.sampling.sampler import Sampler
from headrace_engine.sampling.state import warm_up_batch


class DummySteps:
    """Runs made-up steps on a model; nothing is remembered, and no block is written to.

    Args:
        sampler: of a model that generates.
        pooling: what the model pools, which it must support then; None: it generates.
        max_num_seqs: most requests of a real step.
        max_model_len: longest context.
        cache: that the model's layers are bound to; None: to none yet.
        runner: that prepares batches for their backends; None as long as there is no cache.
        adapters: slots of adapters, which all rows use; None: there are none.
    """

    def __init__(
        self,
        model: CausalLM,
        *,
        sampler: Sampler,
        pooling: PoolingInfo | None,
        max_num_seqs: int,
        max_model_len: int,
        device: torch.device,
        cache: KVCacheConfig | None = None,
        runner: ModelRunner | None = None,
        adapters: StepAdapters | None = None,
    ) -> None:
        self._model = model
        self._sampler = sampler
        self._pooling = pooling
        self._max_num_seqs = max_num_seqs
        self._max_model_len = max_model_len
        self._device = device
        self._cache = cache
        self._runner = runner
        self._adapters = adapters

    def run(self, num_tokens: int, num_seqs: int) -> None:
        """A step of that many tokens, spread over that many requests (more if they would be longer
        than the context); sampled or pooled."""
        # No real step is larger, and no position beyond the context exists in a learned table.
        longest = self._max_model_len
        num_tokens = min(num_tokens, self._max_num_seqs * longest)
        num_seqs = max(min(num_seqs, num_tokens), -(-num_tokens // longest))
        batch = dummy_batch(num_tokens, num_seqs, self._cache, self._device)
        if self._pooling is not None and self._pooling.token_types:
            batch = dataclasses.replace(batch, token_type_ids=torch.zeros_like(batch.input_ids))
        if self._runner is not None:
            batch = self._runner.with_metadata(batch)
        if self._adapters is not None:
            self._adapters.choose_all(batch.num_tokens, batch.num_seqs, slot=0)
        try:
            self._compute(batch)
        finally:
            if self._adapters is not None:
                self._adapters.choose_none()

    def _compute(self, batch: ForwardBatch) -> None:
        if self._pooling is not None:
            assert isinstance(self._model, SupportsPooling)
            pool_once(self._model, batch, self._pooling)
            return
        logits = self._model.compute_logits(self._model.forward(batch))
        self._sampler(logits, warm_up_batch(batch.num_seqs))

    def run_media(self, item: MediaInput) -> None:
        """Encode or embed one item, as the model takes it."""
        if self._adapters is not None:
            self._adapters.choose_media(0)
        try:
            self._compute_media(item)
        finally:
            if self._adapters is not None:
                self._adapters.choose_media(None)

    def _compute_media(self, item: MediaInput) -> None:
        if isinstance(self._model, SupportsEncoderDecoder):
            batch = dummy_batch(1, 1, self._cache, self._device)
            states = encode(self._model, [item], self._device)
            self._model.forward(dataclasses.replace(batch, encoder_states=states))
        elif isinstance(self._model, SupportsMultiModal):
            embed(self._model, [item], self._device)


def dummy_batch(
    num_tokens: int, num_seqs: int, cache: KVCacheConfig | None, device: torch.device
) -> ForwardBatch:
    """Tokens 0 over requests of nearly equal length, each with one encoder state if there are any; all
    block tables, and the states that are left, point at the null block."""
    base, longer = divmod(num_tokens, num_seqs)
    lengths = torch.full((num_seqs,), base, dtype=torch.int32)
    lengths[:longer] += 1
    ends = torch.cumsum(lengths, 0, dtype=torch.int32)
    starts = torch.repeat_interleave(ends - lengths, lengths)
    longest = base + (1 if longer else 0)
    groups: tuple[GroupBatch, ...] = ()
    if cache is not None and cache.groups:
        num_blocks = -(-longest // cache.block_size)
        group = GroupBatch(
            block_table=torch.zeros(num_seqs, num_blocks, dtype=torch.int32, device=device),
            slot_mapping=torch.full((num_tokens,), PAD_SLOT, dtype=torch.int64, device=device),
        )
        cross = GroupBatch(
            block_table=torch.zeros(num_seqs, 1, dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
            seq_lens=torch.ones(num_seqs, dtype=torch.int32, device=device),
            max_seqlen_k=1,
        )
        states = torch.zeros(num_seqs, dtype=torch.int64, device=device)
        recurrent = GroupBatch(
            block_table=torch.zeros(num_seqs, 0, dtype=torch.int32, device=device),
            slot_mapping=torch.zeros(0, dtype=torch.int64, device=device),
            state_in=states - 1,
            state_out=states + NULL_BLOCK,
        )
        special = dict.fromkeys(cross_groups(cache), cross)
        special |= dict.fromkeys(state_groups(cache), recurrent)
        groups = tuple(special.get(g, group) for g in range(len(cache.groups)))
    return ForwardBatch(
        input_ids=torch.zeros(num_tokens, dtype=torch.int64, device=device),
        positions=(torch.arange(num_tokens) - starts).to(device),
        cu_seqlens_q=torch.cat([torch.zeros(1, dtype=torch.int32), ends]).to(device),
        seq_lens=lengths.to(device),
        max_seqlen_q=longest,
        max_seqlen_k=longest,
        groups=groups,
        logits_rows=(ends.long() - 1).to(device),
    )
