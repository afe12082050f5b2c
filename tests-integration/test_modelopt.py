"""Exports of Model Optimizer are transformers' models with what they mean."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from quantized_checkpoints import Dense, FusedModules, Mixture, PackedCheckpoint, fp4
from torch import Tensor

from headrace_core.errors import ConfigError
from headrace_models.quantization import quant_method
from headrace_testing.model.decoders import build_context


def export(algorithm: str, **fields: Any) -> dict[str, Any]:
    return {
        "quant_method": "modelopt", "quant_algo": algorithm, "kv_cache_scheme": None,
        "ignore": ["lm_head", "model.layers.0.self_attn.v*", "*.mlp.gate"], **fields,
    }  # fmt: skip


class Nvfp4(PackedCheckpoint):
    quantization = export("NVFP4", group_size=16)

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        outer = weight.abs().max() / (448 * 6)
        largest = weight.reshape(len(weight), -1, 16).abs().amax(-1)
        scales = (largest / 6 / outer).to(torch.float8_e4m3fn)
        codes, meant = fp4(weight, scales.float() * outer)
        return {
            "weight": codes, "weight_scale": scales, "weight_scale_2": outer,
            "input_scale": torch.tensor(0.1),
        }, meant  # fmt: skip


class TestNvfp4(Dense, Nvfp4):
    pass


class TestNvfp4Mixture(Mixture, Nvfp4):
    pass


class TestNvfp4FusedModules(FusedModules, Nvfp4):
    """A module's outer scale is that of all its parts."""


class Fp8(PackedCheckpoint):
    quantization = export("FP8", kv_cache_scheme={"num_bits": 8, "type": "float"})

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scale = weight.abs().max() / 448
        codes = (weight / scale).to(torch.float8_e4m3fn)
        tensors = {"weight": codes, "weight_scale": scale, "input_scale": torch.tensor(0.1)}
        return tensors, codes.float() * scale

    def test_scales_count(self) -> None:
        """One number has no order."""


class TestFp8(Dense, Fp8):
    pass


class TestFp8FusedModules(FusedModules, Fp8):
    pass


class TestFp8Mixture(Mixture, Fp8):
    pass


class TestFp8Blocks(Dense, PackedCheckpoint):
    """Blocks of 128, which neither the parts of a fused layer nor a rank's share of the inputs end with."""

    quantization = export("FP8_PB_WO")

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, inputs = (-(-size // 128) for size in weight.shape)
        padded = torch.zeros(128 * rows, 128 * inputs)
        padded[: weight.shape[0], : weight.shape[1]] = weight
        scales = padded.view(rows, 128, inputs, 128).abs().amax((1, 3)) / 448
        wide = scales.repeat_interleave(128, 0).repeat_interleave(128, 1)
        wide = wide[: weight.shape[0], : weight.shape[1]]
        codes = (weight / wide).to(torch.float8_e4m3fn)
        stored = scales.view(rows, 1, inputs, 1)
        return {"weight": codes, "weight_scale": stored}, codes.float() * wide


@pytest.mark.parametrize("stored", ["modelopt", "modelopt_fp4", "modelopt_mxfp8"])
@pytest.mark.parametrize("suite", [TestNvfp4(), TestFp8()], ids=["nvfp4", "fp8"])
def test_names_of_other_kinds_are_refused_before_weights_are_read(
    suite: PackedCheckpoint, stored: str, tmp_path: Path
) -> None:
    """The checkpoint's name and the user's may each be that of one kind: both must read it."""
    suite.make_checkpoint(tmp_path)
    (tmp_path / "model.safetensors").unlink()
    config = json.loads((tmp_path / "config.json").read_text())
    config["quantization_config"]["quant_method"] = stored
    (tmp_path / "config.json").write_text(json.dumps(config))
    info = suite.resolve(tmp_path, max_model_len=64)
    ops = build_context(info).ops
    kinds = {"modelopt", "modelopt_fp4"} if isinstance(suite, TestNvfp4) else {"modelopt"}
    for wanted in (None, "modelopt", "modelopt_fp4", "modelopt_mxfp8"):
        if stored in kinds and {wanted} <= {None, *kinds}:
            assert quant_method(info, wanted, ops, device="cpu").name in (stored, wanted)
            continue
        with pytest.raises(ConfigError) as caught:
            quant_method(info, wanted, ops, device="cpu")
        named = wanted if wanted not in (None, *kinds) else stored
        assert repr(named) in str(caught.value), (wanted, str(caught.value))
