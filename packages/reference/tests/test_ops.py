"""Small reference ops against numbers worked out by hand."""

from __future__ import annotations

import math

import pytest
import torch

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_core.ops import QuantizedWeight
from headrace_reference.xielu import xielu


def test_rms_norm():
    x = torch.tensor([[3.0, 4.0]])
    out = reference.rms_norm(x, torch.tensor([1.0, 2.0]), 0.5)
    root = math.sqrt(12.5 + 0.5)
    torch.testing.assert_close(out, torch.tensor([[3 / root, 8 / root]]))
    gemma = reference.rms_norm(x, torch.tensor([0.0, 1.0]), 0.5, offset=1.0)
    torch.testing.assert_close(gemma, out)


def test_add_rms_norm_rounds_the_sum_first():
    x, residual = torch.tensor([[256.0]]), torch.tensor([[1.0]])
    x, residual = x.bfloat16(), residual.bfloat16()
    normed, total = reference.add_rms_norm(x, residual, torch.ones(1).bfloat16(), 0.0)
    assert total.item() == 256.0  # 257 is no bfloat16
    assert normed.item() == 1.0


def test_layer_norm():
    out = reference.layer_norm(
        torch.tensor([[1.0, 3.0]]), torch.tensor([2.0, 2.0]), torch.tensor([0.0, 1.0]), 0.0
    )
    assert out.tolist() == [[-2.0, 3.0]]


@pytest.mark.parametrize(
    ("kind", "at_one"),
    [
        ("silu", 1 / (1 + math.exp(-1))),
        ("gelu", 0.5 * (1 + math.erf(math.sqrt(0.5)))),
        ("gelu_tanh", 0.5 * (1 + math.tanh(math.sqrt(2 / math.pi) * 1.044715))),
        ("relu", 1.0),
        ("relu2", 1.0),
    ],
)
def test_activations(kind, at_one):
    x = torch.tensor([[1.0, 3.0]])
    assert reference.activation(x, kind)[0, 0].item() == pytest.approx(at_one, abs=1e-6)
    assert reference.activation_and_mul(x, kind).item() == pytest.approx(3 * at_one, abs=1e-6)
    assert reference.activation(-x, "relu2").tolist() == [[0.0, 0.0]]


def test_xielu():
    out = xielu(torch.tensor([2.0, -1.0, 0.0]), 0.8, 0.9)
    assert out[0].item() == pytest.approx(0.8 * 4 + 0.5 * 2)
    assert out[1].item() == pytest.approx(0.9 * math.exp(-1) - 0.5)
    assert out[2].item() == pytest.approx(0, abs=1e-6)


def test_unknown_activation_is_refused_by_name():
    with pytest.raises(ConfigError, match=r"'swish' is unknown.*silu"):
        reference.activation(torch.ones(1), "swish")


@pytest.mark.parametrize(
    ("interleaved", "expected"),
    [(False, [-3.0, 2.0, 1.0, 4.0, 5.0]), (True, [-2.0, 1.0, 3.0, 4.0, 5.0])],
)
def test_rotary_turns_pairs(interleaved, expected):
    """R = 4 of D = 5: the first pair by 90 degrees, the second not at all."""
    cos_sin = torch.tensor([[9.0, 9.0, 9.0, 9.0], [0.0, 1.0, 1.0, 0.0]])
    query = torch.tensor([1.0, 2.0, 3.0, 4.0, 5.0]).reshape(1, 1, 5)
    key = query.clone()
    reference.rotary(query, key, torch.tensor([1]), cos_sin, interleaved=interleaved)
    assert query.flatten().tolist() == expected
    assert key.flatten().tolist() == expected


def test_cache_write_skips_negative_slots():
    key = torch.arange(3.0).reshape(3, 1, 1)
    caches = torch.full((2, 2, 2, 1, 1), -1.0)
    reference.cache_write(key, key + 10, caches[0], caches[1], torch.tensor([3, -1, 0]))
    assert caches[0].flatten().tolist() == [2.0, -1.0, -1.0, 0.0]
    assert caches[1].flatten().tolist() == [12.0, -1.0, -1.0, 10.0]


