"""Layers whose fused parts are stored differently."""

from __future__ import annotations

import pytest
import torch

from headrace_core import plugins
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.gptq import GPTQWeight
from headrace_quant.none import PlainWeight
from headrace_quant.parted import PartedMethod
from headrace_quant.stored_integers import ByteFormat, StoredInt8

NAMES = tuple(f"model.layers.0.self_attn.{part}_proj" for part in "qkv")
SPEC = LinearSpec(
    "model.layers.0.self_attn.qkv_proj", 64, (64, 32, 32), "float32", part_names=NAMES
)
CONFIG = {
    "quant_method": "gptq", "bits": 4, "group_size": 32,
    "dynamic": {".*v_proj": {"bits": 8}, "-:.*k_proj": {}},
}  # fmt: skip


def method() -> QuantMethod:
    kind: type[QuantMethod] = plugins.load("headrace.quantization", "gptq")
    return kind.from_config(
        CONFIG, bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})
    )


def test_each_part_waits_for_tensors_of_its_own() -> None:
    created = method().for_layer(SPEC).create(SPEC)
    shapes = {name: (spec.shape, spec.only_part) for name, spec in created.items()}
    assert shapes["qweight@0"] == ((8, 64), 0)
    assert shapes["weight@1"] == ((32, 64), 1)
    assert shapes["qweight@2"] == ((16, 32), 2)
    assert "weight" not in created


@pytest.mark.parametrize("has_bias", [False, True])
def test_the_product_is_the_parts_products_side_by_side(has_bias: bool) -> None:
    whole = method()
    layer = whole.for_layer(SPEC)
    assert isinstance(layer, PartedMethod)
    generator = torch.Generator().manual_seed(0)
    tensors = {
        name: (torch.rand(spec.shape, generator=generator) if spec.dtype in (None, "float32")
               else torch.arange(spec.shape[0]).int() // 32 if name.startswith("g_idx")
               else torch.randint(-(2**31), 2**31 - 1, spec.shape, generator=generator).int())
        for name, spec in layer.create(SPEC).items()
    }  # fmt: skip
    bias = torch.randn(128, generator=generator) if has_bias else None
    x = torch.randn(3, 64, generator=generator)
    found = layer.apply(layer.finish(SPEC, tensors), x, bias)
    expected = []
    for part, (name, size) in enumerate(zip(NAMES, SPEC.out_parts, strict=True)):
        spec = LinearSpec(name, 64, (size,), "float32")
        alone = whole.for_layer(spec)
        mine = {k.split("@")[0]: t for k, t in tensors.items() if k.endswith(f"@{part}")}
        expected.append(alone.apply(alone.finish(spec, mine), x))
    joined = torch.cat(expected, -1)
    torch.testing.assert_close(found, joined if bias is None else joined + bias)


def test_parts_that_are_alike_are_one_layer() -> None:
    spec = LinearSpec("m", 64, (64, 32), "float32", part_names=(NAMES[0], "a.q_proj"))
    assert isinstance(method().for_layer(spec), GPTQWeight)


def test_kept_bytes_are_those_of_all_parts() -> None:
    """Query in 4 bits, a byte each in the file; key in floats; value in 8 bits; scales of groups in
    16 bits."""
    ops = method().ops
    parts = PartedMethod([
        StoredInt8(ops, ByteFormat(4, 32), activations="float"),
        PlainWeight(ops),
        StoredInt8(ops, ByteFormat(8), activations="float"),
    ])  # fmt: skip
    query, key, value = 64 * 64 // 2 + 64 * 2 * 2, 32 * 64 * 4, 32 * 64 + 32 * 4
    assert parts.kept_bytes(SPEC) == query + key + value
