"""Packed layers take little more memory than their tensors in the file: at most 1.15 times as much."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_bitsandbytes import NF4Checkpoint, four_bits
from test_bitsandbytes import TestInt8 as LlmInt8
from test_compressed_tensors import TestInt8Zeros as Int8Zeros
from test_compressed_tensors import TestMxfp4 as Mxfp4
from test_compressed_tensors import TestMxfp8 as Mxfp8
from test_compressed_tensors import TestNvfp4 as Nvfp4
from test_modelopt import TestFp8 as Fp8
from test_modelopt import TestFp8Blocks as Fp8Blocks
from test_quark_torchao import TestTorchAO as TorchAO
from torch import Tensor

from headrace_core import plugins
from headrace_core.linear import LinearSpec, QuantMethod
from headrace_core.ops import KernelNeed, bind_ops
from headrace_testing.model.quantized_layers import awq_tensors, gptq_tensors

NAME = "model.layers.1.mlp.down_proj"
WEIGHT = torch.randn(256, 1024, generator=torch.Generator().manual_seed(0))
GPTQ = {"quant_method": "gptq", "group_size": 128, "desc_act": False, "sym": False}


def gptq(bits: int) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, _ = gptq_tensors(WEIGHT, bits=bits, group_size=128, symmetric=False)
    return {**GPTQ, "bits": bits}, tensors


def of(suite: Any) -> tuple[dict[str, Any], dict[str, Tensor]]:
    tensors, _ = suite().module(NAME, WEIGHT)
    return suite.quantization, tensors


LAYERS = {
    **{f"gptq-{bits}": gptq(bits) for bits in (2, 3, 4, 8)},
    "awq": (
        {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": True},
        awq_tensors(WEIGHT, group_size=128)[0],
    ),
    "nf4": (NF4Checkpoint.quantization, four_bits(WEIGHT, twice=False)[0]),
    "nf4-twice": (NF4Checkpoint.quantization, four_bits(WEIGHT, twice=True)[0]),
    "llm.int8": of(LlmInt8),
    "int8-zeros": of(Int8Zeros),
    "nvfp4": of(Nvfp4),
    "mxfp4": of(Mxfp4),
    "mxfp8": of(Mxfp8),
    "fp8": of(Fp8),
    "fp8-blocks": of(Fp8Blocks),
    "torchao-int4": of(TorchAO),
}


@pytest.mark.parametrize("case", LAYERS)
def test_packed_bytes(case: str) -> None:
    config, stored = LAYERS[case]
    ops = bind_ops(KernelNeed(device="cpu", dtype="bfloat16"))
    kind: type[QuantMethod] = plugins.load("headrace.quantization", config["quant_method"])
    method = kind.from_config(config, ops)
    spec = LinearSpec(NAME, 1024, (256,), "bfloat16")
    layer = method.for_layer(spec)
    named = [(f"{NAME}.{suffix}", tensor, Path("file")) for suffix, tensor in stored.items()]
    decoded = method.decode(named, "bfloat16", lambda _: False)
    arrived = {name.removeprefix(f"{NAME}."): tensor for name, tensor, _ in decoded}
    found = {
        name: arrived[name].float() if wanted.any_float else arrived[name]
        for name, wanted in layer.create(spec).items()
        if name in arrived
    }
    in_file = sum(tensor.numel() * tensor.element_size() for tensor in stored.values())
    state = layer.finish(spec, found)
    assert state.num_bytes <= 1.15 * in_file, (state.num_bytes, in_file)
    expected = layer.kept_bytes(spec)
    if expected is None:
        slots = layer.create(spec).items()
        expected = sum(found[name].numel() * getattr(torch, wanted.dtype or "bfloat16").itemsize
                       for name, wanted in slots if wanted.required)  # fmt: skip
    assert 0.85 <= state.num_bytes / expected <= 1.15
