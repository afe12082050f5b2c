"""Packed weights of every kind: their bytes, extremes, odd groups, refusals."""

from __future__ import annotations

from dataclasses import fields, replace

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.ops import KernelNeed, QuantizedWeight
from headrace_kernels.cpu import library
from headrace_kernels.cpu.ops import native_ops
from headrace_kernels.cpu.provider import PROVIDER
from headrace_reference.quantized import dequantized, quantize_rows
from headrace_testing.ops import bits_equal, rand
from headrace_testing.ops.weights import KINDS, TABLES, WeightKind

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

BITS = {
    "int8": (8, 8.01),
    "int8-32": (9, 9),
    "int8-zeros": (8, 8.01),
    "int4": (4, 4.01),
    "int4-32": (5, 5),
    "int4-32-zeros": (5.25, 5.25),
    "int4-128-zeros": (4.31, 4.31),
    "int4-1024": (4.03, 4.03),
    "int3-128-zeros": (3.15, 3.19),
    "int2-64-zeros": (2.28, 2.38),
    "ternary": (2, 2.01),
    "q4_0": (4.5, 4.5),
    "q4_1": (5, 5),
    "q5_0": (5.5, 5.5),
    "q5_1": (6, 6),
    "q8_0": (8.5, 8.5),
    "q2_k": (2.625, 2.875),
    "q3_k": (3.4375, 3.56),
    "q4_k": (4.5, 4.625),
    "q5_k": (5.5, 5.625),
    "q6_k": (6.5625, 6.5625),
    "iq2_xxs": (3.3125, 3.3125),
    "iq2_s": (3.5625, 3.5625),
    "iq4_nl": (4.5, 4.5),
    "iq4_xs": (4.25, 4.31),
    "nf4": (4.13, 4.5),
    "mxfp4": (4.25, 4.25),
    "mxfp6": (6.25, 6.25),
    "nvfp4": (4.5, 4.5),
    "fp8": (8, 8.01),
    "fp8-128": (8.25, 8.25),
    "fp8-e5m2": (8, 8.01),
    "mxfp8": (8.25, 8.25),
}
"""Bits of a weight, with all that belongs to it: in a file (the smallest there is), and as packed here."""
LEVELS = pytest.mark.parametrize("level", library.ISA_LEVELS)


def linear_at(level: str):
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    return native_ops(library.load(level))["quant_linear"]


@pytest.fixture
def linear():
    return PROVIDER.operations(KernelNeed("cpu", "float32", num_threads=1))["quant_linear"]


def test_every_kind_says_its_bits():
    assert BITS.keys() == KINDS.keys()


@LEVELS
@pytest.mark.parametrize("kind", BITS)
def test_packed_bytes(level, kind):
    of_file, ours = BITS[kind]
    weight = KINDS[kind].draw(256, 2048)
    if kind in ("q4_1", "q5_1"):  # their files have minimums in float16
        assert weight.minimums is not None
        weight = replace(weight, minimums=weight.minimums.half().float())
    packed = linear_at(level).pack(weight, "bfloat16", activations="float")
    bits = packed.num_bytes * 8 / (256 * 2048)
    assert bits == pytest.approx(ours, abs=0.04)  # and the ends of panels
    assert bits <= 1.15 * of_file


def at_extremes(weight: QuantizedWeight, code: int, *, largest: bool) -> QuantizedWeight:
    """The weight with all codes the same, and each part as large, or as small, as any of it."""

    def flat(part: Tensor) -> Tensor:
        return torch.full_like(part, part.max() if largest else part.min())

    names = ("scales", "zero_points", "minimums", "block_scales", "block_minimums")
    parts = {
        name: flat(getattr(weight, name)) for name in names if getattr(weight, name) is not None
    }
    return replace(weight, values=torch.full_like(weight.values, code), **parts)


@LEVELS
@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("kind", KINDS)
def test_extremes(level, activations, kind):
    """No sum of integers runs over: the largest codes times the largest limbs, all of one sign."""
    linear, weight = linear_at(level), KINDS[kind].draw(3, 4096)
    half = 1 << (weight.bits - 1)
    if weight.table is None:
        codes = [-half, half - 1]
    else:
        finite = weight.table.nan_to_num(0, 0, 0)
        codes = [int(finite.argmin()) - half, int(finite.argmax()) - half]
    x = torch.ones(3, 4096)
    x[1] = -1
    x[2, ::2] = -0.996  # limbs of another size, and sums that cancel
    entered = x.double()
    if activations == "int8":
        whole, steps = quantize_rows(x)
        entered = whole.double() * steps.double()
    for code in codes:
        for largest in (False, True):
            extreme = at_extremes(weight, code, largest=largest)
            packed = linear.pack(extreme, "float32", activations=activations)
            real = dequantized(extreme, torch.float64)
            # Minimums are subtracted at the end: what they take away counts.
            size = x.abs().double() @ dequantized(replace(extreme, minimums=None)).abs().double().T
            for many in (1, 9):  # the same rows again: as vectors, and as tiles
                found = linear(x.repeat(many, 1), packed).double()
                error = (found - (entered @ real.T).repeat(many, 1)).abs()
                assert bool((error <= 2e-5 * size.repeat(many, 1) + 1e-6).all()), (code, largest)


