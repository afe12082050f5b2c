"""What the Python edge refuses, and that no bad index leaves the memory it was given."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from headrace_core.errors import ConfigError
from headrace_core.ops import HeadNorm, KernelNeed, QuantizedWeight, Rounding, bind_ops
from headrace_kernels.cpu import library
from headrace_kernels.cpu.ops import native_ops
from headrace_kernels.cpu.provider import PROVIDER
from headrace_reference.quantized import dequantized, quantize_rows
from headrace_testing.ops import bits_equal, paged_case, rand, varlen_case

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)


@pytest.fixture
def ops():
    return PROVIDER.operations(KernelNeed("cpu", "float32", num_threads=1))


def test_bind_ops_prefers_the_native_kernels():
    table = bind_ops(KernelNeed("cpu", "bfloat16"))
    assert set(table.providers.values()) == {"cpu"}
    assert table.row_invariant


@pytest.mark.parametrize("bad", [-1, 5])
def test_embedding_id_out_of_range(ops, bad):
    with pytest.raises(IndexError, match=r"outside \[0, 5\)"):
        ops["embedding"](torch.tensor([0, bad]), rand(5, 8))


@pytest.mark.parametrize("bad", [-1, 9])
def test_position_out_of_range(ops, bad):
    x = rand(1, 2, 8)
    with pytest.raises(IndexError, match=r"outside \[0, 9\)"):
        ops["rotary"](x, x.clone(), torch.tensor([bad]), rand(9, 8), interleaved=False)


def test_slot_beyond_the_cache(ops):
    x = rand(1, 2, 8)
    caches = torch.zeros(2, 3, 4, 2, 8)
    with pytest.raises(IndexError, match="beyond the cache's 3 blocks of 4"):
        ops["cache_write"](x, x, caches[0], caches[1], torch.tensor([12]))


@pytest.mark.parametrize("gates", [0, 3, 16])
def test_gates_that_do_not_divide_a_row(ops, gates):
    with pytest.raises(ConfigError, match=rf"gate is float32 \[2, {gates}\]"):
        ops["gate"](rand(2, 8), rand(2, gates))


@pytest.mark.parametrize("shape", [(6,), (2, 3, 4, 5)])
def test_rows_of_other_dimensions_are_not_copied(ops, shape):
    with pytest.raises(ConfigError, match=r"copy_rows: x is float32"):
        ops["copy_rows"](rand(*shape), rand(*shape))


def test_scores_without_a_logit_scale(ops):
    case = paged_case([(1, 20)], dtype="float32", logit_scale=torch.zeros(0))
    with pytest.raises(ConfigError, match=r"logit_scale is float32 \[0\]"):
        case.run(ops["paged_attention"])


def test_decays_without_a_bound_below(ops):
    x, bounds = rand(2, 1, 4), torch.tensor([0, 2], dtype=torch.int32)
    arguments = (x, x, x, rand(2, 1), rand(2, 1), rand(1), rand(1), None, None, None, bounds)
    with pytest.raises(ConfigError, match=r"lower_bound = 0\.0: must be negative"):
        ops["delta_rule"](*arguments, scale=1.0, lower_bound=0.0)


@pytest.mark.parametrize("bad", [-1, 99])
def test_block_that_does_not_exist(ops, bad):
    case = paged_case([(1, 20)], dtype="float32")
    case.block_table[0, 0] = bad
    with pytest.raises(IndexError, match="block table"):
        case.run(ops["paged_attention"])


def test_block_table_too_narrow(ops):
    case = paged_case([(1, 20)], dtype="float32")
    narrow = dataclasses.replace(case, block_table=case.block_table[:, :1])
    with pytest.raises(IndexError, match="block table"):
        narrow.run(ops["paged_attention"])


@pytest.mark.parametrize("starts", [[0, 3], [0, -1], [-1, 1]])
def test_query_rows_that_do_not_exist(ops, starts):
    case = paged_case([(2, 20)], dtype="float32")
    bad = dataclasses.replace(case, cu_seqlens_q=torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ConfigError, match="does not rise within the 2 rows"):
        bad.run(ops["paged_attention"])


def test_rows_past_the_last_request_are_zero(ops):
    case = paged_case([(2, 20)], dtype="float32")
    short = dataclasses.replace(case, cu_seqlens_q=torch.tensor([0, 1], dtype=torch.int32))
    out = short.run(ops["paged_attention"])
    assert (out[0] != 0).all()
    assert (out[1] == 0).all()


@pytest.mark.parametrize("starts", [[0, 5, 3], [0, 3, 99], [-2, 3, 5]])
def test_sequences_that_do_not_exist(ops, starts):
    case = varlen_case([3, 2], dtype="float32")
    bad = dataclasses.replace(case, cu_seqlens=torch.tensor(starts, dtype=torch.int32))
    with pytest.raises(ConfigError, match=r"does not rise within the 5 rows of query"):
        bad.run(ops["varlen_attention"])


@pytest.mark.parametrize("lens", [[3, 3], [-1, 2], [3, 2, 1]])
def test_keys_that_do_not_exist(ops, lens):
    case = varlen_case([3, 2], dtype="float32", key_lens=torch.tensor(lens, dtype=torch.int32))
    with pytest.raises(ConfigError, match="key_lens"):
        case.run(ops["varlen_attention"])


def test_a_distance_bias_must_reach_from_the_last_token(ops):
    """Which may be no key."""
    lens, bias = torch.tensor([2], dtype=torch.int32), torch.zeros(4, 5)
    case = varlen_case([5], dtype="float32", key_lens=lens, distance_bias=bias)
    with pytest.raises(ConfigError, match="longer than distance_bias reaches"):
        case.run(ops["varlen_attention"])


def test_keys_of_another_dtype_are_refused(ops):
    case = varlen_case([3, 2], dtype="float32")
    with pytest.raises(ConfigError, match="of one dtype"):
        dataclasses.replace(case, key=case.key.bfloat16()).run(ops["varlen_attention"])
    options = {**case.options, "distance_bias": torch.zeros(4, 5, dtype=torch.float64)}
    with pytest.raises(ConfigError, match="distance_bias is float64"):
        dataclasses.replace(case, options=options).run(ops["varlen_attention"])


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_the_sum_with_its_layer_norm_is_the_two_steps(level, dtype):
    """Bit for bit, so that a model may take either; other rows' places too."""
    ops = native_ops(library.load(level))
    x, residual = rand(11, 100, dtype=dtype), rand(11, 100, dtype=dtype, seed=1)
    weight, bias = rand(100, dtype=dtype, seed=2), rand(100, dtype=dtype, seed=3)
    total = ops["add"](x, residual)
    out, kept = ops["add_layer_norm"](x.clone(), residual.clone(), weight, bias, 1e-5)
    assert bits_equal(kept, total)
    assert bits_equal(out, ops["layer_norm"](total, weight, bias, 1e-5))


