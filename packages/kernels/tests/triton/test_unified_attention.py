"""The unified kernel: core's attention suite, the split variant, tile shapes, invariance."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any, ClassVar

import numpy as np
import pytest
import torch

from headrace_core.attention import (
    FEATURE_TEXTS,
    LOGIT_SCALE,
    MLA,
    SPARSE_TOPK,
    AttentionBackend,
    AttentionLayerSpec,
)
from headrace_core.batch import ForwardBatch
from headrace_core.errors import ConfigError
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_kernels.triton import unified_attention
from headrace_kernels.triton.unified_attention import NUM_SEGMENTS, Plan, make_plan
from headrace_testing.attention.backends import (
    BASIC_CASES,
    AttentionBackendConformance,
    Case,
    World,
    assert_near,
)
from headrace_testing.ops import PagedCase, paged_case

pytestmark = pytest.mark.keep(4, every_value=False)  # interpreted, a case takes up to seconds


class OpBackend(AttentionBackend):
    """Nothing but the ops, so that core's suite of attention backends tests them."""

    name: ClassVar[str] = "op"
    supported_dtypes = ("bfloat16",)  # test_conformance.py has float32; a minute is enough
    supported_features = frozenset(FEATURE_TEXTS) - {MLA, SPARSE_TOPK, LOGIT_SCALE}
    options: ClassVar[dict[str, Any]] = {}

    def prepare(self, batch: ForwardBatch, group: int) -> Any:
        return batch, batch.groups[group]

    def forward(
        self,
        layer: AttentionLayerSpec,
        query: torch.Tensor,
        key: torch.Tensor | None,
        value: torch.Tensor | None,
        kv_cache: torch.Tensor | None,
        metadata: Any,
    ) -> torch.Tensor:
        if kv_cache is None:
            return torch.zeros(query.shape, dtype=query.dtype)
        batch, where = metadata
        caches = self.views(kv_cache)
        if key is not None and value is not None:
            self.ops.cache_write(key, value, *caches, where.slot_mapping)
        window = layer.sliding_window
        return self.ops.paged_attention(
            query,
            *caches,
            where.block_table,
            batch.cu_seqlens_q,
            batch.seq_lens,
            max_seqlen_q=batch.max_seqlen_q,
            max_seqlen_k=batch.max_seqlen_k,
            scale=layer.scale,
            sliding_window=window if window is not None and window > 0 else None,
            **layer.extras,
            **self.options,
        )


@pytest.fixture
def triton_ops(device: str) -> OpTable:
    if device != "cpu":
        pytest.skip("core's attention suite makes its tensors on the cpu; see test_gpu.py")
    return bind_ops(KernelNeed("cpu", "float32"), choose={"*": "reference"} | TRITON)


TRITON = {"paged_attention": "triton", "cache_write": "triton"}


class TestUnified(AttentionBackendConformance):
    backend_class = OpBackend

    @pytest.fixture
    def ops(self, triton_ops: OpTable) -> OpTable:
        return triton_ops


def with_plan(ops: OpTable, plan: Plan) -> OpBackend:
    backend = OpBackend(ops)
    backend.options = {"plan": plan}  # type: ignore[misc]
    return backend


