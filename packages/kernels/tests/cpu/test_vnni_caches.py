"""A VNNI-packed cache gives the bits of a plain one, for every op that touches the cache."""

from __future__ import annotations

from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace_reference as reference
from headrace_core.attention import KVViews
from headrace_core.errors import ConfigError
from headrace_core.ops import HeadNorm
from headrace_core.ops.vnni import can_pack_vnni, vnni_packed
from headrace_kernels.cpu import library
from headrace_kernels.cpu.library import VNNI_ISAS
from headrace_kernels.cpu.ops import native_ops
from headrace_reference.vnni import plain_keys, plain_values

pytestmark = pytest.mark.skipif(
    not set(VNNI_ISAS) & set(library.levels()), reason=f"this machine has none of {VNNI_ISAS}"
)


class Shape(NamedTuple):
    q_heads: int
    kv_heads: int
    dim: int
    block_size: int = 16


SHAPES = [
    Shape(4, 2, 128),
    Shape(8, 2, 64),
    Shape(6, 6, 80),
    Shape(14, 1, 16, 32),
    Shape(5, 1, 256),
    Shape(3, 1, 144, 64),
]


@pytest.fixture(scope="module")
def ops() -> Any:
    return native_ops(library.load(next(isa for isa in VNNI_ISAS if isa in library.levels())))


def empty_cache(shape: Shape, blocks: int) -> KVViews:
    """Plain views of a fresh cache in the memory order (N, 2, Hk, S, D), full of NaN."""
    memory = torch.full(
        (blocks, 2, shape.kv_heads, shape.block_size, shape.dim), torch.nan, dtype=torch.bfloat16
    )
    return KVViews(memory[:, 0].transpose(1, 2), memory[:, 1].transpose(1, 2))


class Step(NamedTuple):
    """Requests with lengths of new and of all tokens, and their blocks."""

    new: list[int]
    seq_lens: list[int]
    table: Tensor
    blocks: int


