"""FP8 by FP8: llm-compressor's FP8_DYNAMIC, the method ``fp8`` and the user's choice are transformers' models
with the same rounding in front of their layers."""

from __future__ import annotations

import dataclasses
import subprocess
import sys
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from quantized_checkpoints import Dense, FusedModules, PackedCheckpoint
from torch import Tensor

from headrace import LLM
from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_models.loading.loader import load_model
from headrace_models.quantization import quant_method
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context

E4M3 = torch.float8_e4m3fn


def entered(x: Tensor) -> Tensor:
    """Activations as they enter a product."""
    steps = x.abs().amax(-1, keepdim=True) / 448
    return (x / steps).clamp(-448, 448).to(E4M3).float() * steps


class Fp8Inputs(PackedCheckpoint):
    """A sum in another order may round an activation to the next number of E4M3, which is up to an eighth
    larger: that bounds the tolerance. What rounding itself does, test_activations_are_rounded measures."""

    device: ClassVar[tuple[str, tuple[int, int] | None]] = ("cpu", None)
    activations: ClassVar[str] = "fp8"
    tolerance = 0.4
    least_error = 0.6
    flips_ties = False

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        name, capability = self.device
        method = quant_method(
            info, None, context.ops, device=name, device_capability=capability,
            activations=self.activations,
        )  # fmt: skip
        return load_model(
            info, dataclasses.replace(context, quant=method), load=LoadConfig(**settings)
        )

    def make_checkpoint(self, folder: Path, seed: int = 0, **overrides: Any) -> Checkpoint:
        made = super().make_checkpoint(folder, seed, **overrides)
        for name, module in made.reference.named_modules():
            if name.endswith("_proj") and not name.endswith(self.plain):
                module.register_forward_pre_hook(lambda _, inputs: (entered(inputs[0]),))
        return made

    def test_tensor_parallel(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """A rank rounds its own share of a token, with a step of its own."""
        self.tolerance = 1.0  # type: ignore[misc]
        super().test_tensor_parallel(checkpoint, model)

    def test_activations_are_rounded(self, checkpoint: Checkpoint) -> None:
        """Left as they are, they make logits that differ by more than order does; and by not much."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        prompt, logits = self.prompt(12), []
        for activations in ("float", self.activations):
            other = type("Other", (type(self),), {"activations": activations})()
            model = other.load(info, build_context(info))
            logits.append(torch.log_softmax(PagedDriver(model).step({"a": prompt}), -1))
        wanted = checkpoint.logprobs(prompt)
        errors = [float((each - wanted).double().square().mean().sqrt()) for each in logits]
        assert 10 * errors[1] < errors[0] < 0.5

    def test_a_cpu_leaves_them(self, checkpoint: Checkpoint) -> None:
        """``auto``, as on any device without units for FP8: the bits of ``float``."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        prompt, logits = self.prompt(9), []
        for activations, device in (
            ("float", ("cpu", None)),
            ("auto", ("cpu", None)),
            ("auto", ("cuda", (8, 6))),
        ):
            members = {"activations": activations, "device": device}
            model = type("Other", (type(self),), members)().load(info, build_context(info))
            logits.append(PagedDriver(model).step({"a": prompt}))
        assert torch.equal(logits[0], logits[1])
        assert torch.equal(logits[0], logits[2])


class Compressed(Fp8Inputs):
    quantization: ClassVar = {
        "quant_method": "compressed-tensors", "format": "float-quantized",
        "quantization_status": "compressed", "kv_cache_scheme": None,
        "ignore": ["lm_head", "model.layers.0.self_attn.v_proj"],
        "config_groups": {"group_0": {
            "targets": ["Linear"],
            "weights": {
                "num_bits": 8, "type": "float", "symmetric": True, "dynamic": False,
                "strategy": "channel",
            },
            "input_activations": {
                "num_bits": 8, "type": "float", "symmetric": True, "dynamic": True,
                "strategy": "token",
            },
        }},
    }  # fmt: skip

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        scales = weight.abs().amax(1, keepdim=True) / 448
        codes = (weight / scales).to(E4M3)
        return {"weight": codes, "weight_scale": scales}, codes.float() * scales


class TestChosen(Dense, Compressed):
    """By the user, on a CPU whose kernels are the reference's."""


class TestFoundOnHopper(FusedModules, Compressed):
    """Without a word, on a GPU that multiplies FP8 (of which only the name is there)."""

    device = ("cuda", (9, 0))
    activations = "auto"


class TestBlocksOnAda(Dense, Fp8Inputs):
    """The method ``fp8`` in blocks: a step for a token all the same."""

    device = ("cuda", (8, 9))
    activations = "auto"
    scales = "weight_scale_inv"
    quantization: ClassVar = {
        "quant_method": "fp8", "activation_scheme": "dynamic", "weight_block_size": [64, 64],
        "modules_to_not_convert": ["lm_head", "model.layers.0.self_attn.v_proj"],
    }  # fmt: skip

    def packed(self, weight: Tensor) -> tuple[dict[str, Tensor], Tensor]:
        rows, columns = weight.shape
        blocks = weight.view(rows // 64, 64, columns // 64, 64)
        scales = blocks.abs().amax((1, 3)) / 448
        codes = (blocks / scales[:, None, :, None]).to(E4M3)
        meant = codes.float() * scales[:, None, :, None]
        return {
            "weight": codes.view(rows, columns), "weight_scale_inv": scales,
        }, meant.reshape(rows, columns)  # fmt: skip


@pytest.mark.parametrize("quantization", ["fp8", "int8"])
def test_native_kernels_refuse_it(quantization: str) -> None:
    """While the model loads, by the setting's name."""
    match = r"model\.quantization_activations = 'fp8': on a CPU.*'float', 'int8'"
    with pytest.raises(ConfigError, match=match):
        LLM(quantization=quantization, quantization_activations="fp8")


def test_the_flag_is_refused_on_a_cpu() -> None:
    done = subprocess.run(
        [sys.executable, "-m", "headrace", "generate", "--prompt", "Hello", "--quantization", "fp8",
         "--quantization-activations", "fp8"], capture_output=True, text=True, timeout=120,
    )  # fmt: skip
    assert done.returncode != 0
    assert "model.quantization_activations = 'fp8'" in done.stderr
    assert "Traceback" not in done.stderr