DECODES: dict[str, Case] = {
    "short and long": Case([1, 1], [0, 30], num_kv_heads=1),
    "exactly the segments": Case([1], [NUM_SEGMENTS * 16 - 1], num_kv_heads=1),
    "one more than the segments": Case([1], [NUM_SEGMENTS * 16], num_kv_heads=1),
    "window": Case([1], [100], num_kv_heads=1, sliding_window=40),
    "chunks": Case([1, 1, 1], [100, 39, 40], num_kv_heads=1, chunk=40),
    "alibi": Case([1, 1], [100, 5], num_kv_heads=2, alibi=True),
    "alibi by the root": Case([1], [100], num_kv_heads=2, alibi=True, alibi_sqrt=True),
    "soft cap": Case([1], [100], num_kv_heads=1, soft_cap=5.0),
    "sinks": Case([1, 1], [30, 0], num_kv_heads=1, sinks=True),
    "all": Case([1], [90], sliding_window=40, soft_cap=5.0, sinks=True, head_dim=20),
    "groups of 7": Case([1], [40], num_heads=7, num_kv_heads=1),
}


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("case", DECODES.values(), ids=DECODES.keys())
def test_split_decode(triton_ops: OpTable, case: Case, dtype: str) -> None:
    plan = Plan(
        block_m=16, block_q=16 // (case.num_heads // case.num_kv_heads), tile=16, split=True
    )
    world = World(with_plan(triton_ops, plan), case, dtype)
    split = world.run()
    assert_near(split, world.expected(), dtype)
    one = World(with_plan(triton_ops, plan._replace(split=False)), case, dtype).run()
    assert_near(split, one.double(), dtype)


@pytest.mark.parametrize("split", [True, False], ids=["split", "one"])
def test_padding_of_a_captured_graph_is_zero(triton_ops: OpTable, split: bool) -> None:
    """Requests without new tokens, and rows that belong to no request."""
    world = World(with_plan(triton_ops, Plan(16, 8, 16, split)), Case([1, 1], [40, 5]), "float32")
    batch = world.batch
    group = dataclasses.replace(
        batch.groups[0], block_table=torch.cat([batch.groups[0].block_table] * 2)
    )
    world.batch = dataclasses.replace(
        batch,
        cu_seqlens_q=torch.tensor([0, 1, 2, 2, 2], dtype=torch.int32),
        seq_lens=torch.tensor([41, 6, 0, 0], dtype=torch.int32),
        groups=(group,),
    )
    out = world.run(query=torch.cat([world.query] * 2))
    assert_near(out[:2], world_expected(world), "float32")
    assert out[2:].count_nonzero() == 0


def world_expected(world: World) -> torch.Tensor:
    """The expected rows of the requests that have tokens."""
    fresh = World(world.backend, world.case, "float32")
    return fresh.expected()


