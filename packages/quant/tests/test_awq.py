from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.linear import LinearSpec
from headrace_core.ops import KernelNeed, bind_ops
from headrace_quant.awq import AWQ, AWQWeight, _unpacked
from headrace_quant.none import PlainWeight
from headrace_testing.model.quant_methods import QuantConformance
from headrace_testing.model.quantized_layers import awq_tensors


def config(**fields: Any) -> dict[str, Any]:
    """As AutoAWQ writes it."""
    return {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": None, **fields,
    }  # fmt: skip


class AWQConformance(QuantConformance):
    name = "awq"
    in_features = 128
    out_parts = (24, 16)
    group_size: ClassVar[int] = 32
    ignores = "lm_head"

    def make_tensors(self, spec: LinearSpec, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        size = spec.in_features if self.group_size == -1 else self.group_size
        return awq_tensors(weight, group_size=size)


class TestGroups(AWQConformance):
    config = config()
    refused: ClassVar = {
        "bits": 8,
        "version": "gemv_fast",
        "zero_point": False,
        "group_size": 0,
        "modules_to_not_convert": "lm_head",
    }


class TestOneGroup(AWQConformance):
    group_size = -1
    config = config(group_size=-1)


class TestOldNames(AWQConformance):
    config: ClassVar = {
        "quant_method": "awq", "w_bit": 4, "q_group_size": 32, "zero_point": True, "version": "GEMM",
    }  # fmt: skip


def test_pieces_of_names_are_left_in_floats() -> None:
    method = TestGroups().method(config=config(modules_to_not_convert=["visual", "gate"]))
    for name, kind in (
        ("model.layers.0.mlp.up_proj", AWQWeight),
        ("visual.blocks.0.attn.proj", PlainWeight),
        ("model.layers.0.mlp.gate", PlainWeight),
        ("lm_head", PlainWeight),
    ):
        assert type(method.for_layer(LinearSpec(name, 32, (8,), "float32"))) is kind


@pytest.mark.parametrize(
    ("inputs", "outputs", "message"),
    [(48, 8, "in_features = 48.*multiple of 32"), (32, 12, "outputs = 12.*multiple of 8")],
)
def test_sizes_that_do_not_divide_are_refused(inputs: int, outputs: int, message: str) -> None:
    spec = LinearSpec("a.b", inputs, (8, outputs), "float32")
    words = rf"'a\.b\.qweight'.*{message}.*tensor_parallel_size"
    with pytest.raises(ConfigError, match=words):
        TestGroups().method().for_layer(spec).create(spec)


def test_nibbles_are_outputs_in_their_order() -> None:
    """A word of eight outputs, written out."""
    word = sum(output << (4 * place) for place, output in enumerate((0, 2, 4, 6, 1, 3, 5, 7)))
    word = word - 2**32 if word >= 2**31 else word
    assert _unpacked(torch.tensor([[word]], dtype=torch.int32)).tolist() == [list(range(8))]


def test_unknown_keys_are_logged(caplog: pytest.LogCaptureFixture) -> None:
    ops = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})
    config = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": 32,
        "version": "gemm",
        "backend": None,
    }
    AWQ.from_config(config, ops)
    assert not caplog.records
    AWQ.from_config({**config, "frobnicate": 1}, ops)
    assert "frobnicate" in caplog.text
