"""Packed tensors that are read wrongly make another model: what the parity tests of formats rest on."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from quantized_checkpoints import IntegerConformance
from safetensors.torch import load_file, save_file
from stored_variants import (
    FP4,
    BitNet,
    GptOss,
    ModelOptMxfp8,
    Mxfp6,
    NaiveFp8,
    OwnInt8Dense,
    QuarkE2M3,
    QuarkUint4,
    TorchAOInt4,
    W4A16Zeros,
)
from test_bitsandbytes import TestInt8 as LlmInt8
from test_bitsandbytes import TestNF4 as NF4
from test_bitsandbytes import TestNF4Twice as NF4Twice
from test_compressed_tensors import TestInt8Zeros as Int8Zeros
from test_compressed_tensors import TestMxfp4 as Mxfp4
from test_compressed_tensors import TestMxfp8 as Mxfp8
from test_compressed_tensors import TestNvfp4 as Nvfp4
from test_integer_checkpoints import TestAutoRound as AutoRound
from test_integer_checkpoints import TestAWQ as AWQ
from test_integer_checkpoints import TestGPTQ as GPTQ
from test_integer_checkpoints import TestGPTQConv1D as GPTQConv1D
from test_integer_checkpoints import TestGPTQSorted as GPTQSorted
from test_modelopt import TestFp8Blocks as Fp8Blocks
from test_modelopt import TestNvfp4 as ModelOptNvfp4
from test_quark_torchao import TestQuark as Quark
from test_quark_torchao import TestTorchAO as TorchAO
from test_quark_torchao import TestTorchAOFp8 as TorchAOFp8
from torch import Tensor

from headrace_testing.model.decoders import PagedDriver

CODES = ("qweight", "weight_packed", "_weight_qdata", "weight", "_blocks")
ZEROS = ("qzeros", "weight_zero_point", "_weight_zero_point")
SCALES = (
    "scales", "weight_scale", "_weight_scale", "weight.absmax", "weight.nested_absmax", "SCB",
    "weight_scale_2", "_scales",
)  # fmt: skip
FORMATS = {
    GPTQ: {"codes", "zeros", "scales"}, GPTQSorted: {"codes", "zeros", "scales"},
    GPTQConv1D: {"codes", "zeros", "scales"}, AutoRound: {"codes", "zeros", "scales"},
    AWQ: {"codes", "zeros", "scales"}, NF4: {"codes", "scales"}, NF4Twice: {"codes", "scales"},
    LlmInt8: {"codes", "scales"}, Int8Zeros: {"codes", "zeros", "scales"}, Nvfp4: {"codes", "scales"},
    Mxfp4: {"codes", "scales"}, Mxfp8: {"scales"}, ModelOptNvfp4: {"codes", "scales"},
    FP4: {"codes", "scales"}, W4A16Zeros: {"codes", "zeros", "scales"}, Mxfp6: {"codes", "scales"},
    NaiveFp8: {"scales"}, ModelOptMxfp8: {"scales"}, QuarkUint4: {"codes", "zeros", "scales"},
    QuarkE2M3: {"codes", "scales"}, TorchAOInt4: {"codes", "scales"}, OwnInt8Dense: {"codes", "scales"},
    BitNet: {"codes"}, GptOss: {"codes", "scales"}, Fp8Blocks: {"scales"}, Quark: {"codes", "scales"},
    TorchAO: {"zeros", "scales"}, TorchAOFp8: {"scales"},
}  # fmt: skip
"""Suite -> what can be misread in its tensors; codes of a byte each in their own dtype have no halves."""


def misread(name: str, tensor: Tensor, what: str) -> Tensor | None:
    """A tensor with halves of bytes swapped, zero points one more, or scales in another order; None: it is
    nothing of the kind."""
    ends = {"codes": CODES, "zeros": ZEROS, "scales": SCALES}[what]
    if not name.endswith(
        tuple(end if end in ("_blocks", "_scales") else f".{end}" for end in ends)
    ):
        return None
    whole = not tensor.is_floating_point()
    if what == "codes" and whole:
        octets = tensor.contiguous().view(torch.uint8)
        return ((octets >> 4) | (octets << 4)).view(tensor.dtype)
    if what == "zeros" and whole:
        one = 0x11 if tensor.dtype == torch.int32 else 1
        return (tensor.contiguous().view(torch.uint8) + one).view(tensor.dtype)
    if what == "scales" and tensor.numel() > 1:
        turned = tensor.view(torch.uint8) if tensor.dtype.itemsize == 1 else tensor
        is_table = turned.dim() == 2 and min(turned.shape) > 1
        turned = turned.T.contiguous() if is_table else turned.flatten().roll(1)
        return turned.view(tensor.shape).view(tensor.dtype)
    return None


@pytest.mark.parametrize("suite", FORMATS)
def test_misread_tensors_show(suite: type[IntegerConformance], tmp_path: Path) -> None:
    checkpoint = suite().make_checkpoint(tmp_path / "m")
    right = load_file(checkpoint.path / "model.safetensors")
    prompt = suite().prompt(12)
    expected = checkpoint.logprobs(prompt)
    suite().assert_close(PagedDriver(suite().open(checkpoint.path)).step({"a": prompt}), expected)
    for what in FORMATS[suite]:
        wrong = {name: misread(name, tensor, what) for name, tensor in right.items()}
        assert any(tensor is not None for tensor in wrong.values()), what
        tensors = {n: right[n] if tensor is None else tensor for n, tensor in wrong.items()}
        save_file(tensors, checkpoint.path / "model.safetensors", metadata={"format": "pt"})
        logits = PagedDriver(suite().open(checkpoint.path)).step({"a": prompt})
        error = (torch.log_softmax(logits, -1) - expected).abs().max()
        assert float(error) > 10 * suite.tolerance, what
