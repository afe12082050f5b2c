"""``int4``, ``int4_g32``, ``int8`` and ``fp8`` in the container ``compressed-tensors``.

Source: github.com/vllm-project/compressed-tensors (documentation of the formats).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, ClassVar

import torch
from torch import Tensor

from headrace_core.linear import WeightEncoder
from headrace_quant.encoders.least_squares import columns, finite, inverse, rows_at_once, symmetric

_PER_WORD = 8
"""Codes of 4 bits."""
_E4M3 = torch.float8_e4m3fn
_LARGEST_E4M3 = 448.0


def _in_groups(size: int) -> Mapping[str, Any]:
    return {"num_bits": 4, "type": "int", "strategy": "group", "group_size": size}


class ContainerEncoder(WeightEncoder):
    """Base: one group of all linear layers."""

    form: ClassVar[str]
    weights: ClassVar[Mapping[str, Any]]
    """Arguments of the group's weights."""
    activations: ClassVar[Mapping[str, Any] | None] = None

    def config(self, encoded: Sequence[str], left: Sequence[str]) -> Mapping[str, Any]:
        group = {
            "targets": ["Linear"],
            "weights": {"dynamic": False, "symmetric": True, **self.weights},
            "input_activations": None if self.activations is None else dict(self.activations),
            "output_activations": None,
        }
        return {
            "quant_method": "compressed-tensors",
            "format": self.form,
            "quantization_status": "compressed",
            "config_groups": {"group_0": group},
            "ignore": list(left),
        }


class Int4Encoder(ContainerEncoder):
    """4 bits in words of 32, a scale for every 128 inputs: 4.125 bits a weight."""

    form = "pack-quantized"
    group_size: ClassVar[int] = 128
    weights: ClassVar[Mapping[str, Any]] = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 128,
    }

    def encode(self, weight: Tensor) -> Mapping[str, Tensor] | None:
        rows, inputs = weight.shape
        if inputs % self.group_size:
            return None
        words = torch.empty(rows, inputs // _PER_WORD, dtype=torch.int32)
        scales = torch.empty(rows, inputs // self.group_size, dtype=_scale_dtype(weight))
        step = rows_at_once(inputs)
        shifts = torch.arange(0, 32, 4)
        for start in range(0, rows, step):
            own = slice(start, start + step)
            groups = columns(weight[own], self.group_size)
            scales[own] = symmetric(groups, -8, 7).view(-1, inputs // self.group_size)
            finer = inverse(scales[own].float().view(-1))
            codes = groups.mul_(finer).round_().clamp_(-8, 7) + 8
            fields = codes.T.long().reshape(-1, inputs // _PER_WORD, _PER_WORD) << shifts
            words[own] = fields.sum(-1).to(torch.int32)  # beyond 31 bits it wraps around
        return {
            "weight_packed": words,
            "weight_scale": scales,
            "weight_shape": torch.tensor([rows, inputs]),
        }


class Int4Group32Encoder(Int4Encoder):
    """The same with a scale for every 32 inputs: 4.5 bits a weight."""

    group_size = 32
    weights: ClassVar[Mapping[str, Any]] = {
        "num_bits": 4,
        "type": "int",
        "strategy": "group",
        "group_size": 32,
    }


class Int8Encoder(ContainerEncoder):
    """8 bits, a scale per output; activations in 8 bits, a scale per token found at run time."""

    form = "int-quantized"
    weights: ClassVar[Mapping[str, Any]] = {"num_bits": 8, "type": "int", "strategy": "channel"}
    activations: ClassVar[Mapping[str, Any] | None] = {
        "num_bits": 8, "type": "int", "strategy": "token", "dynamic": True, "symmetric": True,
    }  # fmt: skip

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]:
        codes = torch.empty(weight.shape, dtype=torch.int8)
        scales = torch.empty(weight.shape[0], 1, dtype=torch.float32)
        step = rows_at_once(weight.shape[1])
        for start in range(0, weight.shape[0], step):
            own = slice(start, start + step)
            wide = finite(weight[own])
            scale = wide.abs().amax(1, keepdim=True) / 127
            scales[own] = scale
            codes[own] = (wide / torch.where(scale == 0, 1.0, scale)).round().clamp(-127, 127)
        return {"weight": codes, "weight_scale": scales}


class Int8WeightOnlyEncoder(Int8Encoder):
    """The same with activations as they are."""

    activations = None


class Fp8Encoder(ContainerEncoder):
    """8-bit floats (E4M3), a scale per output; activations as they are."""

    form = "float-quantized"
    weights: ClassVar[Mapping[str, Any]] = {"num_bits": 8, "type": "float", "strategy": "channel"}

    def encode(self, weight: Tensor) -> Mapping[str, Tensor]:
        codes = torch.empty(weight.shape, dtype=_E4M3)
        scales = torch.empty(weight.shape[0], 1, dtype=torch.float32)
        step = rows_at_once(weight.shape[1])
        for start in range(0, weight.shape[0], step):
            own = slice(start, start + step)
            wide = finite(weight[own])
            scale = wide.abs().amax(1, keepdim=True) / _LARGEST_E4M3
            scales[own] = scale
            cut = (wide / torch.where(scale == 0, 1.0, scale)).clamp(-_LARGEST_E4M3, _LARGEST_E4M3)
            codes[own] = cut.to(_E4M3)
        return {"weight": codes, "weight_scale": scales}


def _scale_dtype(weight: Tensor) -> torch.dtype:
    return weight.dtype if weight.dtype in (torch.float16, torch.bfloat16) else torch.float16