def test_moe_adds_experts_in_the_order_of_topk_ids(ops):
    """Bit for bit: the parts as computed alone, added in float32 from the left."""
    packed = ops["moe"].pack(rand(8, 48, 40), rand(8, 40, 24, seed=1))
    x, weights = rand(1, 40), rand(1, 8).softmax(-1)
    ids = torch.tensor([[5, 2, 7, 0, 1, 6, 3, 4]])
    total = torch.zeros(1, 40)
    for place in range(8):
        part = ops["moe"](x, packed, torch.ones(1, 1), ids[:, place : place + 1], "silu")
        total = total + weights[:, place] * part
    assert bits_equal(ops["moe"](x, packed, weights, ids, "silu"), total)


def test_expert_that_does_not_exist(ops):
    packed = ops["moe"].pack(rand(2, 8, 4), rand(2, 4, 4))
    with pytest.raises(IndexError, match=r"outside \[0, 2\)"):
        ops["moe"](rand(1, 4), packed, torch.ones(1, 1), torch.tensor([[2]]), "silu")


def test_mismatches_name_what_was_given(ops):
    packed = ops["linear"].pack(rand(4, 8))
    with pytest.raises(ConfigError, match=r"x is float32 \[1, 7\], packed for float32 \[\*, 8\]"):
        ops["linear"](rand(1, 7), packed)
    with pytest.raises(ConfigError, match="x is bfloat16"):
        ops["linear"](rand(1, 8, dtype="bfloat16"), packed)
    with pytest.raises(ConfigError, match=r"bias is float32 \[3\]"):
        ops["linear"](rand(1, 8), packed, rand(3))
    with pytest.raises(ConfigError, match=r"torch.float64 is not supported.*float32"):
        ops["activation"](rand(3, dtype="float64"), "silu")
    with pytest.raises(ConfigError, match="'swish' is unknown"):
        ops["activation"](rand(3), "swish")
    case = paged_case([(1, 4)], dtype="bfloat16")
    mixed = dataclasses.replace(case, query=case.query.float())
    with pytest.raises(ConfigError, match="caches are bfloat16"):
        mixed.run(ops["paged_attention"])