ODD = {
    "3 bits": WeightKind(3, 36, has_zeros=True),
    "5 bits": WeightKind(5, 12, has_minimums=True, scales="half"),
    "5 bits, long": WeightKind(5, 3004),
    "6 bits": WeightKind(6, 4, scales="half"),
    "table": WeightKind(4, 36, table="nf4", block_size=72, scales="signed"),
    "2 bits": WeightKind(2, 20, has_minimums=True, block_size=60, scales="bits4"),
    "fp8": WeightKind(8, 36, table="float8_e4m3fn"),
    "fp8, long": WeightKind(8, table="float8_e5m2"),
}
"""Groups that end inside a unit of steps, or are cut by a piece of a panel."""


@LEVELS
@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("kind", ODD)
def test_odd_groups_in_pieces(level, activations, kind):
    """One row reads a panel in one go, several unpack it piece by piece: the bits are the same."""
    linear, inputs = linear_at(level), 6002
    weight = ODD[kind].draw(70, inputs)
    packed = linear.pack(weight, "bfloat16", activations=activations)
    x = rand(150, inputs, dtype="bfloat16")
    together = linear(x, packed)
    for row in (0, 77, 149):
        assert bits_equal(linear(x[row : row + 1], packed), together[row : row + 1])
    for many in (2, 5, 9, 40):
        assert bits_equal(linear(x[:many], packed), together[:many])
    exact = x.double() @ dequantized(weight, torch.float64).T
    tolerance = {"int8": 0.02, "float": 0.005}[activations] * float(exact.abs().max())
    assert float((together.double() - exact).abs().max()) < tolerance


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("activations", ["int8", "float"])
@pytest.mark.parametrize("kind", [*KINDS, *ODD])
def test_tiles_give_the_bits_of_vectors(kind, activations, dtype):
    """Tiles multiply many rows by other instructions; sums of bytes are exact in both."""
    vectors, tiles = linear_at("avx512_bf16"), linear_at("avx512_amx")
    for outputs, inputs in ((70, 1000), (256, 512)):
        weight = (KINDS | ODD)[kind].draw(outputs, inputs)
        packed = tiles.pack(weight, dtype, activations=activations)
        for rows in (8, 29, 600):
            x = rand(rows, inputs, dtype=dtype)
            assert bits_equal(tiles(x, packed), vectors(x, packed))
    assert bits_equal(tiles.gated(x, packed, "silu"), vectors.gated(x, packed, "silu"))


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_long_groups_with_minimums_are_cut(linear, activations):
    """66,312 products of 255 and 127 would not fit into 32 bits."""
    inputs = 70_000
    weight = QuantizedWeight(
        torch.full((3, inputs), 127, dtype=torch.int8),
        torch.ones(3, 1),
        zero_points=torch.tensor([[-128], [0], [127]], dtype=torch.int8),
        minimums=torch.full((3, 1), 0.5),
    )
    packed = linear.pack(weight, "float32", activations=activations)
    out = linear(torch.ones(1, inputs), packed)
    expected = torch.tensor([[254.5, 126.5, -0.5]]) * inputs
    torch.testing.assert_close(out, expected, rtol=1e-5, atol=0)


def test_equal_zero_points_take_no_bytes(linear):
    weight = KINDS["q4_k"].draw(130, 512)
    shifted = replace(weight, zero_points=torch.full_like(weight.scales, -8).to(torch.int8))
    plain, packed = (linear.pack(w, "float32", activations="float") for w in (weight, shifted))
    assert packed.num_bytes == plain.num_bytes
    x = rand(3, 512)
    expected = x.double() @ dequantized(shifted, torch.float64).T
    torch.testing.assert_close(linear(x, packed).double(), expected, rtol=1e-5, atol=1e-5)


def test_experts_may_store_their_scales_differently(linear):
    """Whatever their values happen to need; their zero points, too."""
    weights = [KINDS["q4_1"].draw(70, 96, seed=seed) for seed in range(4)]
    lowest = torch.full((70, 3), -8, dtype=torch.int8)
    weights[0] = replace(weights[0], zero_points=lowest)
    weights[2] = replace(weights[2], zero_points=lowest + torch.arange(3).to(torch.int8))
    weights[1] = replace(weights[1], scales=weights[1].scales.bfloat16().float())
    weights[2] = replace(weights[2], scales=rand(70, 3).abs())
    weights[3] = replace(weights[3], minimums=torch.ones(70, 3))
    each = [linear.pack(weight, "float32", activations="float") for weight in weights]
    joined = linear.join(each)
    assert joined is not None
    x, ids = rand(9, 96), torch.arange(9)[:, None] % 4
    out = linear.routed(x, joined, ids)
    for row in range(9):
        alone = linear(x[row : row + 1], each[row % 4])
        assert bits_equal(out[row], alone)