def test_quant_linear_scales_groups_of_inputs():
    values = torch.tensor([[1, -2, 5], [3, 4, 7]], dtype=torch.int8)
    scales, zeros = torch.tensor([[0.5, 2.0], [1.0, 10.0]]), torch.tensor([[0, 1], [2, 0]])
    weight = QuantizedWeight(values, scales, zeros.to(torch.int8), group_size=2)
    packed = reference.quant_linear.pack(weight, "float32", activations="float")
    bias = torch.tensor([0.0, 1.0])
    # (1 - 2) * 0.5 + (5 - 1) * 2; (1 + 2) * 1 + 7 * 10 + 1
    assert reference.quant_linear(torch.ones(1, 3), packed, bias).tolist() == [[7.5, 74.0]]


def test_a_quantized_weight_has_a_table_minimums_and_blocks():
    values = torch.tensor([[-2, -1, 0, 1], [1, 0, -1, -2]], dtype=torch.int8)
    weight = QuantizedWeight(
        values,
        scales=torch.tensor([[1.0, 2.0], [3.0, 4.0]]),
        bits=2,
        group_size=2,
        table=torch.tensor([-1.0, 0.5, 1.0, 8.0]),
        minimums=torch.tensor([[1.0, 0.0], [2.0, 3.0]]),
        block_scales=torch.tensor([[10.0], [100.0]]),
        block_minimums=torch.tensor([[0.5], [0.25]]),
    )
    real = [[-10.5, 4.5, 20.0, 160.0], [2399.5, 299.5, 199.25, -400.75]]
    packed = reference.quant_linear.pack(weight, "float32", activations="float")
    assert reference.quant_linear(torch.eye(4), packed).T.tolist() == real
    ids = torch.tensor([1, 0, 1])
    assert reference.quant_linear.rows(ids, packed).tolist() == [real[i] for i in ids]


def nearest_e4m3(value: float) -> float:
    """By search: of the finite numbers of E4M3 the nearest, of two the one whose last bit is 0."""
    numbers = [
        (
            math.ldexp(octet & 7, -9)
            if octet < 8
            else math.ldexp(8 + (octet & 7), (octet >> 3) - 10),
            octet,
        )
        for octet in range(127)
    ]
    size = abs(value)
    found = min(numbers, key=lambda each: (abs(each[0] - size), each[1] & 1))[0]
    return math.copysign(found, value)


def test_quant_linear_rounds_activations_to_fp8():
    """Against a loop in float64: ties, subnormal numbers, steps that are coarse, zeros."""
    table = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    eye = (torch.eye(9).to(torch.float8_e4m3fn).view(torch.int8)) ^ -128
    weight = QuantizedWeight(eye, torch.full((9, 1), 2.0), table=table)
    packed = reference.quant_linear.pack(weight, "float32", activations="fp8")
    x = torch.tensor([
        [448, 1, 1.0625, 1.1875, -17.5, 0.0029296875, 0.0009765625, 0.0009, 432.1],
        [-3, 0.1, 0.2, 0.3, 1e-3, 1e-5, -2.9, 2.7, 0],
        [1.4e-42, 1.3e-42, 1e-43, -1e-42, 0, 0, 0, 0, 0],
        [0] * 9,
        [1e38, -3e37, 1e36, 1e30, 0, 0, 0, 0, 0],
    ])  # fmt: skip
    steps = (x.abs().amax(1) / 448).tolist()
    assert steps[2] * 448 < float(x[2, 0])  # so its largest quotient is beyond 448
    out = reference.quant_linear(x, packed).double()
    for row, step in zip(range(5), steps, strict=True):
        quotients = (x[row] / (torch.tensor(step) if step else 1)).tolist()
        wanted = [nearest_e4m3(quotient) * (step or 1.0) * 2 for quotient in quotients]
        assert out[row].tolist() == pytest.approx(wanted, rel=1e-6, abs=3e-45)
    assert out[0, :4].tolist() == [896.0, 2.0, 2.0, 2.5]


@pytest.mark.parametrize("strange", [math.nan, math.inf, -math.inf])
def test_rows_without_numbers_have_none_in_fp8(strange):
    table = torch.arange(256).byte().view(torch.float8_e4m3fn).float()
    weight = QuantizedWeight(
        torch.full((2, 3), -72, dtype=torch.int8), torch.ones(2, 1), table=table
    )
    packed = reference.quant_linear.pack(weight, "float32", activations="fp8")
    out = reference.quant_linear(torch.tensor([[1.0, strange, 0.0], [1.0, 2.0, 4.0]]), packed)
    assert not out[0].isfinite().any()
    assert out[1].tolist() == pytest.approx([7.0, 7.0])


