"""Checkpoints of bitsandbytes are transformers' models with the floats that its codes stand for; plain ones
become its NF4 while they are loaded."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantized_checkpoints import Conv1D, Dense, IntegerConformance, Mixture
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_core.parallel import Communicator
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_quant.code_books import FP4, NF4
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context, run_ranks


def four_bits(
    weight: Tensor, *, twice: bool, kind: str = "nf4"
) -> tuple[dict[str, Tensor], Tensor]:
    """As bitsandbytes packs NF4, or FP4, in blocks of 64 along the flattened weight."""
    book = torch.tensor({"nf4": NF4, "fp4": FP4}[kind])
    blocks = weight.reshape(-1, 64)
    largest = blocks.abs().amax(1)
    state: dict[str, Any] = {
        "quant_type": kind, "blocksize": 64, "dtype": "float32", "shape": list(weight.shape),
    }  # fmt: skip
    tensors = {"weight.absmax": largest, "weight.quant_map": book}
    if twice:
        levels, offset = torch.linspace(-1, 1, 256), float(largest.mean())
        outer = torch.stack([(part - offset).abs().max() for part in largest.split(256)])
        where = torch.arange(len(largest)) // 256
        chosen = ((largest - offset) / outer[where])[:, None].sub(levels).abs().argmin(1)
        tensors |= {
            "weight.absmax": chosen.byte(), "weight.nested_absmax": outer,
            "weight.nested_quant_map": levels,
        }  # fmt: skip
        state |= {"nested_blocksize": 256, "nested_dtype": "float32", "nested_offset": offset}
        largest = levels[chosen] * outer[where] + offset
    codes = (blocks[..., None] - book * largest[:, None, None]).abs().argmin(-1)
    pairs = codes.view(-1, 2).byte()
    tensors |= {
        "weight": (pairs[:, 0] << 4 | pairs[:, 1])[:, None],
        f"weight.quant_state.bitsandbytes__{kind}": torch.tensor(
            list(json.dumps(state).encode())
        ).byte(),
    }
    return tensors, (book[codes] * largest[:, None]).view(weight.shape)


class NF4Checkpoint(IntegerConformance):
    scales = "weight.absmax"
    twice: ClassVar[bool] = False
    plain: ClassVar[str] = "0.self_attn.v_proj"
    quantization: ClassVar[dict[str, Any]] = {
        "quant_method": "bitsandbytes", "load_in_4bit": True, "load_in_8bit": False,
        "bnb_4bit_quant_type": "nf4", "bnb_4bit_use_double_quant": False,
        "bnb_4bit_compute_dtype": "bfloat16",
        "llm_int8_skip_modules": ["lm_head", "model.layers.0.self_attn.v_proj"],
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if name.endswith(self.plain):
            return {"weight": weight}, weight
        return four_bits(weight, twice=self.twice)


class TestNF4(Dense, NF4Checkpoint):
    """A value of one layer in floats, beside a query and a key in 4 bits."""


class TestNF4Twice(Dense, NF4Checkpoint):
    """Rows of 160 inputs: blocks straddle rows, and a rank's rows of 96 end within one."""

    twice = True

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(hidden_size=160, **overrides)


class TestNF4Mixture(Mixture, NF4Checkpoint):
    pass


class TestNF4Conv1D(Conv1D, NF4Checkpoint):
    plain = "0.attn.c_proj"
    quantization: ClassVar = {
        **NF4Checkpoint.quantization, "llm_int8_skip_modules": ["lm_head", "transformer.h.0.attn.c_proj"],
    }  # fmt: skip


class Int8Checkpoint(IntegerConformance):
    scales = "SCB"
    quantization: ClassVar[dict[str, Any]] = {
        "quant_method": "bitsandbytes", "load_in_4bit": False, "load_in_8bit": True,
        "llm_int8_threshold": 6.0, "llm_int8_skip_modules": None,
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.abs().amax(1)
        codes = (weight * (127 / largest[:, None])).round().to(torch.int8)
        tensors = {"weight": codes, "SCB": largest, "weight_format": torch.tensor(0).byte()}
        return tensors, codes * largest[:, None] / 127


class TestInt8(Dense, Int8Checkpoint):
    pass


class TestInt8Mixture(Mixture, Int8Checkpoint):
    pass


class TestInt8Conv1D(Conv1D, Int8Checkpoint):
    pass


class TestOfTwoRanks:
    """Rows that a rank cannot have."""

    def test_refused_before_weights_are_read(self, tmp_path: Path) -> None:
        suite = TestNF4()
        suite.make_checkpoint(tmp_path, intermediate_size=144)
        info = suite.resolve(tmp_path, max_model_len=64)
        (tmp_path / "model.safetensors").unlink()
        with pytest.raises(ConfigError, match=r"down_proj.*in_features = 72.*tensor_parallel_size"):
            run_ranks(2, lambda group: suite.load(info, build_context(info, communicator=group)))


class EveryLayer(TestNF4):
    """Blocks of 64 end where a rank's inputs do."""

    plain = "-"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(intermediate_size=256, **overrides)


class EveryConv1D(TestNF4Conv1D):
    plain = "-"

    def hf_config(self, **overrides: Any) -> Any:
        return super().hf_config(n_inner=256, **overrides)


@pytest.mark.parametrize("name", ["bitsandbytes", "nf4"])
@pytest.mark.parametrize("suite", [EveryLayer(), EveryConv1D()], ids=["linear", "conv1d"])
def test_while_loading(suite: NF4Checkpoint, name: str, tmp_path: Path) -> None:
    """A plain checkpoint becomes what bitsandbytes makes of it: blocks of 64, one scale each."""
    expected: Checkpoint = suite.make_checkpoint(tmp_path / "coded")
    plain = tmp_path / "plain"
    super(IntegerConformance, suite).make_checkpoint(plain)
    assert all(t.is_floating_point() for t in load_file(plain / "model.safetensors").values())
    info = suite.resolve(plain, max_model_len=64)
    prompt = suite.prompt(20)

    def work(group: Communicator) -> Tensor:
        context = build_context(info, communicator=group)
        method = quant_method(info, name, context.ops, device="cpu")
        model = load_model(info, dataclasses.replace(context, quant=method))
        return PagedDriver(model).step({"a": prompt})

    for ranks in (1, 2):
        for logits in run_ranks(ranks, work):
            suite.assert_close(logits, expected.logprobs(prompt))
