"""Packed weights: core's suite for a sample of their kinds, and what the suite does not look at.

Interpreted, the whole suite takes long: test_conformance.py runs it with ``HEADRACE_TESTS=full``, and on a
GPU.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.ops import (
    QUANT_ACTIVATIONS,
    QUANT_BITS,
    KernelProvider,
    PackedLinear,
    QuantizedWeight,
)
from headrace_kernels.triton import quant_linear
from headrace_kernels.triton.provider import PROVIDER, TritonProvider
from headrace_kernels.triton.quant_layout import lay_out
from headrace_kernels.triton.quant_linear import QuantLinear, _round_rows
from headrace_kernels.triton.quant_tiles import INTERPRETED, QuantTile, rows_class, tile_for
from headrace_reference.quantized import dequantized, float8_rows, quantize_rows
from headrace_testing.attention.backends import assert_near
from headrace_testing.ops import bits_equal, rand
from headrace_testing.ops.quantized import WEIGHTS, QuantizedConformance, as_entered
from headrace_testing.ops.weights import KINDS

pytestmark = pytest.mark.keep(6, every_value=False)  # interpreted, a case takes up to seconds

HAS_GPU = torch.cuda.is_available()
DEVICE = "cuda" if HAS_GPU else "cpu"


@pytest.mark.skipif(HAS_GPU, reason="on a GPU test_conformance.py runs the suite")
class TestInterpreted(QuantizedConformance):
    """The suite's long tests have a few kinds each, the others run as they are, in float16."""

    dtypes = ("float16",)

    @pytest.fixture
    def provider(self, device: str) -> TritonProvider:
        return PROVIDER

    def check_gated(self, op: Callable[[str], Any], name: str, packed: Any, x: Tensor) -> None:
        """Many rows with one activation: each product of them takes a second."""
        if len(x) < 100:
            super().check_gated(op, name, packed, x)
            return
        linear, two_steps = op(name), op("activation_and_mul")
        bias = self.rand(packed.out_features, dtype=packed.dtype)
        expected = two_steps(linear(x, packed, bias), "silu")
        assert bits_equal(linear.gated(x, packed, "silu", bias), expected)

    @pytest.mark.parametrize(
        ("dtype", "activations", "kind"),
        [
            ("float32", "float", "int3-128-zeros"),
            ("float32", "int8", "int8-zeros"),
            ("float16", "float", "q4_k"),
            ("float16", "int8", "int4-128-zeros"),
            ("bfloat16", "float", "nf4"),
            ("bfloat16", "int8", "iq4_nl"),
            ("float32", "fp8", "fp8"),
            ("float16", "fp8", "fp8-128"),
        ],
    )
    def test_quant_linear(
        self, op: Callable[[str], Any], dtype: str, activations: str, kind: str
    ) -> None:
        super().test_quant_linear(op, dtype, activations, kind)

    @pytest.mark.parametrize(
        ("dtype", "kind"),
        [
            ("float32", "q5_1"),
            ("float16", "q2_k"),
            ("bfloat16", "fp8-128"),
            ("bfloat16", "int4-1024"),
        ],
    )
    def test_rows_of_quant_linear(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        super().test_rows_of_quant_linear(op, dtype, kind)

    @pytest.mark.parametrize(
        ("dtype", "activations", "kind"),
        [
            ("float32", "int8", "q5_1"),
            ("float16", "float", "nvfp4"),
            ("bfloat16", "int8", "int4-32-zeros"),
            ("float32", "fp8", "mxfp8"),
        ],
    )
    def test_routed_quant_linear(
        self,
        op: Callable[[str], Any],
        provider: KernelProvider,
        dtype: str,
        activations: str,
        kind: str,
    ) -> None:
        super().test_routed_quant_linear(op, provider, dtype, activations, kind)

    @pytest.mark.slow
    @pytest.mark.parametrize(("dtype", "activations", "kind"), [("float32", "float", "fp8")])
    def test_gated_quant_linear(
        self, op: Callable[[str], Any], dtype: str, activations: str, kind: str
    ) -> None:
        super().test_gated_quant_linear(op, dtype, activations, kind)

    # See test_rows_do_not_depend_on_each_other.
    test_quant_linear_is_row_invariant = None

    @pytest.mark.parametrize("activations", QUANT_ACTIVATIONS)
    def test_gated_in_one_pass(
        self, op: Callable[[str], Any], dtype: str, activations: str
    ) -> None:
        """Few rows, whose sums are finished in a step of its own, and more."""
        for kind in ("fp8", "fp8-128") if activations == "fp8" else ("int8", "q4_k"):
            weight = self.quantized(70, 100, kind)
            packed = op("quant_linear").pack(weight, dtype, activations=activations)
            for rows in (0, 3, 5):
                self.check_gated(op, "quant_linear", packed, self.rand(rows, 100, dtype=dtype))


def weight_of(kind: str, outputs: int, inputs: int, seed: int = 0) -> QuantizedWeight:
    return KINDS[kind].draw(outputs, inputs, DEVICE, seed)


def expected(x: Tensor, weight: QuantizedWeight, activations: str) -> Tensor:
    """The product in float64."""
    return as_entered(x, activations) @ dequantized(weight, torch.float64).cpu().T


def check(
    weight: QuantizedWeight,
    dtype: str,
    activations: str,
    rows: tuple[int, ...] = (2, 5),
    op: QuantLinear | None = None,
) -> PackedLinear:
    """Products with so many rows, and rows of the weight."""
    op = op or QuantLinear()
    packed = op.pack(weight, dtype, activations=activations)
    outputs, inputs = weight.values.shape
    for count in rows:
        x = rand(count, inputs, dtype=dtype, device=DEVICE)
        assert_near(op(x, packed), expected(x, weight, activations), dtype)
    ids = torch.tensor([outputs - 1, 0], device=DEVICE)
    assert_near(op.rows(ids, packed), dequantized(weight, torch.float64)[ids].cpu(), dtype)
    return packed


@pytest.mark.parametrize(("activations", "kind"), WEIGHTS)
def test_every_kind(device: str, kind: str, activations: str) -> None:
    dtype = ("float16", "bfloat16")[[*KINDS].index(kind) % 2]
    check(weight_of(kind, 40, 300), dtype, activations)


STORED_BITS = {"q3_k": 3.4375, "iq4_xs": 4.25}
"""Bits of a weight in a file whose whole scales have 6 bits; others follow from the kind."""
SCALE_BITS = {"any": 32, "half": 16, "power": 8, "e4m3": 8, "signed": 8, "bits6": 6, "bits4": 4}


@pytest.mark.parametrize(("activations", "kind"), WEIGHTS)
def test_memory(kind: str, activations: str) -> None:
    what, inputs = KINDS[kind], 4096
    by_group = SCALE_BITS[what.scales] * (1 + what.has_minimums) + what.bits * what.has_zeros
    by_block = 0 if what.block_size is None else 16 * (1 + what.has_minimums)
    stored = what.bits + by_group / (what.group_size or inputs)
    stored = STORED_BITS.get(kind, stored + by_block / (what.block_size or inputs))
    packed = QuantLinear().pack(weight_of(kind, 64, inputs), "bfloat16", activations=activations)
    assert packed.num_bytes * 8 / (64 * inputs) <= 1.15 * stored


@pytest.mark.parametrize(
    ("activations", "kind"),
    [
        *itertools.product(
            ["int8", "float"],
            ["int8-zeros", "int4-32-zeros", "int3-128-zeros", "q5_1", "q6_k", "fp8"],
        ),
        ("fp8", "fp8"),
        ("fp8", "fp8-128"),
    ],
)
def test_inputs_in_parts(device: str, kind: str, activations: str) -> None:
    """Tiles as small as a GPU's, and sums of parts: of integers they are the same bits."""
    weight = weight_of(kind, 70, 700)
    parts = QuantLinear(tile=QuantTile(16, 32, programs=9))
    packed = check(weight, "float32", activations, (2, 20), parts)
    layout = packed.data.layout
    assert quant_linear._splits(700, 70, layout, QuantTile(16, 32, programs=9))[0] > 1
    if layout.integer and not layout.grouped:
        whole = QuantLinear(tile=QuantTile(16, 32))
        for rows in (2, 20):
            x = rand(rows, 700, device=DEVICE)
            assert bits_equal(parts(x, packed), whole(x, packed))


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize(("group", "block"), [(36, 72), (4, None), (100, None), (48, 96)])
def test_groups_of_odd_sizes(device: str, activations: str, group: int, block: int | None) -> None:
    groups, blocks = -(-150 // group), 1 if block is None else -(-150 // block)
    weight = QuantizedWeight(
        torch.randint(-4, 4, (20, 150), generator=torch.manual_seed(0)).to(torch.int8),
        rand(20, groups) / 40,
        bits=3,
        group_size=group,
        minimums=rand(20, groups, seed=1) / 40,
        block_scales=rand(20, blocks, seed=2),
        block_minimums=rand(20, blocks, seed=3),
        block_size=block,
    )
    names = ("values", "scales", "minimums", "block_scales", "block_minimums")
    moved = {name: getattr(weight, name).to(DEVICE) for name in names}
    check(replace(weight, **moved), "float16", activations)


@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("bits", QUANT_BITS)
def test_tables_of_any_numbers(device: str, bits: int, activations: str) -> None:
    """Beyond what 16 bits hold; and places that are no numbers are not touched."""
    table = rand(1 << bits, device=DEVICE) * 1e6
    table[0] = torch.nan
    codes = torch.randint(1, 1 << bits, (20, 70), generator=torch.manual_seed(0))
    values = (codes - (1 << bits - 1)).to(torch.int8).to(DEVICE)
    scales = torch.full((20, 1), 1e-7, device=DEVICE)
    weight = QuantizedWeight(values, scales, bits=bits, table=table)
    packed = check(weight, "float16", activations)
    assert packed.data.layout.table == "floats"


def test_nan_among_float8(device: str) -> None:
    weight = weight_of("fp8", 3, 40)
    weight.values[1, 7] = -1  # 0x7f
    op = QuantLinear()
    out = op(torch.ones(1, 40, device=DEVICE), op.pack(weight, "float32", activations="float"))
    assert out.isnan().tolist() == [[False, True, False]]


def test_long_sums_of_integers_are_cut(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A row so long that a sum of 32 bits might not hold it."""
    short = functools.partial(lay_out, max_integer_inputs=100)
    monkeypatch.setattr(quant_linear, "lay_out", short)
    packed = check(weight_of("int8-zeros", 20, 300), "float32", "int8")
    assert packed.data.layout.grouped


@pytest.mark.parametrize("kind", ["int8", "int4", "int8-zeros", "int8-32"])
@pytest.mark.parametrize(("rows", "inputs"), [(17, 64), (16, 64), (40, 60)])
def test_integers_of_whole_rows_in_one_product(
    device: str, monkeypatch: pytest.MonkeyPatch, kind: str, rows: int, inputs: int
) -> None:
    """``torch._int_mm``, where it can, gives the bits that the kernel gives."""
    op, weight = QuantLinear(), weight_of(kind, 24, inputs)
    packed = op.pack(weight, "float16", activations="int8")
    x, bias = rand(rows, inputs, dtype="float16", device=DEVICE), torch.ones(24).half().to(DEVICE)
    monkeypatch.setattr(quant_linear, "_multiplies_integers", lambda *_: False)
    kernels = op(x, packed, bias)
    calls = []

    def takes(x: Tensor, layout: Any, outputs: int) -> bool:
        calls.append(quant_linear.int_mm_takes(layout, rows, inputs, outputs))
        return calls[-1]

    monkeypatch.setattr(quant_linear, "_multiplies_integers", takes)
    assert bits_equal(op(x, packed, bias), kernels)
    assert calls == [kind == "int8" and rows == 17]


def test_rounds_rows_as_defined(device: str) -> None:
    x = (
        rand(7, 1500, device=DEVICE)
        * torch.tensor([1e-30, 1e-3, 1, 7, 1e4, 1e30, 1]).to(DEVICE)[:, None]
    )
    x[2] = torch.arange(-750, 750, device=DEVICE) / 2 % 127  # ties
    x[2, 0] = 127
    x[6] = 0
    codes, steps = _round_rows(x)
    wanted, of_rows = quantize_rows(x.cpu())
    assert torch.equal(codes[:, :1500].cpu().float(), wanted)
    assert torch.equal(steps.cpu(), of_rows[:, 0])


def test_rounds_rows_to_float8_as_defined(device: str) -> None:
    """Every number of E4M3, what lies halfway between two of them, and beside that; rows of all sizes."""
    table = torch.arange(127).byte().view(torch.float8_e4m3fn).float()
    between = (table[1:] + table[:-1]) / 2
    above, below = (torch.nextafter(between, torch.tensor(to)) for to in (1e9, -1e9))
    numbers = torch.cat([table, between, above, below, -table, -between, -above, -below])
    sizes = torch.tensor([1.0, 1e-30, 1e-3, 7.0, 1e30, 1e-42, 0.0])
    x = torch.cat([numbers * sizes[:, None], rand(5, len(numbers))]).to(DEVICE)
    codes, steps = _round_rows(x, "fp8")
    wanted, of_rows = float8_rows(x.cpu())
    assert codes.dtype is torch.float8_e4m3fn
    assert torch.equal(codes[:, : x.shape[1]].cpu().float(), wanted)
    assert torch.equal(steps.cpu(), of_rows[:, 0])
    assert torch.equal(wanted[0, :127], table)


def test_a_wrong_step_shows(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def half(*given: Any) -> tuple[Tensor, Tensor]:
        codes, steps = _round_rows(*given)
        return codes, steps / 2

    monkeypatch.setattr(quant_linear, "_round_rows", half)
    with pytest.raises(AssertionError):
        check(weight_of("fp8", 40, 300), "float16", "fp8")


@pytest.mark.parametrize("kind", ["fp8", "fp8-128", "mxfp8", "fp8-16"])
def test_float8_by_float8(device: str, kind: str) -> None:
    """Bytes of weights are those of the format, inputs side by side; groups of 16 are too short for it."""
    group = {"fp8": None, "fp8-128": 128, "mxfp8": 32, "fp8-16": 16}[kind]
    kinds = replace(KINDS["fp8"], group_size=group)
    weight = kinds.draw(70, 300, DEVICE, 3)
    packed = check(weight, "float16", "fp8", (1, 4, 5, 40))
    layout, codes = packed.data.layout, packed.data.tensors.codes
    assert layout.float8 == (kind != "fp8-16")
    if layout.float8:
        assert torch.equal(codes[:, :300], weight.values.view(torch.uint8) ^ 128)
        assert not codes[:, 300:].any()


def test_nan_among_float8_by_float8(device: str) -> None:
    weight = weight_of("fp8", 3, 40)
    weight.values[1, 7] = -1  # 0x7f
    op = QuantLinear()
    for rows in (1, 9):
        x = torch.ones(rows, 40, device=DEVICE)
        out = op(x, op.pack(weight, "float32", activations="fp8"))
        assert out.isnan().tolist() == [[False, True, False]] * rows


@pytest.mark.parametrize(
    ("kind", "rows", "inputs", "outputs", "dtype", "takes"),
    [
        ("fp8", 17, 64, 32, "bfloat16", True),
        ("fp8", 16, 64, 32, "bfloat16", False),
        ("fp8", 17, 64, 32, "float16", False),
        ("fp8", 17, 72, 32, "bfloat16", False),
        ("fp8", 17, 64, 24, "bfloat16", False),
        ("fp8-128", 17, 256, 32, "bfloat16", False),
    ],
)
def test_what_torch_multiplies_in_float8(
    device: str, kind: str, rows: int, inputs: int, outputs: int, dtype: str, takes: bool
) -> None:
    packed = QuantLinear().pack(weight_of(kind, outputs, inputs), dtype, activations="fp8")
    given = packed.data.layout, rows, inputs, outputs, getattr(torch, dtype)
    assert quant_linear.scaled_mm_takes(*given) == takes


def test_float8_in_one_product(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch is given what its product of CUDA takes, and its product of the CPU gives what kernels give."""
    weight = weight_of("fp8", 32, 80)
    op, calls = QuantLinear(), []

    def product(
        x: Tensor, weight: Tensor, of_rows: Tensor, of_outputs: Tensor, **rest: Any
    ) -> Tensor:
        assert (x.stride(1), weight.stride(0)) == (1, 1)
        assert of_rows.is_contiguous()
        assert of_outputs.is_contiguous()
        calls.append(rest)
        return torch._scaled_mm(x, weight, of_rows, of_outputs, **rest)

    packed = op.pack(weight, "bfloat16", activations="fp8")
    bias = rand(32, dtype="bfloat16", device=DEVICE)
    x = rand(20, 80, dtype="bfloat16", device=DEVICE)
    monkeypatch.setattr(quant_linear, "_scaled_mm", product)
    monkeypatch.setattr(
        quant_linear,
        "_multiplies_float8",
        lambda x, *given: quant_linear.scaled_mm_takes(given[0], len(x), *given[1:]),
    )
    assert_near(op(x, packed, bias), expected(x, weight, "fp8") + bias.cpu().double(), "bfloat16")
    gated = op.gated(x, packed, "silu", bias)
    assert bits_equal(gated, quant_linear.activation_and_mul(op(x, packed, bias), "silu"))
    assert [call["out_dtype"] for call in calls] == [torch.bfloat16] * 3
    op = QuantLinear(batch_invariant=True)
    op(x, packed, bias)
    assert len(calls) == 3


def test_rows_in_float8_do_not_depend_on_each_other(device: str) -> None:
    """On request. Products of codes are sums of halves of whole numbers here: exact in any order."""
    op, weight = QuantLinear(batch_invariant=True), weight_of("fp8", 70, 150)
    whole = (torch.randint(-8, 8, (70, 150)).float().to(torch.float8_e4m3fn)).view(torch.int8)
    weight = replace(weight, values=(whole ^ -128).to(DEVICE))
    x = torch.randint(-7, 8, (40, 150)).half().to(DEVICE)
    x[:, 0] = torch.tensor([448.0, 224.0]).repeat(20)
    packed = op.pack(weight, "float16", activations="fp8")
    together = op(x, packed)
    for rows in (slice(3, 4), slice(10, 27)):
        assert bits_equal(op(x[rows], packed), together[rows])
    joined = op.join([packed, packed])
    assert joined is not None
    ids = (torch.arange(40, device=DEVICE) % 2)[:, None]
    assert bits_equal(op.routed(x, joined, ids)[:, 0], together)


@pytest.mark.parametrize("kind", ["int8", "int8-zeros", "int4-32-zeros", "q5_1", "iq4_xs"])
def test_rows_do_not_depend_on_each_other(device: str, kind: str) -> None:
    """On request. Interpreted it shows for integers only: numpy sums floats of a row by its place."""
    op = QuantLinear(batch_invariant=True)
    x = rand(40, 150, dtype="float16", device=DEVICE)
    weight = weight_of(kind, 70, 150)
    packed = op.pack(weight, "float16", activations="int8")
    assert packed.data.layout.integer
    whole = op(x, packed)
    for rows in (slice(3, 4), slice(10, 27)):
        assert bits_equal(op(x[rows], packed), whole[rows])
    joined = op.join([packed, packed])
    assert joined is not None
    ids = (torch.arange(40, device=DEVICE) % 2)[:, None]
    assert bits_equal(op.routed(x, joined, ids)[:, 0], whole)


def test_joined_weights_are_not_copied(device: str) -> None:
    op = QuantLinear()
    each = [
        op.pack(weight_of("q4_k", 20, 300, seed), "float16", activations="int8") for seed in (0, 1)
    ]
    joined = op.join(each)
    assert joined is not None
    assert joined.num_bytes == sum(p.num_bytes for p in each)
    for tensors, packed in zip(joined.data.each, each, strict=True):
        assert all(a is b for a, b in zip(tensors.each(), packed.data.tensors.each(), strict=True))


@pytest.mark.parametrize("change", [lambda s: s * 0 + 100, lambda s: s * 0 + 1e-3, lambda s: -s])
def test_scales_of_experts_may_have_several_types(
    device: str, change: Callable[[Tensor], Tensor]
) -> None:
    """Scales take the smallest type that holds them, so those of an expert may take a larger one."""
    op = QuantLinear()
    first = weight_of("q2_k", 20, 300)
    second = replace(first, scales=change(first.scales))
    each = [op.pack(weight, "float16", activations="float") for weight in (first, second)]
    assert each[0].data.layout != each[1].data.layout
    joined = op.join(each)
    assert joined is not None
    x = rand(6, 300, dtype="float16", device=DEVICE)
    out = op.routed(x, joined, (torch.arange(6, device=DEVICE) % 2)[:, None])[:, 0]
    wanted = torch.stack([expected(x, w, "float") for w in (first, second)])
    assert_near(out, wanted[torch.arange(6) % 2, torch.arange(6)], "float16")


@pytest.mark.parametrize("other", ["int4-32", "q5_0", "q4_1"])
def test_kinds_are_not_joined(device: str, other: str) -> None:
    op = QuantLinear()
    each = [
        op.pack(weight_of(kind, 20, 300), "float16", activations="float")
        for kind in ("int4-32-zeros", other)
    ]
    assert op.join(each) is None


def test_checks_what_it_is_given(device: str) -> None:
    op, weight = QuantLinear(), weight_of("int8", 3, 40)
    for dtype, activations in (("float64", "float"), ("float16", "fp4")):
        with pytest.raises(ConfigError, match=f"{dtype!r}, activations {activations!r}: must be"):
            op.pack(weight, dtype, activations=activations)
    packed = op.pack(weight, "float16", activations="int8")
    for x in (rand(2, 41, dtype="float16", device=DEVICE), rand(2, 40, device=DEVICE)):
        with pytest.raises(ConfigError, match=r"packed for float16 \[\*, 40\]"):
            op(x, packed)
    joined = op.join([packed, packed])
    assert joined is not None
    x, ids = rand(2, 40, dtype="float16", device=DEVICE), torch.zeros(2, 1, dtype=torch.int64)
    with pytest.raises(ConfigError, match=r"biases are \[1, 3\]; they must be \[2, 3\]"):
        op.routed(x, joined, ids, None, x[:1, :3])


def test_there_is_a_tile_for_everything() -> None:
    assert [rows_class(rows) for rows in (1, 4, 5, 32, 33)] == [
        "few", "few", "some", "some", "many"
    ]  # fmt: skip
    tiles = [tile_for(kind, bits) for kind in INTERPRETED for bits in QUANT_BITS]
    for tile in (*tiles, *INTERPRETED.values()):
        assert all(x & (x - 1) == 0 for x in (tile.block_m, tile.block_n, tile.num_warps))
