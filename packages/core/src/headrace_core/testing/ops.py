"""The tests that an implementation of core's ops inherits.

Subclass :class:`OpConformance`, say which provider, device and dtypes, and pytest does the rest::

    class TestMyKernels(OpConformance):
        device = "cpu"
        dtypes = ("float32", "bfloat16")

        @pytest.fixture
        def provider(self):
            return PROVIDER

Every op that the provider has is compared with :mod:`headrace_core.reference` computed in float64
from the same inputs. If the provider claims row invariance, that is tested bit for bit. Ops that it
lacks are skipped. What an op must not look at (unowned cache slots, skipped tokens) is poisoned
with NaN.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core import reference
from headrace_core.errors import WeightsError
from headrace_core.ops import (
    ACTIVATIONS,
    ONE_BYTE_CACHES,
    QUANT_ACTIVATIONS,
    HeadNorm,
    KernelNeed,
    KernelProvider,
    QuantizedWeight,
    Rounding,
)
from headrace_core.reference.cache import stored
from headrace_core.reference.quantized import dequantized, quantize_rows
from headrace_core.reference.rounding import rounded

TOLERANCES: Mapping[str, float] = {"float32": 1e-5, "float16": 2e-3, "bfloat16": 1.5e-2}
"""Absolute and relative, against float64 (ATTN-REF)."""

ROWS = (0, 1, 2, 3, 7, 33)
WIDTHS = (1, 8, 40, 64, 100, 257)
BATCHES = (2, 3, 5, 6, 7, 8, 13, 16, 17, 33, 70)
"""Numbers of rows among which a row must not change a bit."""


def rand(*shape: int, dtype: str = "float32", device: str = "cpu", seed: int = 0) -> Tensor:
    """Standard normal values, the same on every device."""
    generator = torch.Generator().manual_seed(seed + sum(shape))
    return torch.randn(shape, generator=generator).to(getattr(torch, dtype)).to(device)


def wide(value: Any) -> Any:
    """Floating tensors as float64 on the CPU, everything else on the CPU as it is."""
    if isinstance(value, Tensor):
        value = value.detach().cpu()
        return value.double() if value.is_floating_point() else value
    if isinstance(value, HeadNorm):
        return replace(
            value, query_weight=wide(value.query_weight), key_weight=wide(value.key_weight)
        )
    return value


def call_wide(op: Callable[..., Any], *args: Any, **options: Any) -> Any:
    """``op`` on :func:`wide` versions of its arguments."""
    return op(*map(wide, args), **{name: wide(value) for name, value in options.items()})


def bits_equal(a: Tensor, b: Tensor) -> bool:
    """Same shape, dtype and bits (NaN equals NaN, 0 differs from -0)."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    as_int = {1: torch.uint8, 4: torch.int32, 2: torch.int16, 8: torch.int64}[a.element_size()]
    return torch.equal(a.contiguous().view(as_int), b.contiguous().view(as_int))


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
        )

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
    **options: Any,
) -> PagedCase:
    """A batch of (new tokens, context length) requests over scattered blocks.

    Slots that no request owns are NaN, blocks that a sliding window has passed are the null block,
    and the query is a slice of a fused projection. layout: ``NHD``, ``HND`` or ``pair`` (keys and
    values of a block side by side). cache_dtype: one of ``ONE_BYTE_CACHES``, filled with what
    is stored under ``k_scale`` and ``v_scale`` of the options.
    """
    window = options.get("sliding_window") or 0
    blocks_of = [-(-seq_len // block_size) for _, seq_len in lengths]
    num_blocks = sum(blocks_of) + 2
    caches = _empty_caches(num_blocks, block_size, num_kv_heads, head_dim, layout, dtype)
    order = torch.randperm(num_blocks - 1, generator=torch.Generator().manual_seed(seed)) + 1
    table = torch.zeros(len(lengths), max([1, *blocks_of]) + 1, dtype=torch.int32)
    taken = 0
    for b, (num_new, seq_len) in enumerate(lengths):
        first_seen = max(0, seq_len - num_new - window + 1) if window > 0 else 0
        for column in range(first_seen // block_size, blocks_of[b]):
            block = int(order[taken])
            taken += 1
            table[b, column] = block
            filled = min(block_size, seq_len - column * block_size)
            content = rand(2, filled, num_kv_heads, head_dim, dtype=dtype, seed=seed + block)
            caches[0][block, :filled], caches[1][block, :filled] = content[0], content[1]
    if cache_dtype is not None:
        scales = (options.get("k_scale"), options.get("v_scale"))
        small = _empty_caches(num_blocks, block_size, num_kv_heads, head_dim, layout, cache_dtype)
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
    return PagedCase(
        query=query,
        key_cache=_moved(caches[0], device),
        value_cache=_moved(caches[1], device),
        block_table=table.to(device),
        cu_seqlens_q=torch.tensor(starts, dtype=torch.int32, device=device),
        seq_lens=torch.tensor(seq_lens, dtype=torch.int32, device=device),
        options={"scale": head_dim**-0.5, **options},
    )


def _empty_caches(
    num_blocks: int, block_size: int, heads: int, dim: int, layout: str, dtype: str
) -> tuple[Tensor, Tensor]:
    torch_dtype = getattr(torch, dtype)
    if dtype == "int8":  # has no NaN
        shorts = _empty_caches(num_blocks, block_size, heads, dim, layout, "float32")
        return tuple(cache.nan_to_num(99.0).to(torch_dtype) for cache in shorts)  # type: ignore[return-value]
    if layout == "NHD":
        both = torch.full((2, num_blocks, block_size, heads, dim), torch.nan, dtype=torch_dtype)
        return both[0], both[1]
    if layout == "HND":
        both = torch.full((2, num_blocks, heads, block_size, dim), torch.nan, dtype=torch_dtype)
        return both[0].transpose(1, 2), both[1].transpose(1, 2)
    both = torch.full((num_blocks, 2, block_size, heads, dim), torch.nan, dtype=torch_dtype)
    return both[:, 0], both[:, 1]


def _moved(x: Tensor, device: str) -> Tensor:
    """x on a device, its strides kept."""
    if device == "cpu":
        return x
    out = torch.empty_strided(x.shape, x.stride(), dtype=x.dtype, device=device)
    return out.copy_(x)


class OpConformance:
    """What every kernel provider must pass; see the module's docstring."""

    device: ClassVar[str] = "cpu"
    dtypes: ClassVar[Sequence[str]] = ("float32", "bfloat16", "float16")
    tolerances: ClassVar[Mapping[str, float]] = TOLERANCES
    cache_dtypes: ClassVar[Sequence[str]] = ONE_BYTE_CACHES
    """Caches of one byte a value that the provider serves."""

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        if name not in self.dtypes:
            pytest.skip(f"{name} is not among this class's dtypes")
        return name

    @pytest.fixture(params=ONE_BYTE_CACHES)
    def cache_dtype(self, request: pytest.FixtureRequest) -> str:
        name: str = request.param
        if name not in self.cache_dtypes:
            pytest.skip(f"caches of {name} are not among this class's")
        return name

    @pytest.fixture
    def op(self, provider: KernelProvider, dtype: str) -> Callable[[str], Any]:
        """Looks up an op by name; skips the test if the provider lacks it."""
        need = KernelNeed(device=self.device, dtype=dtype)
        reasons = provider.refuse(need)
        if reasons:
            pytest.skip(f"{provider.name} refuses: {'; '.join(reasons)}")
        operations = provider.operations(need)

        def look_up(name: str) -> Any:
            if name not in operations:
                pytest.skip(f"{provider.name} has no {name}")
            return operations[name]

        return look_up

    @pytest.fixture
    def invariant_op(
        self, provider: KernelProvider, dtype: str, op: Callable[[str], Any]
    ) -> Callable[[str], Any]:
        """As ``op``; skips the test if the provider does not claim row invariance."""
        if not provider.row_invariant(KernelNeed(device=self.device, dtype=dtype)):
            pytest.skip(f"{provider.name} does not claim row invariance")
        return op

    def rand(self, *shape: int, dtype: str = "float32", seed: int = 0) -> Tensor:
        return rand(*shape, dtype=dtype, device=self.device, seed=seed)

    def check(self, actual: Tensor, expected: Tensor, dtype: str) -> None:
        """actual has this dtype and device and is within tolerance of the float64 expectation."""
        assert str(actual.dtype) == f"torch.{dtype}"
        assert actual.device.type == self.device
        assert actual.shape == expected.shape
        tolerance = self.tolerances[dtype]
        torch.testing.assert_close(
            actual.cpu().double(), expected.double(), rtol=tolerance, atol=tolerance
        )

    def check_rows(self, x: Tensor, run: Callable[[Tensor], Tensor], what: str = "") -> None:
        """run(x)'s rows do not depend, in one bit, on their number or place."""
        alone = torch.cat([run(x[i : i + 1]) for i in range(x.shape[0])])
        for batch in BATCHES:
            assert bits_equal(run(x[:batch]), alone[:batch]), f"{what} differs among {batch} rows"
        backwards = torch.arange(x.shape[0] - 1, -1, -1, device=x.device)
        assert bits_equal(run(x[backwards]), alone[backwards]), f"{what} differs by place"

    # --- one row at a time --------------------------------------------------------------------

    @pytest.mark.parametrize("rows", ROWS)
    def test_embedding(self, op: Callable[[str], Any], dtype: str, rows: int) -> None:
        weight = self.rand(11, 24, dtype=dtype)
        ids = (torch.arange(rows) * 7 % 11).to(self.device)
        out = op("embedding")(ids, weight)
        assert bits_equal(out, weight[ids])

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_rms_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, offset: float
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype)
            out = op("rms_norm")(x, weight, 1e-6, offset=offset)
            expected = call_wide(reference.rms_norm, x, weight, 1e-6, offset=offset)
            self.check(out, expected, dtype)

    def test_rms_norm_of_heads_in_a_fused_projection(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        fused = self.rand(5, 6 * 40, dtype=dtype)
        heads = torch.unflatten(fused[:, 80:200], 1, (3, 40))
        weight = self.rand(40, dtype=dtype)
        before = fused.clone()
        out = op("rms_norm")(heads, weight, 1e-6)
        self.check(out, call_wide(reference.rms_norm, heads, weight, 1e-6), dtype)
        assert bits_equal(fused, before)

    def test_rms_norm_leaves_small_rows_to_eps(self, op: Callable[[str], Any], dtype: str) -> None:
        x = self.rand(2, 64, dtype=dtype) * 1e-3
        weight = self.rand(64, dtype=dtype)
        out = op("rms_norm")(x, weight, 1e-2)
        self.check(out, call_wide(reference.rms_norm, x, weight, 1e-2), dtype)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_add_rms_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, offset: float
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype)
            residual = self.rand(rows, width, dtype=dtype, seed=2)
            total = x + residual
            out, kept = op("add_rms_norm")(x, residual, weight, 1e-6, offset=offset)
            expected = call_wide(reference.rms_norm, total, weight, 1e-6, offset=offset)
            assert bits_equal(kept, total)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("biased", [False, True])
    def test_layer_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, biased: bool
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        bias = self.rand(width, dtype=dtype, seed=2) if biased else None
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype) + 3
            out = op("layer_norm")(x, weight, bias, 1e-5)
            expected = call_wide(reference.layer_norm, x, weight, bias, 1e-5)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_activation(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        for shape in [(0, 5), (1, 1), (3, 257), (2, 3, 7)]:
            x = self.rand(*shape, dtype=dtype) * 4
            out = op("activation")(x, kind)
            self.check(out, call_wide(reference.activation, x, kind), dtype)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_activation_over_its_whole_range(
        self, op: Callable[[str], Any], dtype: str, kind: str
    ) -> None:
        limit = 60.0 if kind == "relu2" else 200.0
        x = torch.linspace(-limit, limit, 4001).to(getattr(torch, dtype)).to(self.device)
        out = op("activation")(x, kind)
        self.check(out, call_wide(reference.activation, x, kind), dtype)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_activation_and_mul(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        for rows, width in [(0, 8), (1, 1), (1, 100), (3, 257), (33, 64)]:
            x = self.rand(rows, 2 * width, dtype=dtype)
            out = op("activation_and_mul")(x, kind)
            self.check(out, call_wide(reference.activation_and_mul, x, kind), dtype)

    def test_activation_and_mul_of_a_slice(self, op: Callable[[str], Any], dtype: str) -> None:
        x = self.rand(5, 100, dtype=dtype)[:, 6:86]
        out = op("activation_and_mul")(x, "silu")
        self.check(out, call_wide(reference.activation_and_mul, x, "silu"), dtype)

    @pytest.mark.parametrize("width", [*WIDTHS, 5000])
    def test_add_and_scale(self, op: Callable[[str], Any], dtype: str, width: int) -> None:
        for rows in ROWS:
            x, y = self.rand(rows, width, dtype=dtype), self.rand(rows, width, dtype=dtype, seed=1)
            assert bits_equal(op("add")(x, y), x + y)
            scaled = (x.float() * 5.65625).to(x.dtype)
            assert bits_equal(op("scale")(x, 5.65625), scaled)

    def test_add_and_scale_of_slices(self, op: Callable[[str], Any], dtype: str) -> None:
        x, y = self.rand(5, 100, dtype=dtype)[:, 6:86], self.rand(10, 80, dtype=dtype)[::2]
        assert bits_equal(op("add")(x, y), x + y)
        assert bits_equal(op("scale")(x, 2.0), x * 2)

    @pytest.mark.parametrize("soft_cap", [0.0, 30.0])
    def test_to_float32(self, op: Callable[[str], Any], dtype: str, soft_cap: float) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (2, 5000)]:
            x = self.rand(rows, width, dtype=dtype) * 40
            out = op("to_float32")(x, soft_cap=soft_cap)
            self.check(out, call_wide(reference.to_float32, x, soft_cap=soft_cap), "float32")
            if not soft_cap:
                assert bits_equal(out, x.float())

    @pytest.mark.parametrize("renormalise", [False, True])
    @pytest.mark.parametrize(("experts", "k"), [(1, 1), (4, 2), (8, 8), (60, 4), (128, 8)])
    def test_topk_softmax(
        self, op: Callable[[str], Any], dtype: str, experts: int, k: int, renormalise: bool
    ) -> None:
        for rows in ROWS:
            x = self.rand(rows, experts, dtype=dtype) * 4
            weights, ids = op("topk_softmax")(x, k, renormalise=renormalise)
            expected, chosen = call_wide(reference.topk_softmax, x, k, renormalise=renormalise)
            self.check(weights, expected, "float32")
            assert torch.equal(ids.cpu(), chosen)

    def test_topk_softmax_of_equal_scores(self, op: Callable[[str], Any], dtype: str) -> None:
        x = torch.zeros(2, 9, dtype=getattr(torch, dtype), device=self.device)
        x[1, 7] = 1
        _, ids = op("topk_softmax")(x, 3, renormalise=True)
        assert ids.tolist() == [[0, 1, 2], [7, 0, 1]]

    def test_topk_softmax_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run = invariant_op("topk_softmax")
        x = self.rand(70, 60, dtype=dtype)
        self.check_rows(x, lambda rows: run(rows, 4, renormalise=False)[0], "topk_softmax")

    def test_rowwise_ops_are_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        weight, bias = self.rand(100, dtype=dtype), self.rand(100, dtype=dtype, seed=1)
        x = self.rand(70, 100, dtype=dtype)
        for name, arguments in [
            ("rms_norm", (weight, 1e-6)),
            ("layer_norm", (weight, bias, 1e-5)),
            ("activation_and_mul", ("silu",)),
            ("activation", ("gelu",)),
            ("activation", ("gelu_tanh",)),
            ("scale", (0.3,)),
            ("to_float32", ()),
        ]:
            run = invariant_op(name)
            self.check_rows(x, lambda rows, run=run, rest=arguments: run(rows, *rest), name)  # type: ignore[misc]
        add = invariant_op("add_rms_norm")
        self.check_rows(
            x, lambda rows: add(rows.clone(), rows.clone(), weight, 1e-6)[0], "add_rms_norm"
        )

    # --- linear layers ------------------------------------------------------------------------

    SHAPES: ClassVar = [(1, 1), (16, 16), (33, 17), (64, 100), (130, 64), (257, 1000), (96, 513)]
    """(N, K)."""

    @pytest.mark.parametrize(("features", "inputs"), SHAPES)
    @pytest.mark.parametrize("biased", [False, True])
    def test_linear(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int, biased: bool
    ) -> None:
        linear = op("linear")
        weight = self.rand(features, inputs, dtype=dtype) * inputs**-0.5
        bias = self.rand(features, dtype=dtype) if biased else None
        packed = linear.pack(weight)
        assert (packed.in_features, packed.out_features) == (inputs, features)
        assert packed.dtype == dtype
        assert packed.num_bytes >= weight.numel() * weight.element_size()
        for rows in (0, 1, 2, 5, 6, 7, 33, 100):
            x = self.rand(rows, inputs, dtype=dtype)
            expected = x.cpu().double() @ weight.cpu().double().T
            if bias is not None:
                expected = expected + bias.cpu().double()
            self.check(linear(x, packed, bias), expected, dtype)

    def test_linear_of_strided_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("linear")
        weight = self.rand(40, 64, dtype=dtype) / 8
        x = self.rand(9, 100, dtype=dtype)[::2, 20:84]
        expected = x.cpu().double() @ weight.cpu().double().T
        self.check(linear(x, linear.pack(weight)), expected, dtype)

    def test_packing_keeps_every_weight(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("linear")
        weight = self.rand(67, 35, dtype=dtype)
        unit = torch.eye(35, dtype=weight.dtype, device=self.device)
        assert torch.equal(linear(unit, linear.pack(weight)), weight.T)

    @pytest.mark.parametrize(("features", "inputs"), SHAPES)
    def test_rows_of_a_packed_weight(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        linear = op("linear")
        weight = self.rand(features, inputs, dtype=dtype)
        packed = linear.pack(weight)
        every = torch.arange(features, device=self.device)
        assert torch.equal(linear.rows(every, packed), weight)
        some = torch.tensor([features - 1, 0, features // 2], device=self.device)
        assert torch.equal(linear.rows(some[:2], packed), weight[some[:2]])
        assert linear.rows(some[:0], packed).shape == (0, inputs)

    def test_packing_that_copies_lets_the_weight_go(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = op("linear")
        weight = self.rand(67, 35, dtype=dtype)
        kept = weight.clone()
        packed = linear.pack(weight)
        if linear.pack_copies:
            weight.zero_()
        assert torch.equal(linear.rows(torch.arange(67, device=self.device), packed), kept)

    @pytest.mark.parametrize(("features", "inputs"), [(257, 1000), (33, 17), (64, 2048)])
    def test_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        linear = invariant_op("linear")
        packed = linear.pack(self.rand(features, inputs, dtype=dtype))
        x, bias = self.rand(110, inputs, dtype=dtype), self.rand(features, dtype=dtype)
        self.check_rows(x, lambda rows: linear(rows, packed, bias), "linear")

    GATED_SHAPES: ClassVar = [(2, 1), (64, 33), (130, 64), (128, 64), (384, 1100)]
    """(N, K): gates that end inside whatever an implementation cuts outputs into, and at its ends."""

    def check_gated(self, op: Callable[[str], Any], name: str, packed: Any, x: Tensor) -> None:
        """``gated`` is its two steps, bit for bit, with every activation, with and without bias."""
        linear, two_steps = op(name), op("activation_and_mul")
        bias = self.rand(packed.out_features, dtype=packed.dtype)
        for kind, added in [*((kind, None) for kind in ACTIVATIONS), ("silu", bias)]:
            expected = two_steps(linear(x, packed, added), kind)
            assert bits_equal(linear.gated(x, packed, kind, added), expected), (kind, x.shape)

    @pytest.mark.parametrize(("features", "inputs"), GATED_SHAPES)
    def test_gated_linear(
        self, op: Callable[[str], Any], dtype: str, features: int, inputs: int
    ) -> None:
        packed = op("linear").pack(self.rand(features, inputs, dtype=dtype) * inputs**-0.5)
        for rows in (0, 1, 5, 7, 200):
            self.check_gated(op, "linear", packed, self.rand(rows, inputs, dtype=dtype))
        strided = self.rand(9, inputs + 8, dtype=dtype)[::2, 8:]
        self.check_gated(op, "linear", packed, strided)

    def test_gated_linear_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        linear = invariant_op("linear")
        packed = linear.pack(self.rand(256, 1100, dtype=dtype))
        x, bias = self.rand(110, 1100, dtype=dtype), self.rand(256, dtype=dtype)
        self.check_rows(x, lambda rows: linear.gated(rows, packed, "silu", bias), "gated linear")

    QUANTIZED: ClassVar = [
        (8, None, False),
        (8, 32, False),
        (8, None, True),
        (4, None, False),
        (4, 32, False),
        (4, 32, True),
        (4, 128, True),
        (4, 1024, False),
    ]
    """(bits, group size, zero points)."""

    ROUNDINGS: ClassVar = [Rounding(8), Rounding(4, 32), Rounding(4, 128), Rounding(4, 36)]

    def quantized(
        self, features: int, inputs: int, bits: int, group_size: int | None, has_zeros: bool
    ) -> QuantizedWeight:
        """Every code there is, the extremes too; scales that no 16-bit float holds."""
        low, high = -(2 ** (bits - 1)), 2 ** (bits - 1)
        generator = torch.Generator().manual_seed(features + inputs + bits)
        groups = max(1, -(-inputs // (group_size or inputs)))

        def integers(*shape: int) -> Tensor:
            drawn = torch.randint(low, high, shape, generator=generator)
            return drawn.to(torch.int8).to(self.device)

        scales = (rand(features, groups).abs() + 0.1) / high * inputs**-0.5
        return QuantizedWeight(
            integers(features, inputs),
            scales.to(self.device),
            integers(features, groups) if has_zeros else None,
            bits=bits,
            group_size=group_size,
        )

    @pytest.mark.parametrize(("bits", "group_size", "has_zeros"), QUANTIZED)
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
    ) -> None:
        linear = op("quant_linear")
        for features, inputs in self.SHAPES:
            weight = self.quantized(features, inputs, bits, group_size, has_zeros)
            real = dequantized(weight, torch.float64).cpu()
            packed = linear.pack(weight, dtype, activations=activations)
            assert (packed.in_features, packed.out_features) == (inputs, features)
            assert packed.dtype == dtype
            for rows, biased in ((0, False), (1, True), (2, False), (7, True), (33, False)):
                x = self.rand(rows, inputs, dtype=dtype)
                bias = self.rand(features, dtype=dtype) if biased else None
                entered = x.cpu().double()
                if activations == "int8" and rows:
                    codes, steps = quantize_rows(x.cpu())
                    entered = codes.double() * steps.double()
                expected = entered @ real.T
                if bias is not None:
                    expected = expected + bias.cpu().double()
                self.check(linear(x, packed, bias), expected, dtype)

    @pytest.mark.parametrize(("bits", "group_size", "has_zeros"), QUANTIZED[::2])
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_gated_quant_linear(
        self,
        op: Callable[[str], Any],
        dtype: str,
        activations: str,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
    ) -> None:
        for features, inputs in [(130, 64), (384, 1100)]:
            weight = self.quantized(features, inputs, bits, group_size, has_zeros)
            packed = op("quant_linear").pack(weight, dtype, activations=activations)
            for rows in (0, 1, 7, 130):
                self.check_gated(op, "quant_linear", packed, self.rand(rows, inputs, dtype=dtype))

    def test_quant_linear_sums_integers_exactly(self, op: Callable[[str], Any], dtype: str) -> None:
        """The largest sums that there are, which no shortcut in 16 bits survives."""
        linear = op("quant_linear")
        inputs = 4096
        values = torch.full((3, inputs), -128, dtype=torch.int8)
        values[1] = 127
        values[2, ::2] = 127
        scales = torch.full((3, 1), 1 / inputs, device=self.device)
        packed = linear.pack(
            QuantizedWeight(values.to(self.device), scales), dtype, activations="int8"
        )
        x = torch.ones(2, inputs, dtype=getattr(torch, dtype), device=self.device)
        x[1, 1::2] = -1
        self.check(linear(x, packed), x.cpu().double() @ values.double().T / inputs, dtype)

    def test_quant_linear_of_odd_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        """Rows of zeros give the bias, rows with no number in them give none, others do not mind."""
        linear = op("quant_linear")
        weight = self.quantized(20, 70, 4, 32, True)
        for activations in QUANT_ACTIVATIONS:
            packed = linear.pack(weight, dtype, activations=activations)
            x, bias = self.rand(5, 70, dtype=dtype), self.rand(20, dtype=dtype)
            before = linear(x, packed, bias)
            x[1] = 0
            x[2, 3], x[4, 69] = torch.nan, torch.inf
            out = linear(x, packed, bias)
            assert torch.equal(out[1], bias)
            assert not out[[2, 4]].isfinite().any()
            torch.testing.assert_close(out[[0, 3]], before[[0, 3]])

    def test_quant_linear_of_strided_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        linear = op("quant_linear")
        weight = self.quantized(40, 64, 8, None, False)
        x = self.rand(9, 100, dtype=dtype)[::2, 20:84]
        expected = x.cpu().double() @ dequantized(weight, torch.float64).cpu().T
        packed = linear.pack(weight, dtype, activations="float")
        self.check(linear(x, packed), expected, dtype)

    @pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
    def test_quant_linear_rounds_as_defined(
        self, op: Callable[[str], Any], dtype: str, rounding: Rounding
    ) -> None:
        """Bit for bit what rounding in torch and packing the integers gives."""
        linear = op("quant_linear")
        for rows, inputs in [(1, 1), (70, 200), (33, 333)]:
            weight = self.rand(rows, inputs + 3, dtype=dtype)[:, 1:-2]
            weight[:: rows // 3 + 1] = 0
            weight[rows // 2] *= 1e-3
            whole = rounded(weight.cpu(), rounding)
            integers = replace(
                whole, values=whole.values.to(self.device), scales=whole.scales.to(self.device)
            )
            x = torch.eye(inputs, device=self.device)
            expected = linear(x, linear.pack(integers, "float32", activations="float"))
            packed = linear.round(weight, "float32", rounding, activations="float")
            assert (packed.in_features, packed.out_features) == (inputs, rows)
            assert bits_equal(linear(x, packed), expected)

    @pytest.mark.parametrize("rounding", ROUNDINGS, ids=str)
    @pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf])
    def test_quant_linear_rounds_numbers_only(
        self, op: Callable[[str], Any], dtype: str, rounding: Rounding, bad: float
    ) -> None:
        weight = self.rand(20, 70, dtype=dtype)
        weight[19, 69] = bad
        with pytest.raises(WeightsError, match="infinities or NaN"):
            op("quant_linear").round(weight, dtype, rounding, activations="float")

    @pytest.mark.parametrize(("bits", "group_size", "has_zeros"), QUANTIZED)
    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_quant_linear_is_row_invariant(
        self,
        invariant_op: Callable[[str], Any],
        dtype: str,
        activations: str,
        bits: int,
        group_size: int | None,
        has_zeros: bool,
    ) -> None:
        linear = invariant_op("quant_linear")
        for features, inputs in [(130, 513), (33, 2100)]:
            weight = self.quantized(features, inputs, bits, group_size, has_zeros)
            packed = linear.pack(weight, dtype, activations=activations)
            x, bias = self.rand(110, inputs, dtype=dtype), self.rand(features, dtype=dtype)
            run = functools.partial(linear, packed=packed, bias=bias)
            self.check_rows(x, run, "quant_linear")

    @pytest.mark.parametrize(
        ("experts", "top_k", "hidden", "intermediate"),
        [(1, 1, 16, 16), (4, 2, 40, 24), (8, 3, 64, 33), (16, 4, 100, 130)],
    )
    @pytest.mark.parametrize("kind", ["silu", "gelu_tanh"])
    def test_moe(
        self,
        op: Callable[[str], Any],
        dtype: str,
        experts: int,
        top_k: int,
        hidden: int,
        intermediate: int,
        kind: str,
    ) -> None:
        moe = op("moe")
        gate_up, down = self._experts(experts, hidden, intermediate, dtype)
        packed = moe.pack(gate_up, down)
        for rows in (0, 1, 2, 7, 33):
            x = self.rand(rows, hidden, dtype=dtype)
            weights, ids = self._routing(rows, experts, top_k)
            out = moe(x, packed, weights, ids, kind)
            expected = call_wide(_moe_of, x, gate_up, down, weights, ids, kind)
            self.check(out, expected, dtype)

    def test_moe_with_one_busy_expert_of_many(self, op: Callable[[str], Any], dtype: str) -> None:
        moe = op("moe")
        gate_up, down = self._experts(32, 40, 24, dtype)
        x = self.rand(9, 40, dtype=dtype)
        weights = torch.ones(9, 1, device=self.device)
        ids = torch.full((9, 1), 17, device=self.device)
        out = moe(x, moe.pack(gate_up, down), weights, ids, "silu")
        self.check(out, call_wide(_moe_of, x, gate_up, down, weights, ids, "silu"), dtype)

    def test_moe_is_row_invariant(self, invariant_op: Callable[[str], Any], dtype: str) -> None:
        moe = invariant_op("moe")
        packed = moe.pack(*self._experts(8, 64, 33, dtype))
        x = self.rand(70, 64, dtype=dtype)
        weights, ids = self._routing(70, 8, 3)
        tagged = torch.arange(70, device=self.device)

        def run(rows: Tensor) -> Tensor:
            out: Tensor = moe(x[rows], packed, weights[rows], ids[rows], "silu")
            return out

        self.check_rows(tagged, run, "moe")

    def _experts(
        self, experts: int, hidden: int, intermediate: int, dtype: str
    ) -> tuple[Tensor, Tensor]:
        gate_up = self.rand(experts, 2 * intermediate, hidden, dtype=dtype) * hidden**-0.5
        down = self.rand(experts, hidden, intermediate, dtype=dtype) * intermediate**-0.5
        return gate_up, down

    def _routing(self, rows: int, experts: int, top_k: int) -> tuple[Tensor, Tensor]:
        weights, ids = self.rand(rows, experts, seed=5).softmax(-1).topk(top_k)
        return weights.contiguous(), ids.contiguous()

    # --- rotation and cache -------------------------------------------------------------------

    ROTATIONS: ClassVar = [(64, 64, False), (64, 64, True), (40, 16, False), (24, 6, True),
                           (80, 80, False), (128, 32, False)]  # fmt: skip
    """(D, R, interleaved)."""

    def _cos_sin(self, rotary_dim: int, num_positions: int = 50) -> Tensor:
        inverse = 10000.0 ** (-torch.arange(0, rotary_dim, 2) / rotary_dim)
        angles = torch.arange(num_positions)[:, None] * inverse
        return torch.cat([angles.cos(), angles.sin()], dim=1).to(self.device)

    def _fused(
        self, rows: int, heads: int, kv_heads: int, dim: int, dtype: str
    ) -> tuple[Tensor, Tensor, Tensor]:
        """query, key and value as slices of one projection."""
        fused = self.rand(rows, (heads + 2 * kv_heads) * dim, dtype=dtype)
        parts = torch.split(fused, [heads * dim, kv_heads * dim, kv_heads * dim], dim=1)
        query, key, value = (torch.unflatten(x, 1, (x.shape[1] // dim, dim)) for x in parts)
        return query, key, value

    @pytest.mark.parametrize(("dim", "rotary_dim", "interleaved"), ROTATIONS)
    @pytest.mark.parametrize(("heads", "kv_heads"), [(4, 4), (6, 2), (3, 1)])
    def test_rotary(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        rotary_dim: int,
        interleaved: bool,
        heads: int,
        kv_heads: int,
    ) -> None:
        cos_sin = self._cos_sin(rotary_dim)
        for rows in (0, 1, 7):
            query, key, value = self._fused(rows, heads, kv_heads, dim, dtype)
            positions = (torch.arange(rows) * 11 % 50).to(self.device)
            wide_query, wide_key, before = wide(query), wide(key), value.clone()
            op("rotary")(query, key, positions, cos_sin, interleaved=interleaved)
            call_wide_in_place(
                reference.rotary, wide_query, wide_key, positions, cos_sin, interleaved=interleaved
            )
            self.check(query, wide_query, dtype)
            self.check(key, wide_key, dtype)
            assert bits_equal(value, before), "the neighbour in the fused projection changed"

    @pytest.mark.parametrize("layout", ["NHD", "HND", "pair"])
    @pytest.mark.parametrize("block_size", [1, 8, 16, 32])
    def test_cache_write(
        self, op: Callable[[str], Any], dtype: str, layout: str, block_size: int
    ) -> None:
        for rows in (0, 1, 9):
            _, key, value = self._fused(rows, 4, 2, 24, dtype)
            slots = self._slots(rows, 6 * block_size)
            mine = self._caches(6, block_size, 2, 24, layout, dtype)
            keys, values = mine[0].clone(), mine[1].clone()
            op("cache_write")(key, value, *mine, slots)
            reference.cache_write(key, value, keys, values, slots)
            assert bits_equal(mine[0], keys)
            assert bits_equal(mine[1], values)

    @pytest.mark.spec("KV-QUANT")
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    @pytest.mark.parametrize("scaled", [False, True], ids=["", "scaled"])
    def test_cache_write_of_one_byte(
        self, op: Callable[[str], Any], dtype: str, cache_dtype: str, layout: str, scaled: bool
    ) -> None:
        """Bit for bit what torch's casts give: large, tiny, halfway and non-finite values too."""
        _, key, value = self._fused(9, 4, 2, 24, dtype)
        key *= torch.logspace(-7, 5, 24, dtype=torch.float64).to(key)
        halves = torch.arange(-12, 12, dtype=torch.float64) * 2.0**-10
        value[0] = halves.to(value) + value.new_tensor(1.0)
        value[2] = halves.to(value)
        value[3, 0, :3] = value.new_tensor([torch.inf, -torch.inf, 0.0])
        scales = self._cache_scales(2) if scaled else {}
        slots = self._slots(9, 6 * 8)
        mine = self._caches(6, 8, 2, 24, layout, cache_dtype)
        expected = self._caches(6, 8, 2, 24, layout, cache_dtype)
        op("cache_write")(key, value, *mine, slots, **scales)
        reference.cache_write(key, value, *expected, slots, **scales)
        assert bits_equal(mine[0], expected[0])
        assert bits_equal(mine[1], expected[1])

    def _cache_scales(self, kv_heads: int) -> dict[str, Tensor]:
        """A scale for each head; not powers of two."""
        scale = (torch.arange(kv_heads) + 1) * 0.013
        return {"k_scale": scale.to(self.device), "v_scale": (scale * 1.7).to(self.device)}

    @pytest.mark.parametrize(("dim", "rotary_dim", "interleaved"), ROTATIONS)
    @pytest.mark.parametrize("norm", [None, 0.0, 1.0], ids=["no-norm", "norm", "offset-norm"])
    @pytest.mark.parametrize("layout", ["NHD", "HND"])
    def test_rotary_cache_write(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        rotary_dim: int,
        interleaved: bool,
        norm: float | None,
        layout: str,
    ) -> None:
        cos_sin = self._cos_sin(rotary_dim)
        head_norm = None
        if norm is not None:
            weights = self.rand(2, dim, dtype=dtype, seed=3)
            head_norm = HeadNorm(weights[0], weights[1], eps=1e-6, offset=norm)
        self._check_fused(op, dtype, dim, cos_sin, layout, interleaved, head_norm)

    def test_rotary_cache_write_without_rotation(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        self._check_fused(op, dtype, 40, None, "NHD", False, None)

    def _check_fused(
        self,
        op: Callable[[str], Any],
        dtype: str,
        dim: int,
        cos_sin: Tensor | None,
        layout: str,
        interleaved: bool,
        head_norm: HeadNorm | None,
    ) -> None:
        fused_op = op("rotary_cache_write")
        options = {"interleaved": interleaved, "head_norm": head_norm}
        for rows in (0, 1, 7):
            query, key, value = self._fused(rows, 6, 2, dim, dtype)
            positions = (torch.arange(rows) * 11 % 50).to(self.device)
            slots = self._slots(rows, 6 * 8)
            caches = self._caches(6, 8, 2, dim, layout, dtype)
            expected = [wide(x).clone() for x in (query, key, value, *caches)]
            value_before = value.clone()
            fused_op(query, key, value, positions, cos_sin, *caches, slots, **options)
            call_wide_in_place(
                reference.rotary_cache_write,
                *expected[:3], positions, cos_sin, *expected[3:], slots, **options,
            )  # fmt: skip
            self.check(query, expected[0], dtype)
            assert bits_equal(value, value_before)
            for actual, cache in zip(caches, expected[3:], strict=True):
                assert torch.equal(actual.isnan().cpu(), cache.isnan()), "a wrong slot was written"
                self.check(actual.nan_to_num(), cache.nan_to_num(), dtype)

    def test_rotary_cache_write_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        fused_op, dim = invariant_op("rotary_cache_write"), 40
        weights = self.rand(2, dim, dtype=dtype, seed=3)
        norm = HeadNorm(weights[0], weights[1], eps=1e-6)
        all_rows = self._fused(70, 6, 2, dim, dtype)
        cos_sin = self._cos_sin(dim, 70)

        def run(rows: Tensor) -> Tensor:
            query, key, value = (x[rows].clone() for x in all_rows)
            caches = self._caches(10, 8, 2, dim, "NHD", dtype)
            slots = rows + 8
            fused_op(query, key, value, rows, cos_sin, *caches, slots, head_norm=norm)
            written = [cache.flatten(0, 1)[slots] for cache in caches]
            return torch.cat([query, *written], dim=1)

        self.check_rows(torch.arange(70, device=self.device), run, "rotary_cache_write")

    def _slots(self, rows: int, num_slots: int) -> Tensor:
        """Distinct slots, every third one negative."""
        slots = torch.randperm(max(num_slots, rows), generator=torch.Generator().manual_seed(1))
        slots = slots[:rows]
        slots[slots >= num_slots] = -1
        slots[1::3] = -1
        return slots.to(self.device)

    def _caches(
        self, blocks: int, block_size: int, heads: int, dim: int, layout: str, dtype: str
    ) -> tuple[Tensor, Tensor]:
        caches = _empty_caches(blocks, block_size, heads, dim, layout, dtype)
        return _moved(caches[0], self.device), _moved(caches[1], self.device)

    # --- attention ----------------------------------------------------------------------------

    MIXED: ClassVar = [(1, 1), (1, 70), (5, 5), (17, 90), (3, 35), (1, 16), (1, 129)]
    """(new tokens, context): decode, prefill and chunks together."""

    def paged(self, lengths: Sequence[tuple[int, int]], dtype: str, **options: Any) -> PagedCase:
        return paged_case(lengths, dtype=dtype, device=self.device, **options)

    @pytest.mark.parametrize("block_size", [8, 16, 32])
    @pytest.mark.parametrize("layout", ["NHD", "HND", "pair"])
    def test_paged_attention(
        self, op: Callable[[str], Any], dtype: str, block_size: int, layout: str
    ) -> None:
        case = self.paged(self.MIXED, dtype, block_size=block_size, layout=layout)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize(("heads", "kv_heads"), [(1, 1), (4, 4), (6, 2), (8, 1), (5, 1)])
    @pytest.mark.parametrize("dim", [16, 40, 64, 80, 128])
    def test_paged_attention_heads(
        self, op: Callable[[str], Any], dtype: str, heads: int, kv_heads: int, dim: int
    ) -> None:
        case = self.paged(
            [(1, 40), (9, 20), (1, 3)], dtype, num_heads=heads, num_kv_heads=kv_heads, head_dim=dim
        )
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("window", [0, 1, 5, 16, 33, 1000])
    def test_paged_attention_window(
        self, op: Callable[[str], Any], dtype: str, window: int
    ) -> None:
        case = self.paged([*self.MIXED, (40, 130)], dtype, sliding_window=window)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_window_border(self, op: Callable[[str], Any], dtype: str) -> None:
        """The key at distance W - 1 is seen, the one at W is not."""
        case = self.paged([(1, 40)], dtype, sliding_window=8)
        attention = op("paged_attention")
        before = case.run(attention)
        for distance, seen in [(7, True), (8, False)]:
            place = 39 - distance
            block = int(case.block_table[0, place // 16])
            kept = case.value_cache[block, place % 16].clone()
            case.value_cache[block, place % 16] += 1
            assert bits_equal(case.run(attention), before) != seen
            case.value_cache[block, place % 16] = kept

    @pytest.mark.parametrize("soft_cap", [0.5, 30.0])
    def test_paged_attention_soft_cap(
        self, op: Callable[[str], Any], dtype: str, soft_cap: float
    ) -> None:
        case = self.paged(self.MIXED, dtype, soft_cap=soft_cap)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_soft_cap_of_huge_scores(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.paged([(5, 40)], dtype, soft_cap=20.0, scale=1000.0)
        out = case.run(op("paged_attention"))
        assert torch.isfinite(out).all()
        self.check(out, case.expected(), dtype)

    def test_paged_attention_sinks(self, op: Callable[[str], Any], dtype: str) -> None:
        sinks = self.rand(4) * 2
        case = self.paged(self.MIXED, dtype, sinks=sinks)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_everything_at_once(self, op: Callable[[str], Any], dtype: str) -> None:
        sinks = self.rand(4, dtype=dtype)
        case = self.paged(
            self.MIXED, dtype, sinks=sinks, soft_cap=3.0, sliding_window=20, scale=0.3, head_dim=40
        )
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.spec("KV-QUANT")
    @pytest.mark.parametrize("dim", [40, 64, 128])
    @pytest.mark.parametrize("options", [{}, {"sliding_window": 20, "soft_cap": 3.0}], ids=str)
    def test_paged_attention_over_a_cache_of_one_byte(
        self,
        op: Callable[[str], Any],
        dtype: str,
        cache_dtype: str,
        dim: int,
        options: dict[str, Any],
    ) -> None:
        """Against the reference over the very bytes stored."""
        for scales in ({}, self._cache_scales(2)):
            if cache_dtype == "int8" and not scales:
                options = {**options, "scale": 0.01}
            case = self.paged(
                self.MIXED, dtype, head_dim=dim, cache_dtype=cache_dtype, **options, **scales
            )
            self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_of_nothing(self, op: Callable[[str], Any], dtype: str) -> None:
        case = self.paged([], dtype)
        assert case.run(op("paged_attention")).shape == (0, 4, 64)
        case = self.paged([(0, 5), (2, 7), (0, 0)], dtype)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    def test_paged_attention_that_sees_nothing_is_zero(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        case = self.paged([(3, 20)], dtype)
        short = replace(case, seq_lens=torch.full_like(case.seq_lens, 1))  # positions -2, -1, 0
        out = short.run(op("paged_attention"))
        assert (out[:2] == 0).all()
        self.check(out, short.expected(), dtype)

    OPTIONS: ClassVar = [
        {},
        {"sliding_window": 20},
        {"sliding_window": 70},  # wider than most kernels' tiles
        {"soft_cap": 5.0},
        {"num_heads": 8, "num_kv_heads": 1},
        {"num_heads": 3, "num_kv_heads": 3, "head_dim": 40, "block_size": 8},
    ]

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_paged_attention_does_not_depend_on_the_batch(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention = invariant_op("paged_attention")
        case = self.paged([*self.MIXED, (70, 133), (1, 300)], dtype, **options)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            alone = case.request(b).run(attention)
            assert bits_equal(alone, together[start:end]), f"request {b} differs in the batch"

    LONG: ClassVar = [(1, 1400), (70, 1100), (3, 1030), (1, 513), (40, 40)]

    @pytest.mark.parametrize("options", [{}, {"sliding_window": 600}], ids=str)
    def test_paged_attention_over_a_long_context(
        self, op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        """Kernels may cut a long context into parts; enough rows for every size of tile."""
        case = self.paged(self.LONG, dtype, **options)
        self.check(case.run(op("paged_attention")), case.expected(), dtype)

    @pytest.mark.parametrize("stored_as", [None, *ONE_BYTE_CACHES])
    def test_paged_attention_over_a_long_context_is_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str, stored_as: str | None
    ) -> None:
        """In a batch, alone, in chunks, one by one: the same bits across the parts of a context."""
        if stored_as is not None and stored_as not in self.cache_dtypes:
            pytest.skip(f"caches of {stored_as} are not among this class's")
        attention = invariant_op("paged_attention")
        scales = {} if stored_as is None else self._cache_scales(2)
        case = self.paged(self.LONG, dtype, cache_dtype=stored_as, **scales)
        together = case.run(attention)
        for b in range(len(case.seq_lens)):
            start, end = int(case.cu_seqlens_q[b]), int(case.cu_seqlens_q[b + 1])
            assert bits_equal(case.request(b).run(attention), together[start:end])
            for cut in range(0, end - start, 9):
                row = case.request(b, cut, cut + 1).run(attention)
                assert bits_equal(row, together[start + cut : start + cut + 1])
        parts = [case.request(1, first, last) for first, last in [(0, 5), (5, 29), (29, 70)]]
        in_three = torch.cat([part.run(attention) for part in parts])
        assert bits_equal(in_three, together[1:71]), "chunks change bits"

    def test_paged_attention_looks_at_no_later_value(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        """A value that is not finite reaches only rows that see it."""
        attention = invariant_op("paged_attention")
        case = self.paged([(33, 70), (5, 9), (40, 600)], dtype)
        before = case.run(attention)
        for b, row, last in [(0, 20, 33), (1, 3, 38), (2, 30, 78)]:
            place = int(case.seq_lens[b]) - (last - int(case.cu_seqlens_q[b])) + row
            block = int(case.block_table[b, place // 16])
            case.value_cache[block, place % 16] = torch.inf
            case.key_cache[block, place % 16] = torch.nan
            after, first = case.run(attention), int(case.cu_seqlens_q[b])
            assert bits_equal(after[first : first + row], before[first : first + row])
            assert after[first + row : last].isnan().all()

    @pytest.mark.parametrize("options", OPTIONS, ids=str)
    def test_paged_attention_does_not_depend_on_chunks(
        self, invariant_op: Callable[[str], Any], dtype: str, options: dict[str, Any]
    ) -> None:
        attention = invariant_op("paged_attention")
        case = self.paged([(83, 140)], dtype, **options)
        whole = case.run(attention)
        for cut in (1, 2, 7, 16, 31, 32, 33, 64, 82):
            parts = [case.request(0, 0, cut), case.request(0, cut)]
            in_two = torch.cat([part.run(attention) for part in parts])
            assert bits_equal(in_two, whole), f"a cut after {cut} changes bits"
        one_by_one = [case.request(0, i, i + 1).run(attention) for i in range(83)]
        assert bits_equal(torch.cat(one_by_one), whole), "decode differs from prefill"


def call_wide_in_place(op: Callable[..., Any], *args: Any, **options: Any) -> None:
    """``op`` on the CPU in float64; float64 tensors among the arguments are the very ones given."""
    moved = [x if isinstance(x, Tensor) and x.dtype == torch.float64 else wide(x) for x in args]
    op(*moved, **{name: wide(value) for name, value in options.items()})


def _moe_of(
    x: Tensor, gate_up: Tensor, down: Tensor, weights: Tensor, ids: Tensor, kind: str
) -> Tensor:
    return reference.moe(x, reference.moe.pack(gate_up, down), weights, ids, kind)