def step_of(new: list[int], seq_lens: list[int], block_size: int) -> Step:
    widths = [-(-length // block_size) for length in seq_lens]
    blocks = sum(widths) + 3
    ids = torch.randperm(blocks).int()
    table = torch.full((len(new), max(widths)), -7, dtype=torch.int32)
    for row, width in enumerate(widths):
        table[row, :width], ids = ids[:width], ids[width:]
    return Step(new, seq_lens, table, blocks)


def slots_of(step: Step, request: int, first: int, block_size: int) -> Tensor:
    positions = torch.arange(first, step.seq_lens[request])
    return step.table[request][positions // block_size].long() * block_size + positions % block_size


def fill(ops: Any, shape: Shape, step: Step, caches: KVViews, *, poison: bool = False) -> None:
    generator = torch.Generator().manual_seed(3)
    for request, length in enumerate(step.seq_lens):
        keys, values = (
            torch.randn(length, shape.kv_heads, shape.dim, generator=generator).bfloat16()
            for _ in range(2)
        )
        if poison:
            values[-1] = torch.inf
        slots = slots_of(step, request, 0, shape.block_size)
        ops["cache_write"](keys, values, *caches, slots)


def seen_whole(step: Step, *spans: tuple[int, int, int]) -> Tensor:
    """Last keys where positions [first, end) of requests all see each other."""
    positions = [torch.arange(all_ - new, all_) for new, all_ in zip(step.new, step.seq_lens)]
    for b, first, end in spans:
        positions[b][(positions[b] >= first) & (positions[b] < end)] = end - 1
    return torch.cat(positions).int()


def queries(shape: Shape, tokens: int) -> Tensor:
    generator = torch.Generator().manual_seed(5)
    return torch.randn(tokens, shape.q_heads, shape.dim, generator=generator).bfloat16()


def attend(
    ops: Any,
    shape: Shape,
    step: Step,
    caches: KVViews,
    *,
    query: Tensor | None = None,
    **options: Any,
) -> Tensor:
    ends = torch.tensor([0, *step.new]).cumsum(0).int()
    query = queries(shape, int(ends[-1])) if query is None else query
    out: Tensor = ops["paged_attention"](
        query, *caches, step.table, ends, torch.tensor(step.seq_lens, dtype=torch.int32),
        max_seqlen_q=max(step.new), max_seqlen_k=max(step.seq_lens), scale=shape.dim**-0.5,
        **options,
    )  # fmt: skip
    return out


def both(ops: Any, shape: Shape, step: Step, *, poison: bool = False, **options: Any) -> Tensor:
    """Attention over a VNNI-packed cache, which must have the bits of that over a plain one."""
    outs = []
    for order in (KVViews, lambda k, v: vnni_packed(KVViews(k, v))):
        caches = order(*empty_cache(shape, step.blocks))
        fill(ops, shape, step, caches, poison=poison)
        outs.append(attend(ops, shape, step, caches, **options))
    plain, pairs = outs
    assert torch.equal(plain.view(torch.int16), pairs.view(torch.int16))
    return pairs


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize(
    "options",
    [
        {},
        {"sliding_window": 37},
        {"attention_chunk": 37},
        {"soft_cap": 5.0},
        {"sinks": True},
        {"alibi_slopes": True},
        {"prefix": True},
        {"last_keys": True},
        {"last_keys": True, "sliding_window": 137},
    ],
    ids=lambda options: "".join(options) or "plain",
)
def test_attention_has_the_same_bits(ops: Any, shape: Shape, options: dict[str, Any]) -> None:
    options = {
        name: torch.linspace(0.1, 1, shape.q_heads) if value is True else value  # sinks, slopes
        for name, value in options.items()
    }
    if options.pop("prefix", None) is not None:
        always = queries(shape, 2 * 5)[:, : shape.kv_heads].unflatten(0, (2, 5))
        options = {**options, "kv_prefix_key": always[0], "kv_prefix_value": always[1]}
    step = step_of([1, 1, 5, 40, 300, 1, 2], [1, 1100, 70, 40, 555, 513, 516], shape.block_size)
    if "last_keys" in options:
        options = {
            **options,
            "last_keys": seen_whole(step, (3, 2, 39), (4, 256, 530), (4, 531, 555)),
        }
    assert both(ops, shape, step, **options).isfinite().all()


@settings(max_examples=40, deadline=None)
@given(
    lengths=st.lists(st.tuples(st.integers(1, 600), st.integers(1, 600)), min_size=1, max_size=5),
    window=st.none() | st.integers(1, 600),
    shape=st.sampled_from(SHAPES[:4]),
)
def test_attention_has_the_same_bits_for_any_lengths(
    ops: Any, lengths: list[tuple[int, int]], window: int | None, shape: Shape
) -> None:
    step = step_of([min(p) for p in lengths], [max(p) for p in lengths], shape.block_size)
    both(ops, shape, step, sliding_window=window)


@pytest.mark.parametrize("alibi", [False, True])
@pytest.mark.parametrize("shape", [SHAPES[0], SHAPES[3], Shape(1, 1, 16)], ids=str)
def test_shared_prefixes_have_the_same_bits(ops: Any, shape: Shape, alibi: bool) -> None:
    """More requests than one unit takes; some share one partition, some two, some none."""
    options = {"alibi_slopes": torch.linspace(0.1, 1, shape.q_heads)} if alibi else {}
    lengths = [1100 + i for i in range(140)] + [530] * 130 + [520, 300, 1]
    step = step_of([1] * len(lengths), lengths, shape.block_size)
    for b in range(len(lengths)):
        whole = lengths[b] // 512 * 512 // shape.block_size
        if b % 50:
            step.table[b, :whole] = step.table[0, :whole]
    together = both(ops, shape, step, **options)
    caches = vnni_packed(empty_cache(shape, step.blocks))
    fill(ops, shape, step, caches)
    for b in (0, 1, 49, 50, 127, 128, 139, 140, 269, 270, 272):
        alone = step_of([1], [lengths[b]], shape.block_size)._replace(table=step.table[b : b + 1])
        query = queries(shape, len(lengths))[b : b + 1]
        out = attend(ops, shape, alone, caches, query=query, **options)
        assert torch.equal(out[0], together[b]), b


@pytest.mark.parametrize("new", [1, 3, 40])
def test_values_that_are_not_finite_reach_only_who_sees_them(ops: Any, new: int) -> None:
    out = both(ops, SHAPES[0], step_of([new, 1], [333, 90], 16), poison=True)
    assert out[: new - 1].isfinite().all()
    assert not out[new - 1].isfinite().any()


def test_long_single_streams_are_split(ops: Any) -> None:
    both(ops, SHAPES[0], step_of([1], [9000], 16))


def test_it_is_what_the_reference_says(ops: Any) -> None:
    shape, step = SHAPES[0], step_of([1, 20], [200, 77], 16)
    caches = vnni_packed(empty_cache(shape, step.blocks))
    fill(ops, shape, step, caches)
    expected = attend({"paged_attention": reference.paged_attention}, shape, step, caches)
    torch.testing.assert_close(attend(ops, shape, step, caches), expected, atol=2e-2, rtol=2e-2)


@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_writes_what_the_reference_writes(ops: Any, shape: Shape) -> None:
    slots = torch.randperm(4 * shape.block_size)[:21]
    slots[4] = -1
    key, value = (torch.randn(21, shape.kv_heads, shape.dim).bfloat16() for _ in range(2))
    mine, expected = vnni_packed(empty_cache(shape, 4)), vnni_packed(empty_cache(shape, 4))
    plain = empty_cache(shape, 4)
    ops["cache_write"](key, value, *mine, slots)
    reference.cache_write(key, value, *expected, slots)
    reference.cache_write(key, value, *plain, slots)
    for ours, theirs in zip(mine, expected, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.view(torch.int16))
    for ours, theirs in zip((plain_keys(mine[0]), plain_values(mine[1])), plain, strict=True):
        assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_rotary_cache_write_has_the_same_bits(ops: Any) -> None:
    shape = SHAPES[0]
    norm = HeadNorm(*(torch.rand(shape.dim).bfloat16() for _ in range(2)), eps=1e-6)
    cos_sin, slots, positions = torch.randn(60, 128), torch.randperm(64)[:9], torch.arange(9)
    plain, pairs = empty_cache(shape, 4), empty_cache(shape, 4)
    for caches in (plain, vnni_packed(pairs)):
        torch.manual_seed(1)
        query, key, value = (torch.randn(9, h, shape.dim).bfloat16() for h in (4, 2, 2))
        ops["rotary_cache_write"](
            query, key, value, positions, cos_sin, *caches, slots, head_norm=norm
        )
    for ours, theirs in zip(
        (plain_keys(vnni_packed(pairs)[0]), plain_values(vnni_packed(pairs)[1])), plain, strict=True
    ):
        assert torch.equal(ours.view(torch.int16), theirs.contiguous().view(torch.int16))


def test_only_what_is_pairable_is_paired() -> None:
    assert can_pack_vnni(empty_cache(SHAPES[0], 2))
    assert not can_pack_vnni(empty_cache(Shape(1, 1, 24), 2))
    assert not can_pack_vnni(empty_cache(Shape(1, 1, 32, 8), 2))
    assert not can_pack_vnni(KVViews(*(v.float() for v in empty_cache(SHAPES[0], 2))))
    assert not can_pack_vnni(KVViews(*(v.contiguous() for v in empty_cache(SHAPES[0], 2))))


def test_other_instruction_sets_refuse_paired_caches() -> None:
    portable = native_ops(library.load("portable"))
    key = torch.zeros(1, 2, 128, dtype=torch.bfloat16)
    with pytest.raises(ConfigError, match=r"avx512_bf16.*not portable"):
        portable["cache_write"](
            key, key, *vnni_packed(empty_cache(SHAPES[0], 2)), torch.zeros(1).long()
        )