def test_experts_of_two_kinds_are_not_joined(linear):
    each = [
        linear.pack(KINDS[kind].draw(70, 96), "float32", activations="float")
        for kind in ("q4_0", "q4_1", "q5_0", "iq4_nl", "fp8")
    ]
    for other in each[1:]:
        assert linear.join([each[0], other]) is None


@pytest.mark.parametrize("table", TABLES)
@pytest.mark.parametrize(("dtype", "precision"), [("float32", 2**-22), ("bfloat16", 2**-15)])
def test_tables_are_as_precise_as_promised(linear, table, dtype, precision):
    entries = torch.tensor(TABLES[table], dtype=torch.float32)
    half = len(entries) // 2
    weight = QuantizedWeight(
        torch.arange(-half, half, dtype=torch.int8)[:, None].repeat(1, 4),
        torch.ones(2 * half, 1),
        bits=half.bit_length(),
        table=entries,
    )
    packed = linear.pack(weight, dtype, activations="float")
    x = torch.zeros(1, 4, dtype=getattr(torch, dtype))
    x[0, 0] = 1
    assert bits_equal(linear.rows(torch.arange(2 * half), packed)[:, 0], entries.to(x.dtype))
    limit = float(entries.abs().max()) * precision
    error = (linear(x, packed)[0].double() - entries.double()).abs()
    rounding = entries.double().abs() * (2**-8 if dtype == "bfloat16" else 2**-23)
    assert bool((error <= limit + rounding).all())


def test_refusals(linear):
    codes, scales = torch.zeros(4, 8, dtype=torch.int8), torch.ones(4, 1)

    def pack(**options) -> None:
        linear.pack(QuantizedWeight(codes, scales, **options), "float32", activations="float")

    with pytest.raises(
        ConfigError, match="a table of 256 entries; it may have 8, 16, 64 of those of"
    ):
        pack(table=torch.arange(256).float())
    with pytest.raises(ConfigError, match="a table of 4 entries"):
        pack(bits=2, table=torch.arange(4).float())
    with pytest.raises(ConfigError, match=r"64 entries: each must be a number of torch\.float8"):
        pack(bits=6, table=torch.arange(64).float() / 3)
    with pytest.raises(ConfigError, match="a table holds infinities or NaN"):
        pack(bits=4, table=torch.full((16,), torch.inf))
    float8 = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    with pytest.raises(ConfigError, match="a weight of floats takes no minimums"):
        pack(table=float8, minimums=scales)
    codes[3, 7] = -1
    with pytest.raises(WeightsError, match="the weight holds infinities or NaN"):
        pack(table=float8)


@LEVELS
@pytest.mark.parametrize("order", ["turned", "sorted"])
def test_tables_of_64(level, order):
    """One whose second half is the first, negative, keeps 6 bits, whatever the signs of the first; another
    is held as floats of 8 bits."""
    linear, weight = linear_at(level), KINDS["mxfp6"].draw(20, 96)
    assert weight.table is not None
    table = weight.table.flip(0).roll(3) if order == "turned" else weight.table.sort().values
    other = replace(weight, table=table)
    ours, theirs = (linear.pack(w, "float32", activations="float") for w in (weight, other))
    assert torch.equal(linear.rows(torch.arange(20), theirs), dequantized(other))
    assert (theirs.num_bytes > ours.num_bytes) == (order == "sorted")
    x = rand(3, 96)
    expected = x.double() @ dequantized(other).double().T
    torch.testing.assert_close(linear(x, theirs).double(), expected, atol=1e-4, rtol=1e-4)


@pytest.mark.parametrize("bad", [-1, 20])
def test_row_out_of_range(linear, bad):
    packed = linear.pack(KINDS["q4_k"].draw(20, 64), "float32", activations="float")
    with pytest.raises(IndexError, match=r"outside \[0, 20\)"):
        linear.rows(torch.tensor([0, bad]), packed)


def test_nothing_of_the_weight_is_kept(linear):
    """Its memory may be used again."""
    weight = KINDS["q4_k"].draw(70, 512)
    packed = linear.pack(weight, "float32", activations="float")
    before = linear(rand(1, 512), packed)
    for field in fields(weight):
        part = getattr(weight, field.name)
        if isinstance(part, Tensor):
            part.zero_()
    assert bits_equal(linear(rand(1, 512), packed), before)