@pytest.mark.parametrize("block_m", [16, 32, 128])
@pytest.mark.parametrize("tile", [16, 32, 64])
def test_tile_shapes_change_nothing(triton_ops: OpTable, block_m: int, tile: int) -> None:
    plan = Plan(block_m, block_m // 2, tile, split=False)
    case = Case([1, 40, 3, 17], [12, 0, 50, 20], sliding_window=33)
    world = World(with_plan(triton_ops, plan), case, "float32")
    assert_near(world.run(), world.expected(), "float32")


def test_no_tokens(triton_ops: OpTable) -> None:
    cache = torch.zeros(2, 8, 2, 16)
    out = triton_ops.paged_attention(
        torch.zeros(0, 4, 16),
        cache,
        cache,
        torch.zeros(0, 1, dtype=torch.int32),
        torch.zeros(1, dtype=torch.int32),
        torch.zeros(0, dtype=torch.int32),
        max_seqlen_q=0,
        max_seqlen_k=0,
        scale=1.0,
    )
    assert out.shape == (0, 4, 16)


@pytest.fixture
def row_wise_dot(monkeypatch: pytest.MonkeyPatch) -> None:
    """Make the interpreter's ``tl.dot`` sum each row in one order, as matrix hardware does.

    It uses numpy's matmul, whose bits depend on where in the matrix a row stands.
    """
    from triton.runtime import interpreter

    def create_dot(self: Any, a: Any, b: Any, d: Any, *how: Any) -> Any:
        product = np.einsum("mk,kn->mn", a.data, b.data, dtype=d.data.dtype, optimize=False)
        return interpreter.TensorHandle(product + d.data, d.dtype.scalar)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", create_dot)


@pytest.mark.usefixtures("row_wise_dot")
class TestBatchInvariance:
    """One tile shape and aligned tiles: which other rows there are changes no bit."""

    OPTIONS = pytest.mark.parametrize(
        "options", [{}, {"sliding_window": 9}, {"soft_cap": 5.0}], ids=str
    )

    def attend(self, case: PagedCase) -> torch.Tensor:
        return case.run(functools.partial(unified_attention.paged_attention, batch_invariant=True))

    @OPTIONS
    def test_among_other_requests(self, device: str, options: dict[str, Any]) -> None:
        lengths = [(1, 1), (11, 57), (5, 5), (1, 64), (19, 40)]
        case = paged_case(lengths, dtype="float32", device=device, head_dim=40, **options)
        together = self.attend(case)
        starts = case.cu_seqlens_q.tolist()
        for b in range(len(lengths)):
            assert torch.equal(self.attend(case.request(b)), together[starts[b] : starts[b + 1]])

    @OPTIONS
    def test_in_chunks(self, device: str, options: dict[str, Any]) -> None:
        case = paged_case([(19, 70)], dtype="float32", device=device, head_dim=40, **options)
        whole = self.attend(case)
        for cut in (1, 7, 8, 9, 18):
            parts = [case.request(0, 0, cut), case.request(0, cut)]
            assert torch.equal(torch.cat([self.attend(part) for part in parts]), whole), cut
        one_by_one = [self.attend(case.request(0, i, i + 1)) for i in range(19)]
        assert torch.equal(torch.cat(one_by_one), whole)

    def test_counts_of_all_keys_up_to_a_row_s_own_are_causal(self, device: str) -> None:
        case = paged_case([(19, 70)], dtype="float32", device=device, head_dim=40)
        counts = torch.arange(52, 71, dtype=torch.int32, device=device)
        lse = torch.empty(19, case.query.shape[1], device=device)
        whole = self.attend(case)

        def counted(first: int, last: int) -> tuple[torch.Tensor, torch.Tensor]:
            part, own = case.request(0, first, last), torch.empty_like(lse[first:last])
            part = dataclasses.replace(
                part,
                block_table=case.block_table,  # counts, not lengths, say what rows see
                seq_lens=case.seq_lens,
                options={**part.options, "key_counts": counts[first:last], "lse": own},
            )
            return self.attend(part), own

        together, lse = counted(0, 19)
        assert torch.equal(together, whole)
        for first, last in ((0, 1), (0, 8), (8, 19), (18, 19)):
            out, own = counted(first, last)
            assert torch.equal(out, whole[first:last])
            assert torch.equal(own, lse[first:last])


@pytest.mark.parametrize(("window", "tiles"), [(None, 13), (1, 1), (8, 1), (9, 2), (200, 13)])
def test_tiles_outside_the_window_are_skipped(
    device: str, monkeypatch: pytest.MonkeyPatch, window: int | None, tiles: int
) -> None:
    """A key at 199 with W = 8 needs keys 192 to 199: one tile of 16, not thirteen."""
    if device != "cpu":
        pytest.skip("counts the interpreter's products")
    from triton.runtime import interpreter

    calls: list[None] = []
    create_dot = interpreter.InterpreterBuilder.create_dot

    def counting(*args: Any) -> Any:
        calls.append(None)
        return create_dot(*args)

    monkeypatch.setattr(interpreter.InterpreterBuilder, "create_dot", counting)
    case = paged_case([(1, 200)], dtype="float32", num_kv_heads=1, sliding_window=window)
    case.run(functools.partial(unified_attention.paged_attention, plan=Plan(16, 4, 16, False)))
    assert len(calls) == 2 * tiles  # queries with keys, weights with values


BASE: dict[str, Any] = {
    "group": 4,
    "head_dim": 128,
    "item_bytes": 2,
    "num_seqs": 64,
    "num_kv_heads": 8,
    "max_seqlen_q": 1,
    "max_seqlen_k": 4096,
    "sliding_window": None,
    "num_programs_wanted": 264,
}


@pytest.mark.parametrize(
    ("change", "plan"),
    [
        ({}, Plan(16, 4, 16, False)),
        ({"max_seqlen_q": 7}, Plan(64, 16, 32, False)),
        ({"num_seqs": 4}, Plan(16, 4, 16, True)),
        ({"num_seqs": 4, "max_seqlen_k": 256}, Plan(16, 4, 16, False)),
        ({"num_seqs": 4, "max_seqlen_q": 2}, Plan(64, 16, 32, False)),
        ({"sliding_window": 1024}, Plan(16, 4, 32, False)),
        ({"sliding_window": 1024, "head_dim": 256}, Plan(16, 4, 32, False)),
        ({"sliding_window": 1024, "head_dim": 64}, Plan(16, 4, 16, False)),
        ({"sliding_window": 4096}, Plan(16, 4, 16, False)),
        ({"sliding_window": 2047}, Plan(16, 4, 16, False)),
        ({"group": 7}, Plan(16, 2, 16, False)),
        ({"group": 71}, Plan(128, 1, 16, False)),
        ({"item_bytes": 4, "max_seqlen_q": 7}, Plan(16, 4, 32, False)),
        ({"head_dim": 512, "max_seqlen_q": 7}, Plan(16, 4, 32, False)),
        ({"head_dim": 512, "max_seqlen_q": 7, "item_bytes": 4}, Plan(16, 4, 16, False)),
        ({"batch_invariant": True}, Plan(16, 4, 32, False)),
        ({"batch_invariant": True, "max_seqlen_q": 7}, Plan(16, 4, 32, False)),
        ({"batch_invariant": True, "num_seqs": 1}, Plan(16, 4, 32, False)),
    ],
    ids=str,
)
def test_plans(change: dict[str, Any], plan: Plan) -> None:
    assert make_plan(**(BASE | change)) == plan


@pytest.mark.parametrize("name", ["mixed", "groups of 7"])
def test_the_default_plan_is_used(
    triton_ops: OpTable, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    seen: list[Plan] = []

    def spy(**facts: Any) -> Plan:
        seen.append(make_plan(**facts))
        return seen[-1]

    monkeypatch.setattr(unified_attention, "make_plan", spy)
    World(OpBackend(triton_ops), BASIC_CASES[name], "float32").run()
    assert len(seen) == 1


def test_split_decode_of_counted_keys(device: str) -> None:
    """Counts beyond the keys and of none, and the log-sum-exp, over segments that have no keys, too."""
    case = paged_case([(1, 3), (1, 40), (1, 300), (1, 0), (1, 270)], dtype="float32", device=device)
    counts = torch.tensor([5, 17, 300, 0, 0], dtype=torch.int32, device=device)
    lse, wide = (torch.full(case.query.shape[:2], 7.0, device=device) for _ in range(2))
    options = {**case.options, "key_counts": counts}
    split = functools.partial(unified_attention.paged_attention, plan=Plan(16, 8, 16, split=True))
    out = dataclasses.replace(case, options={**options, "lse": lse}).run(split)
    wide = wide.double().cpu()
    expected = dataclasses.replace(case, options={**options, "lse": wide}).expected()
    torch.testing.assert_close(out.cpu().double(), expected, atol=1e-5, rtol=1e-5)
    torch.testing.assert_close(lse.cpu().double(), wide, atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize(
    ("name", "tensor"),
    [
        ("key_counts", torch.zeros(2, dtype=torch.int64)),
        ("lse", torch.zeros(2, 4, dtype=torch.float64)),
        ("lse", torch.zeros(4, 2).T),
    ],
)
def test_what_is_read_by_address_is_checked(device: str, name: str, tensor: torch.Tensor) -> None:
    case = paged_case([(2, 5)], dtype="float32", device=device)
    wrong = dataclasses.replace(case, options={**case.options, name: tensor.to(device)})
    with pytest.raises(ConfigError, match=f"paged_attention: {name} .*must be"):
        wrong.run(unified_attention.paged_attention)
