"""Exports of Quark and TorchAO are transformers' models with what they mean."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any, ClassVar
from unittest import mock

import torch
from quantized_checkpoints import Dense, Mixture, PackedCheckpoint, fp4
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.model import CausalLM
from headrace_testing.model.decoders import Checkpoint, PagedDriver


class Quark(PackedCheckpoint):
    """MXFP4, attention's output in FP8, one layer in floats."""

    quantization: ClassVar[dict[str, Any]] = {
        "quant_method": "quark", "exclude": ["lm_head", "*.gate", "model.layers.0.self_attn.v_proj"],
        "export": {"pack_method": "reorder", "weight_format": "real_quantized"},
        "global_quant_config": {
            "weight": {"dtype": "fp4", "qscheme": "per_group", "group_size": 32, "scale_format": "e8m0"},
            "input_tensors": {"dtype": "fp4", "is_dynamic": True},
        },
        "layer_quant_config": {"*o_proj": {
            "weight": {"dtype": "fp8_e4m3", "qscheme": "per_tensor"},
            "input_tensors": {"dtype": "fp8_e4m3", "is_dynamic": False},
        }},
    }  # fmt: skip

    def module(self, name: str, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        if not name.endswith("o_proj"):
            return super().module(name, weight)
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
        return tensors, codes.float() * scale

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        largest = weight.reshape(len(weight), -1, 32).abs().amax(-1)
        exponents = (largest / 6).log2().ceil()
        codes, meant = fp4(weight, exponents.exp2())
        return {"weight": codes, "weight_scale": (exponents + 127).byte()}, meant


class TestQuark(Dense, Quark):
    pass


class TestQuarkMixture(Mixture, Quark):
    pass


def torchao(kind: str, **data: Any) -> dict[str, Any]:
    """One layer in floats."""
    entries = {
        "_default": {"_type": kind, "_data": data}, "model.layers.0.self_attn.v_proj": None,
    }  # fmt: skip
    default = {"_type": "ModuleFqnToConfig", "_data": {"module_fqn_to_config": entries}}
    return {"quant_method": "torchao", "quant_type": {"default": default}}


class IntxUnpackedToInt8Tensor(Tensor):
    """As TorchAO's of this name is stored."""

    @classmethod
    def __torch_dispatch__(cls, op: object, *_: object) -> object:
        raise AssertionError(op)


def pickle_torchao(path: Path, into: Path) -> None:
    """Write a checkpoint again as ``torch.save`` writes one with TorchAO's tensors."""
    shutil.copy(path / "config.json", into)
    tensors, parts = {}, {}
    for name, tensor in load_file(path / "model.safetensors").items():
        module, found, part = name.partition("._weight_")
        if found:
            parts.setdefault(f"{module}.weight", {})[part] = tensor
        else:
            tensors[name] = tensor
    for name, own in parts.items():
        kind = IntxUnpackedToInt8Tensor
        tensors[name] = Tensor._make_wrapper_subclass(kind, own["qdata"].shape, dtype=torch.float32)
        vars(tensors[name]).update(own, block_size=(1, 32), target_dtype=torch.int4)
    library = ModuleType("torchao.quantization")
    library.IntxUnpackedToInt8Tensor = IntxUnpackedToInt8Tensor  # type: ignore[attr-defined]
    with mock.patch.dict(
        sys.modules, {"torchao": ModuleType("torchao"), library.__name__: library}
    ):
        IntxUnpackedToInt8Tensor.__module__ = library.__name__
        torch.save(tensors, into / "pytorch_model.bin")


class TestTorchAO(Dense, PackedCheckpoint):
    """Integers of 4 bits, a byte each in the file and half a byte in memory."""

    scales = "_weight_scale"
    quantization = torchao(
        "IntxWeightOnlyConfig",
        weight_dtype={"_type": "torch.dtype", "_data": "int4"},
        granularity={"_type": "PerGroup", "_data": {"group_size": 32}},
    )

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        groups = weight.reshape(len(weight), -1, 32)
        least, most = groups.amin(-1), groups.amax(-1)
        scales = (most - least) / 15
        zeros = (-8 - least / scales).round().clamp(-8, 7)
        codes = (groups / scales[..., None] + zeros[..., None]).round().clamp(-8, 7)
        meant = ((codes - zeros[..., None]) * scales[..., None]).view(weight.shape)
        integers = {"_weight_qdata": codes.view(weight.shape), "_weight_zero_point": zeros}
        stored = {name: tensor.to(torch.int8) for name, tensor in integers.items()}
        return {**stored, "_weight_scale": scales}, meant

    def test_pickled_file(self, checkpoint: Checkpoint, model: CausalLM, tmp_path: Path) -> None:
        """The same layers as tensors of TorchAO's class."""
        pickle_torchao(checkpoint.path, tmp_path)
        prompt = self.prompt(9)
        logits = PagedDriver(self.open(tmp_path)).step({"a": prompt})
        assert torch.equal(logits, PagedDriver(model).step({"a": prompt}))


class TestTorchAOFp8(Dense, PackedCheckpoint):
    """Messages name FP8 as other formats do."""

    scales = "_weight_scale"
    quantization = torchao("Float8WeightOnlyConfig", granularity={"_type": "PerRow", "_data": {}})

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(torch.float8_e4m3fn)
        return {"_weight_qdata": codes, "_weight_scale": scales}, codes.float() * scales

    def _assert_refused(self, folder: Path, *words: str) -> None:
        super()._assert_refused(
            folder, *(word.replace("_weight_qdata", "weight") for word in words)
        )
