"""Fakes give the shapes, dtypes and devices of the reference, and read nothing."""

from __future__ import annotations

import importlib
from types import SimpleNamespace

import pytest
import torch

from headrace_core.ops import OP_NAMES, OPTIONAL_OP_NAMES, KernelNeed, OptionalOp, QuantizedWeight
from headrace_reference.definitions import definitions
from headrace_reference.provider import PROVIDER
from headrace_testing.ops import (
    bits_equal,
    index_case,
    mla_case,
    paged_case,
    rand,
    varlen_case,
)
from headrace_testing.ops.recurrent import RecurrentConformance

reference = SimpleNamespace(**{name: found.op for name, found in definitions().items()})
fakes = SimpleNamespace(**{name: found.fake for name, found in definitions().items()})


def described(value):
    if isinstance(value, tuple):
        return tuple(map(described, value))
    return None if value is None else (value.shape, value.dtype)


def calls(dtype):
    """(op name, positional arguments, options) of one call to every op without packing."""
    x, weight = rand(5, 16, dtype=dtype), rand(16, dtype=dtype)
    heads = rand(5, 4, 16, dtype=dtype)
    caches = rand(2, 3, 8, 4, 16, dtype=dtype)
    positions, cos_sin = torch.arange(5), rand(9, 8)
    yield "embedding", (positions, x), {}
    yield "rms_norm", (heads, weight, 1e-6), {}
    yield "add_rms_norm", (x, x, weight, 1e-6), {}
    yield "layer_norm", (x, weight, None, 1e-6), {}
    yield "add_layer_norm", (x, x, weight, None, 1e-6), {}
    yield "activation", (x, "silu"), {}
    yield "activation_and_mul", (x, "silu"), {}
    yield "route_experts", (x, 3), {}
    yield "embedding", (positions, x), {"beyond": 0}
    yield "add", (x, x), {}
    yield "gate", (x, x[:, :4]), {"activation": "softplus"}
    yield "clamp", (x, -1.0, 1.0), {}
    yield "copy_rows", (x, torch.empty_like(x)), {}
    yield "mix", (heads, rand(5, 3, 4)), {}
    yield "match_rms", (x, x, 1e-5), {}
    yield "gaussian_topk", (x, 1.6), {}
    yield "xielu", (x, 0.8, 0.9), {"beta": 0.4}
    yield "scale", (x, 0.5), {}
    yield "gate", (x[:, 8:], x[:, :8]), {"activation": "silu"}
    yield "to_float32", (x,), {"soft_cap": 3.0}
    yield "gated_rms_norm", (x, x, weight, 1e-6), {"norm_first": True}
    yield "rotary", (heads, heads, positions, cos_sin), {"interleaved": False}
    yield "cache_write", (heads, heads, *caches, positions), {}
    yield (
        "rotary_cache_write",
        (heads, heads, heads, positions, cos_sin, *caches, positions),
        {"interleaved": True},
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_shapes_are_those_of_the_reference(dtype):
    for name, arguments, options in calls(dtype):
        fake, real = getattr(fakes, name), getattr(reference, name)
        copies = [x.clone() if isinstance(x, torch.Tensor) else x for x in arguments]
        assert described(fake(*copies, **options)) == described(real(*copies, **options)), name
    case = paged_case([(2, 5)], dtype=dtype)
    assert described(case.run(fakes.paged_attention)) == described(
        case.run(reference.paged_attention)
    )
    latent = mla_case([(2, 5)], dtype=dtype)
    assert described(latent.run(fakes.mla_attention)) == described(
        latent.run(reference.mla_attention)
    )
    picking = index_case([(2, 5)], dtype=dtype, top_k=3)
    assert described(picking.run(fakes.index_tokens)) == described(
        picking.run(reference.index_tokens)
    )
    rows = varlen_case([2, 5], dtype=dtype)
    assert described(rows.run(fakes.varlen_attention)) == described(
        rows.run(reference.varlen_attention)
    )


class Inputs(RecurrentConformance):
    """Where the suite of recurrences takes its inputs from; runs no test by itself."""

    __test__ = False


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize(
    "name",
    ["causal_conv", "selective_scan", "state_space_scan", "delta_rule", "rg_lru", "wkv", "mlstm"],
)
def test_recurrences_change_no_state(name, dtype):
    inputs = Inputs()
    case = inputs.case(name, dtype, 3, 0)
    state = inputs.states(case)
    where = state, inputs.indices(-1), inputs.indices(2), inputs.bounds((3,))
    before = state.clone()
    fake = case.run(getattr(fakes, name), slice(None), *where)
    assert bits_equal(state, before)
    assert described(fake) == described(case.run(getattr(reference, name), slice(None), *where))
    assert not bits_equal(state, before), "the reference does"


def test_packed_ops():
    x, weight = rand(5, 16), rand(24, 16)
    for module in (fakes, reference):
        assert module.linear(x, module.linear.pack(weight)).shape == (5, 24)
        assert module.linear.activated(x, module.linear.pack(weight), "gelu").shape == (5, 24)
        assert module.linear.gated(x, module.linear.pack(weight), "silu").shape == (5, 12)
        integers = QuantizedWeight(weight.to(torch.int8), rand(24, 1))
        packed = module.quant_linear.pack(integers, "float32", activations="int8")
        assert module.quant_linear(x, packed).shape == (5, 24)
        assert module.quant_linear.gated(x, packed, "silu").shape == (5, 12)
        assert module.head_linear(x[:, None], module.head_linear.pack(weight[None])).shape == (
            5,
            1,
            24,
        )
        joined, ids = module.quant_linear.join([packed] * 3), torch.zeros(5, 2, dtype=torch.int64)
        assert module.quant_linear.routed(x, joined, ids).shape == (5, 2, 24)
        assert module.quant_linear.routed(x, joined, ids, torch.ones(5, 2)).shape == (5, 24)
        packed = module.moe.pack(rand(3, 8, 16), rand(3, 16, 4))
        routing = torch.ones(5, 2), torch.zeros(5, 2, dtype=torch.int64)
        assert module.moe(x, packed, *routing, "silu").shape == (5, 16)
        packed = module.expert_linear.pack(rand(3, 8, 16))
        assert module.expert_linear(x, packed, routing[1]).shape == (5, 2, 8)
        assert module.expert_linear(x, packed, routing[1], routing[0]).shape == (5, 8)


def test_low_rank():
    x, out = torch.ones(5, 16), torch.ones(5, 24)
    slots, down, up = torch.zeros(5, dtype=torch.int32), torch.ones(2, 16), torch.ones(24, 2)
    for module in (fakes, reference):
        memory = module.low_rank.allocate(2, 3, 16, (24,), x)
        module.low_rank.write(memory, 0, 0, down, up, 0.5)
        assert described(module.low_rank(out, x, memory, slots)) == described(out)
        assert torch.equal(out, torch.ones(5, 24)) == (module is fakes)


def test_meta_tensors_stay_meta():
    x = torch.empty(5, 16, device="meta")
    assert fakes.rms_norm(x, x[0], 1e-6).device.type == "meta"
    assert fakes.linear(x, fakes.linear.pack(x)).device.type == "meta"
    memory = fakes.low_rank.allocate(2, 3, 16, (16,), x)
    assert fakes.low_rank(x, x, memory, x.new_empty(5, dtype=torch.int32)).device.type == "meta"
    assert fakes.paged_attention(x[:, None]).shape == (5, 1, 16)


def test_every_op_is_defined_once_with_its_fake():
    """The provider has what :mod:`headrace_core.ops` names, those that few families need among them."""
    need = KernelNeed("cpu", "float32")
    assert set(definitions()) == {*OP_NAMES, *OPTIONAL_OP_NAMES}
    assert set(PROVIDER.operations(need)) == set(definitions())
    assert PROVIDER.refuse(need) == []
    assert PROVIDER.priority(need) == 0
    assert not PROVIDER.row_invariant(need)


@pytest.mark.parametrize("name", OPTIONAL_OP_NAMES)
def test_an_optional_op_is_one_module_of_each_package(name):
    """Signature, definition and fake, suite: each in the file that has the op's name."""
    signature = importlib.import_module(f"headrace_core.ops.optional.{name}")
    assert getattr(signature, name.upper()) == OptionalOp(name)
    definition = importlib.import_module(f"headrace_reference.{name}")
    assert definitions()[name] == (getattr(definition, name), getattr(definition, f"fake_{name}"))
    importlib.import_module(f"headrace_testing.ops.optional.{name}")
