"""Paged caches, and calls of attention over them."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

import headrace_reference as reference
from headrace_reference.cache import stored
from headrace_testing.ops.inputs import call_wide, rand


@dataclass(frozen=True)
class PagedCase:
    """Inputs of one paged-attention call, in the order of its parameters."""

    query: Tensor
    key_cache: Tensor
    value_cache: Tensor
    block_table: Tensor
    cu_seqlens_q: Tensor
    seq_lens: Tensor
    options: Mapping[str, Any]

    def run(self, op: Callable[..., Tensor]) -> Tensor:
        return op(*self._arguments(), **self._maxima(), **self.options)

    def expected(self) -> Tensor:
        op = reference.paged_attention
        out: Tensor = call_wide(op, *self._arguments(), **self._maxima(), **self.options)
        return out

    def request(self, b: int, first: int = 0, last: int | None = None) -> PagedCase:
        """Request b alone, or only its new tokens [first, last), as a chunk would bring them."""
        start, end = int(self.cu_seqlens_q[b]), int(self.cu_seqlens_q[b + 1])
        last = end - start if last is None else last
        return replace(
            self,
            query=self.query[start + first : start + last],
            block_table=self.block_table[b : b + 1],
            cu_seqlens_q=self.cu_seqlens_q.new_tensor([0, last - first]),
            seq_lens=self.seq_lens[b : b + 1] - (end - start - last),
            options=self._options_of(start + first, start + last),
        )

    def _options_of(self, start: int, end: int) -> Mapping[str, Any]:
        last_keys = self.options.get("last_keys")
        if last_keys is None:
            return self.options
        return {**self.options, "last_keys": last_keys[start:end]}

    def _arguments(self) -> tuple[Tensor, ...]:
        return (
            self.query,
            self.key_cache,
            self.value_cache,
            self.block_table,
            self.cu_seqlens_q,
            self.seq_lens,
        )

    def _maxima(self) -> dict[str, int]:
        return {
            "max_seqlen_q": int(self.cu_seqlens_q.diff().max()) if len(self.seq_lens) else 0,
            "max_seqlen_k": int(self.seq_lens.max()) if len(self.seq_lens) else 0,
        }


def paged_case(
    lengths: Sequence[tuple[int, int]],
    *,
    dtype: str,
    device: str = "cpu",
    num_heads: int = 4,
    num_kv_heads: int = 2,
    head_dim: int = 64,
    block_size: int = 16,
    layout: str = "NHD",
    seed: int = 0,
    cache_dtype: str | None = None,
    alibi: bool = False,
    prefix: int = 0,
    with_logit_scale: bool = False,
    spans: Sequence[tuple[int, ...]] = (),
    **options: Any,
) -> PagedCase:
    """A batch of (new tokens, context length) requests over scattered blocks.

    Slots that no request owns are NaN, blocks that a window or a chunk has passed are the null block,
    and the query is a slice of a fused projection. layout: ``NHD``, ``HND`` or ``pair`` (keys and
    values of a block side by side). cache_dtype: one of ``ONE_BYTE_CACHES``, filled with what
    is stored under ``k_scale`` and ``v_scale`` of the options. alibi: with a slope for each head;
    with_logit_scale: with one for each position. prefix: so many keys that every token sees. spans: (request,
    first, end), the positions of tokens that see all of each other, as ``last_keys``; (request, first, end,
    first, end, ...), if they have others between them.
    """
    window, chunk = options.get("sliding_window") or 0, options.get("attention_chunk")
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks_of) + 2
    caches = empty_caches(num_blocks, block_size, num_kv_heads, head_dim, layout, dtype)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(lengths), max([1, *blocks_of]) + 1, dtype=torch.int32)
    taken = 0
    for b, (num_new, seq_len) in enumerate(lengths):
        first_seen = max(0, seq_len - num_new - window + 1) if window > 0 else 0
        if chunk is not None:
            first_seen = max(0, seq_len - num_new) // chunk * chunk
        for column in range(first_seen // block_size, blocks_of[b]):
            block = int(order[taken])
            taken += 1
            table[b, column] = block
            filled = min(block_size, seq_len - column * block_size)
            content = rand(2, filled, num_kv_heads, head_dim, dtype=dtype, seed=seed + block)
            caches[0][block, :filled], caches[1][block, :filled] = content[0], content[1]
    if cache_dtype is not None:
        scales = (options.get("k_scale"), options.get("v_scale"))
        small = empty_caches(num_blocks, block_size, num_kv_heads, head_dim, layout, cache_dtype)
        for into, cache, scale in zip(small, caches, scales, strict=True):
            into.copy_(stored(cache, into.dtype, scale))
        caches = small
    tokens = sum(num_new for num_new, _ in lengths)
    fused = rand(tokens, (num_heads + 2 * num_kv_heads) * head_dim, dtype=dtype, seed=seed)
    fused = fused.to(device)
    query = torch.unflatten(fused[:, : num_heads * head_dim], 1, (num_heads, head_dim))
    starts = [0]
    for num_new, _ in lengths:
        starts.append(starts[-1] + num_new)
    seq_lens = [seq_len for _, seq_len in lengths]
    if alibi:
        slopes = torch.tensor([0.7 ** (head + 1) for head in range(num_heads)])
        options = {**options, "alibi_slopes": slopes.to(device)}
    if prefix:
        shape = (2, prefix, num_kv_heads, head_dim)
        always = rand(*shape, dtype=dtype, seed=seed + num_blocks).to(device)
        options = {**options, "kv_prefix_key": always[0], "kv_prefix_value": always[1]}
    if with_logit_scale:
        warmer = 0.5 + rand(max([1, *seq_lens]), device=device, seed=seed).abs()
        options = {**options, "logit_scale": warmer}
    if spans:
        positions = [torch.arange(seq_len - num_new, seq_len) for num_new, seq_len in lengths]
        for b, *bounds in spans:
            own = positions[b].clone()
            for first, end in zip(bounds[::2], bounds[1::2], strict=True):
                positions[b][(own >= first) & (own < end)] = bounds[-1] - 1
        options = {**options, "last_keys": torch.cat(positions).int().to(device)}
    return PagedCase(
        query=query,
        key_cache=moved(caches[0], device),
        value_cache=moved(caches[1], device),
        block_table=table.to(device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        options={"scale": head_dim**-0.5, **options},
    )


def empty_caches(
    num_blocks: int, block_size: int, heads: int, dim: int, layout: str, dtype: str
) -> tuple[Tensor, Tensor]:
    torch_dtype = getattr(torch, dtype)
    if dtype == "int8":  # has no NaN
        shorts = empty_caches(num_blocks, block_size, heads, dim, layout, "float32")
        return tuple(cache.nan_to_num(99.0).to(torch_dtype) for cache in shorts)  # type: ignore[return-value]
    if layout == "NHD":
        both = torch.full((2, num_blocks, block_size, heads, dim), torch.nan, dtype=torch_dtype)
        return both[0], both[1]
    if layout == "HND":
        both = torch.full((2, num_blocks, heads, block_size, dim), torch.nan, dtype=torch_dtype)
        return both[0].transpose(1, 2), both[1].transpose(1, 2)
    both = torch.full((num_blocks, 2, block_size, heads, dim), torch.nan, dtype=torch_dtype)
    return both[:, 0], both[:, 1]


def moved(x: Tensor, device: str) -> Tensor:
    """x on a device, its strides kept."""
    if device == "cpu":
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return out.copy_(x)