def test_quant_linear_rounds_activations_to_int8():
    weight = QuantizedWeight(torch.eye(3, dtype=torch.int8), torch.ones(3, 1))
    packed = reference.quant_linear.pack(weight, "float32", activations="int8")
    x = torch.tensor([[127.0, 0.5, -1.5], [0.0, 0.0, 0.0]])  # ties go to even
    assert reference.quant_linear(x, packed).tolist() == [[127.0, 0.0, -2.0], [0.0, 0.0, 0.0]]


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"bits": 7}, "bits = 7"),
        ({"table": torch.ones(2)}, r"table are torch.float32 \[2\].*\[256\]"),
        ({"minimums": torch.ones(1, 1)}, r"minimums .*\[2, 1\]"),
        ({"block_size": 2}, r"block_size = 2.*whole groups"),
        (
            {"table": torch.ones(256), "zero_points": torch.ones(2, 1, dtype=torch.int8)},
            "takes no zero_points",
        ),
        ({"group_size": 0}, "group_size = 0"),
        ({"scales": torch.ones(2)}, r"scales are torch.float32 \[2\].*\[2, 1\]"),
        ({"scales": torch.ones(2, 1).double()}, "scales are torch.float64"),
        ({"zero_points": torch.ones(2, 1)}, "zero_points are torch.float32"),
        ({"values": torch.ones(2, 3)}, "values are torch.float32"),
    ],
)
def test_quantized_weight_checks_itself(change, message):
    good = {"values": torch.ones(2, 3, dtype=torch.int8), "scales": torch.ones(2, 1)}
    with pytest.raises(ConfigError, match=message):
        QuantizedWeight(**{**good, **change})


def test_moe_sums_the_chosen_experts_by_weight():
    gate_up = torch.tensor([[[1.0], [2.0]], [[1.0], [3.0]], [[torch.nan], [torch.nan]]])
    down = torch.tensor([[[1.0]], [[1.0]], [[torch.nan]]])
    packed = reference.moe.pack(gate_up, down)
    weights, ids = torch.tensor([[0.25, 0.75]]), torch.tensor([[1, 0]])
    out = reference.moe(torch.tensor([[2.0]]), packed, weights, ids, "relu")
    assert out.item() == 0.25 * (2 * 6) + 0.75 * (2 * 4)


def test_clamped_swiglu_by_hand():
    x = torch.tensor([[9.0, -2.0, 3.0, -50.0]])  # gates 9 and -2, ups 3 and -50
    out = reference.activation_and_mul(x, "clamped_swiglu")
    sigmoid = [1 / (1 + math.exp(-1.702 * gate)) for gate in (7, -2)]
    assert out[0].tolist() == pytest.approx([4 * 7 * sigmoid[0], -6 * -2 * sigmoid[1]])


def test_experts_of_corrected_scores_weigh_as_much_as_without():
    x, bias = torch.tensor([[0.0, 1.0, 2.0]]), torch.tensor([9.0, 0.0, -9.0])
    weights, ids = reference.route_experts(x, 2, scoring="sigmoid", bias=bias, scale=2.0)
    assert ids.tolist() == [[0, 1]]
    assert weights[0].tolist() == pytest.approx([1.0, 2 / (1 + math.exp(-1))])


def test_groups_keep_experts_of_others_out():
    x = torch.tensor([[5.0, -9.0, 4.0, 4.0]])
    options = {"scoring": "sigmoid", "num_groups": 2, "top_groups": 1}
    assert reference.route_experts(x, 2, **options)[1].tolist() == [[0, 1]]
    assert reference.route_experts(x, 2, **options, group_score="top2")[1].tolist() == [[2, 3]]


def test_sparsemixer_weighs_among_the_near_ones():
    """Within 20% of the best: 10 and 9; then of 9: 9 and 7.5."""
    x = torch.tensor([[10.0, 9.0, 7.5, 1.0]])
    weights, ids = reference.route_experts(x, 2, scoring="sparsemixer", jitter=0.1)
    assert ids.tolist() == [[0, 1]]
    shares = [1 / (1 + math.exp(-1)), 1 / (1 + math.exp(-1.5))]
    assert weights[0].tolist() == pytest.approx(shares)
