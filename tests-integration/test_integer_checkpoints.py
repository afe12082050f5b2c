"""Checkpoints of integers, as GPTQModel and AutoAWQ write them, are transformers' models with the floats that
the integers stand for: alone, batched, chunked, over two ranks, and in mixtures of experts."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
from quantized_checkpoints import Conv1D, Dense, IntegerConformance, Mixture
from torch import Tensor

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_models.quantization import quant_method
from headrace_testing.model.decoders import Checkpoint, build_context, run_ranks
from headrace_testing.model.quantized_layers import awq_tensors, gptq_tensors


class GPTQCheckpoint(IntegerConformance):
    bits: ClassVar[int] = 4
    sorts: ClassVar[bool] = False
    symmetric: ClassVar[bool] = True
    eight: ClassVar[tuple[str, ...]] = ("down_proj",)
    """Ends of the names of layers in 8 bits."""
    plain: ClassVar[tuple[str, ...]] = ()
    """Ends of the names of layers that the config leaves in floats."""

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name.endswith(self.plain or ("-",)):
            return {"weight": weight}, weight
        bits = 8 if name.endswith(self.eight) else self.bits
        return gptq_tensors(
            weight, bits=bits, group_size=32, symmetric=self.symmetric, by_importance=self.sorts
        )


def gptq(**fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "gptq", "bits": 4, "group_size": 32, "desc_act": False, "sym": True,
        "checkpoint_format": "gptq", "dynamic": {"+:.*\\.down_proj": {"bits": 8}}, **fields,
    }  # fmt: skip


class TestGPTQ(Dense, GPTQCheckpoint):
    quantization = gptq()


class TestGPTQOfThreeBits(Dense, GPTQCheckpoint):
    """Values straddle words; one module is left in floats."""

    bits = 3
    symmetric = False
    plain = ("0.self_attn.o_proj",)
    quantization = gptq(
        bits=3,
        sym=False,
        dynamic={"-:.*\\.0\\.self_attn\\.o_proj": {}, "+:.*\\.down_proj": {"bits": 8}},
    )
    side_file = "quantize_config.json"


class TestGPTQSorted(Dense, GPTQCheckpoint):
    sorts = True
    quantization = gptq(desc_act=True)
    tensor_parallel = 1
    refusal = "tensor_parallel_size = 2: set 1"

    def test_two_ranks_are_refused(self, checkpoint: Checkpoint) -> None:
        info = self.resolve(checkpoint.path, max_model_len=64)
        with pytest.raises(UnsupportedModel, match=self.refusal):
            run_ranks(2, lambda group: self.load(info, build_context(info, communicator=group)))


class TestGPTQMixedParts(Dense, GPTQCheckpoint):
    """A value in floats beside a query and a key in 4 bits; gate in 8 bits beside up in 4."""

    plain = ("0.self_attn.v_proj",)
    eight = ("down_proj", "1.mlp.gate_proj", "1.self_attn.k_proj")
    quantization = gptq(
        dynamic={
            "-:.*\\.0\\.self_attn\\.v_proj": {},
            "+:.*(down_proj|\\.1\\.mlp\\.gate_proj|\\.1\\.self_attn\\.k_proj)": {"bits": 8},
        }
    )


class TestGPTQMixture(Mixture, GPTQCheckpoint):
    quantization = gptq()


class TestGPTQConv1D(Conv1D, GPTQCheckpoint):
    """One module in 8 bits, one in floats."""

    eight = ("mlp.c_proj",)
    plain = ("0.attn.c_proj",)
    quantization = gptq(
        dynamic={"+:.*\\.mlp\\.c_proj": {"bits": 8}, "-:.*\\.0\\.attn\\.c_proj": {}}
    )


class AWQCheckpoint(IntegerConformance):
    quantization: ClassVar[dict[str, Any]] = {
        "quant_method": "awq", "bits": 4, "group_size": 32, "zero_point": True, "version": "gemm",
        "modules_to_not_convert": ["1.self_attn.o_proj"],
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name.endswith("1.self_attn.o_proj"):
            return {"weight": weight}, weight
        return awq_tensors(weight, group_size=32)


class TestAWQ(Dense, AWQCheckpoint):
    pass


class TestAWQMixture(Mixture, AWQCheckpoint):
    pass


class TestAutoRound(TestGPTQ):
    quantization: ClassVar = {
        "quant_method": "auto-round", "bits": 4, "group_size": 32, "sym": True, "data_type": "int",
        "packing_format": "auto_round:auto_gptq", "block_name_to_quantize": "model.layers",
        "extra_config": {".*down_proj": {"bits": 8}},
    }  # fmt: skip
    side_file = "quantization_config.json"


@pytest.mark.parametrize(("wanted", "is_served"), [("gptq_marlin", True), ("awq", False)])
def test_names_of_kernels_are_names_of_the_format(
    wanted: str, is_served: bool, tmp_path: Path
) -> None:
    suite = TestGPTQ()
    suite.make_checkpoint(tmp_path)
    info = suite.resolve(tmp_path, max_model_len=64)
    context = build_context(info)
    if is_served:
        assert quant_method(info, wanted, context.ops, device="cpu").name == "gptq"
        return
    with pytest.raises(ConfigError, match=r"'awq'.*'gptq'"):
        quant_method(info, wanted, context.ops, device="cpu")