def native_gate(level: str, gates: torch.Tensor, ups: torch.Tensor) -> torch.Tensor:
    """silu(gates) * ups by the kernels of a level."""
    return native_ops(library.load(level))["activation_and_mul"](
        torch.cat([gates, ups], -1), "silu"
    )


def quantized(features: int, inputs: int, **options) -> QuantizedWeight:
    generator = torch.Generator().manual_seed(0)
    values = torch.randint(-128, 128, (features, inputs), generator=generator)
    return QuantizedWeight(values.to(torch.int8), rand(features, 1).abs(), **options)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_int8_products_are_the_same_on_every_instruction_set(dtype):
    """Integer sums are exact, so nothing is left that could differ."""
    x, bias, weight = rand(9, 700, dtype=dtype), rand(70, dtype=dtype), quantized(70, 700)
    results = []
    for level in library.levels():
        linear = native_ops(library.load(level))["quant_linear"]
        results.append(linear(x, linear.pack(weight, dtype, activations="int8"), bias))
    assert all(bits_equal(result, results[-1]) for result in results)


@pytest.mark.parametrize("size", [1e-38, 1e-30, 1e-3, 1.0, 3e37])
@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_activations_are_divided_exactly(level, size):
    """Codes of activations are those of a division, also where they lie between two integers."""
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    linear = native_ops(library.load(level))["quant_linear"]
    halves = torch.randint(-254, 255, (500, 70), generator=torch.Generator().manual_seed(3))
    x = halves.float() * (rand(500, 1).abs() * size / 100)
    x = torch.cat([x, rand(500, 70) * size / 5, torch.nextafter(x, torch.zeros(()))])
    packed = linear.pack(
        QuantizedWeight(torch.eye(70, dtype=torch.int8), torch.ones(70, 1)),
        "float32",
        activations="int8",
    )
    codes, steps = quantize_rows(x)
    assert bits_equal(linear(x, packed) + 0.0, codes * steps + 0.0)


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_sums_beyond_32_bits_are_cut(ops, activations):
    """66,312 products of 255 and 127 would not fit."""
    inputs = 70_000
    weight = QuantizedWeight(torch.full((3, inputs), 127, dtype=torch.int8), torch.ones(3, 1))
    packed = ops["quant_linear"].pack(weight, "float32", activations=activations)
    out = ops["quant_linear"](torch.ones(1, inputs), packed)
    torch.testing.assert_close(out, torch.full((1, 3), 127.0 * inputs), rtol=1e-6, atol=0)


@pytest.mark.parametrize("level", library.ISA_LEVELS)
@pytest.mark.parametrize(
    ("options", "activations"),
    [({}, "int8"), ({"group_size": 1000}, "float"), ({"bits": 4, "group_size": 3000}, "float")],
    ids=str,
)
def test_rows_that_are_cut_in_pieces_stay_the_same(level, options, activations):
    """A lone tile reads a panel in one go, several cut it: 12,000 inputs are over a piece."""
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    linear, inputs = native_ops(library.load(level))["quant_linear"], 12_000
    generator = torch.Generator().manual_seed(2)
    values = torch.randint(-8, 8, (70, inputs), generator=generator).to(torch.int8)
    scales = rand(70, -(-inputs // options.get("group_size", inputs))).abs()
    packed = linear.pack(
        QuantizedWeight(values, scales, **options), "bfloat16", activations=activations
    )
    x = rand(200, inputs, dtype="bfloat16")
    together = linear(x, packed)
    for row in (0, 99, 199):
        assert bits_equal(linear(x[row : row + 1], packed), together[row : row + 1])
    exact = x.double() @ dequantized(QuantizedWeight(values, scales, **options)).double().T
    tolerance = {"int8": 0.02, "float": 0.005}[activations] * float(exact.abs().max())
    assert float((together.double() - exact).abs().max()) < tolerance


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", library.ISA_LEVELS)
@pytest.mark.parametrize("inputs", [1, 31, 1000, 5003])
def test_rows_of_a_linear_layer_stay_the_same_in_every_company(level, inputs, dtype):
    """Alone, in a tile of rows, in several, in pieces of K, beside rows of other tasks: the same bits."""
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    linear, outputs = native_ops(library.load(level))["linear"], 150
    x, weight = rand(401, inputs, dtype=dtype), rand(2 * outputs, inputs, dtype=dtype, seed=1)
    bias = rand(2 * outputs, dtype=dtype, seed=2)
    packed = linear.pack(weight)
    together = linear(x, packed, bias)
    for first, last in ((0, 1), (3, 19), (2, 19), (100, 133), (64, 129), (400, 401)):
        assert bits_equal(linear(x[first:last], packed, bias), together[first:last])
    exact = x.double() @ weight.double().T + bias.double()
    tolerance = {"float32": 1e-5, "bfloat16": 1e-2, "float16": 2e-3}[dtype]
    torch.testing.assert_close(
        together.double(), exact, rtol=tolerance, atol=tolerance * float(exact.abs().max())
    )
    gates, ups = together[:, :outputs].contiguous(), together[:, outputs:].contiguous()
    assert bits_equal(linear.gated(x, packed, "silu", bias), native_gate(level, gates, ups))


@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_rows_of_experts_stay_the_same_in_every_company(level):
    """More rows of one expert than a task takes, a few of another, none of a third."""
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    moe = native_ops(library.load(level))["moe"]
    packed = moe.pack(
        rand(4, 2 * 128, 72, dtype="bfloat16"), rand(4, 72, 128, dtype="bfloat16", seed=1)
    )
    x, weights = rand(500, 72, dtype="bfloat16"), rand(500, 2).softmax(-1)
    ids = torch.zeros(500, 2, dtype=torch.int64)
    ids[:, 1], ids[::97, 0] = 3, 1
    together = moe(x, packed, weights, ids, "silu")
    for row in (0, 1, 97, 388, 499):
        own = slice(row, row + 1)
        assert bits_equal(moe(x[own], packed, weights[own], ids[own], "silu"), together[own])


@pytest.mark.parametrize("activations", ["int8", "float"])
def test_rounding_a_long_row_cuts_its_sum(ops, activations):
    weight = torch.ones(3, 70_000)
    packed = ops["quant_linear"].round(weight, "float32", Rounding(8), activations=activations)
    out = ops["quant_linear"](torch.ones(1, 70_000), packed)
    torch.testing.assert_close(out, torch.full((1, 3), 70_000.0), rtol=1e-5, atol=0)


def test_quant_linear_refusals(ops):
    linear = ops["quant_linear"]
    values, scales = torch.zeros(4, 40, dtype=torch.int8), torch.ones(4, 7)
    with pytest.raises(ConfigError, match="group_size 6 is not a multiple of 4"):
        linear.pack(QuantizedWeight(values, scales, group_size=6), "float32", activations="int8")
    with pytest.raises(ConfigError, match="activations 'float64' are not of"):
        linear.pack(quantized(4, 40), "float64", activations="int8")
    packed = linear.pack(quantized(4, 40), "float32", activations="int8")
    with pytest.raises(ConfigError, match=r"x is bfloat16 \[1, 40\]"):
        linear(rand(1, 40, dtype="bfloat16"), packed)
    with pytest.raises(ConfigError, match=r"quant_linear: bias is float32 \[3\]"):
        linear(rand(1, 40), packed, rand(3))


def test_norm_weights_may_be_float32(ops):
    x, weight = rand(3, 40, dtype="bfloat16"), rand(40)
    expected = ops["rms_norm"](x.float(), weight, 1e-6).bfloat16()
    assert bits_equal(ops["rms_norm"](x, weight, 1e-6), expected)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_fused_rotary_cache_write_is_its_parts(level, dtype):
    """Bit for bit: head norm, rotation and write one after the other."""
    if level not in library.levels():
        pytest.skip(f"this machine has no {level}")
    ops = native_ops(library.load(level))
    query, key, value = rand(7, 4, 40, dtype=dtype), *rand(2, 7, 2, 40, dtype=dtype)
    weights, cos_sin = rand(2, 40, dtype=dtype), rand(20, 24)
    positions, slots = torch.arange(7) * 2, torch.arange(7) + 3
    one, two = torch.zeros(2, 2, 4, 8, 2, 40, dtype=query.dtype)

    normed = [ops["rms_norm"](x, w, 1e-6) for x, w in zip((query, key), weights, strict=True)]
    ops["rotary"](*normed, positions, cos_sin, interleaved=False)
    ops["cache_write"](normed[1], value, one[0], one[1], slots)

    norm = HeadNorm(weights[0], weights[1], eps=1e-6)
    ops["rotary_cache_write"](
        query, key, value, positions, cos_sin, two[0], two[1], slots, head_norm=norm
    )
    assert bits_equal(query, normed[0])
    assert bits_equal(two, one)


@pytest.mark.parametrize("blocks", [([-2], [1]), ([3], [1]), ([0], [-1]), ([0], [3])])
def test_state_that_does_not_exist(ops, blocks):
    x, state = rand(2, 5), torch.zeros(3, 5, 3)
    where = [torch.tensor(block) for block in blocks]
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(IndexError, match=r"outside \[0, 3\)"):
        ops["causal_conv"](x, rand(5, 4), None, state, *where, bounds)
    assert not state.any()


@pytest.mark.parametrize("bounds", [[0, 3], [1, 2], [0, 2, 1]])
def test_requests_beyond_a_recurrences_rows(ops, bounds):
    cu = torch.tensor(bounds, dtype=torch.int32)
    with pytest.raises(ConfigError, match="does not rise from 0 within the 2 rows"):
        ops["causal_conv"](rand(2, 5), rand(5, 4), None, None, None, None, cu)


def test_a_convolution_of_more_taps_than_there_is_room_for(ops):
    bounds = torch.tensor([0, 2], dtype=torch.int32)
    with pytest.raises(ConfigError, match=r"weight is float32 \[5, 65\].* K from 1 to 64"):
        ops["causal_conv"](rand(2, 5), rand(5, 65), None, None, None, None, bounds)


def test_states_of_another_shape(ops):
    one, bounds = torch.tensor([1]), torch.tensor([0, 2], dtype=torch.int32)
    apart = torch.zeros(3, 5, 6)[:, :, ::2]
    for state in (torch.zeros(3, 5, 4), torch.zeros(3, 5, 3).bfloat16(), apart):
        with pytest.raises(ConfigError, match="a block dense"):
            ops["causal_conv"](rand(2, 5), rand(5, 4), None, state, one, one, bounds)


@pytest.mark.parametrize("level", library.levels())
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("width", [56, 120, 125])
def test_rows_of_a_linear_layer_end_where_they_end(level, dtype, width):
    """Outputs that fill the vectors of their last panel but for a few numbers: the next row's stay."""
    kernels = library.load(level)
    kernels.set_num_threads(1)
    linear = native_ops(kernels)["linear"]
    packed = linear.pack(rand(width, 40, dtype=dtype, seed=1))
    x, bias = rand(13, 40, dtype=dtype, seed=2), rand(width, dtype=dtype, seed=3)
    alone = torch.cat([linear(row, packed, bias) for row in x.split(1)])
    assert bits_equal(linear(x, packed, bias), alone)
