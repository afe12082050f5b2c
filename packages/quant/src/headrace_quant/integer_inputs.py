"""Layers whose activations become integers of 8 bits by other rules than a symmetric scale for each token:
with scales that calibration found, or with zero points.

``x`` enters as ``(q - zero_point) * scale``, ``q = round(clamp(x / scale + zero_point, -128, 127))``, ties to
even, all in float32 (compressed-tensors, ``quantize`` and ``dequantize``). What is multiplied is the integer
``q - zero_point``, which every dtype of activations holds exactly; a scale that is known while loading is
multiplied into the weight's scales, one that belongs to a token into the product.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from headrace_core.errors import WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, TensorSpec

if TYPE_CHECKING:
    from torch import Tensor

SCALE, ZERO = "input_scale", "input_zero_point"
_LOWEST, _HIGHEST = -128, 127


@dataclass(frozen=True, slots=True)
class InputForm:
    """How a layer's activations become integers."""

    dynamic: bool
    """Scales are those of tokens, found at run time; else the module has one."""
    has_zeros: bool


class _Part(NamedTuple):
    """Modules that read activations of one scale: a whole layer, or one of its parts."""

    weight: Any
    scale: float
    zero: int


class IntegerInputs(LinearMethod):
    """A method of integer weights, with activations made integers in front of it.

    Args:
        inner: multiplies activations as they are.
        form: of the activations.
        scales: suffix of the weight's scales, which take in a scale that is known while loading.
    """

    def __init__(self, inner: LinearMethod, form: InputForm, scales: str) -> None:
        self.inner, self.form, self._scales = inner, form, scales
        self.needs_whole = inner.needs_whole  # type: ignore[misc]

    def create(self, spec: LinearSpec) -> Mapping[str, TensorSpec]:
        wanted = dict(self.inner.create(spec))
        if not self.form.dynamic:
            parts = (max(1, len(spec.out_parts)),)
            wanted[SCALE] = TensorSpec(parts, "float32", by_part=True, any_float=True)
            if self.form.has_zeros:
                wanted[ZERO] = TensorSpec(parts, "int8", by_part=True)
        return wanted

    def finish(self, spec: LinearSpec, tensors: Mapping[str, Tensor]) -> Any:
        """Raises: WeightsError: a scale is not a number above 0."""
        if self.form.dynamic:
            return self.inner.finish(spec, tensors)
        own = dict(tensors)
        scales = own.pop(SCALE).flatten().tolist()
        zeros = own.pop(ZERO).flatten().tolist() if self.form.has_zeros else [0] * len(scales)
        for scale in scales:
            if not 0 < scale < float("inf"):
                raise WeightsError(f"layer {spec.name!r}: {SCALE} = {scale}: must be above 0")
        if len(set(zip(scales, zeros, strict=True))) == 1:
            return [self._part(spec, own, scales[0], zeros[0])]
        return [
            self._part(replace(spec, out_parts=(size,), part_names=()), part, scale, zero)
            for size, part, scale, zero in zip(
                spec.out_parts, self._divided(spec, own), scales, zeros, strict=True
            )
        ]

    def _part(
        self, spec: LinearSpec, tensors: Mapping[str, Tensor], scale: float, zero: int
    ) -> _Part:
        scaled = {**tensors, self._scales: tensors[self._scales].float() * scale}
        return _Part(self.inner.finish(spec, scaled), scale, zero)

    def _divided(
        self, spec: LinearSpec, tensors: Mapping[str, Tensor]
    ) -> Iterator[dict[str, Tensor]]:
        """The tensors of each module."""
        wanted = self.inner.create(spec)
        for index in range(len(spec.out_parts)):
            part = {}
            for name, tensor in tensors.items():
                dim = wanted[name].part_dim
                if dim is not None:
                    ones = wanted[name].by_part
                    sizes = [1] * len(spec.out_parts) if ones else _sizes(spec, tensor.shape[dim])
                    tensor = torch.split(tensor, sizes, dim)[index].contiguous()
                part[name] = tensor
            yield part

    def apply(self, state: Any, x: Tensor, bias: Tensor | None = None) -> Tensor:
        if not self.form.dynamic:
            if len(state) == 1:
                (only,) = state
                return self.inner.apply(only.weight, _integers(x, only.scale, only.zero), bias)
            parts = [
                self.inner.apply(part.weight, _integers(x, part.scale, part.zero)) for part in state
            ]
            joined = torch.cat(parts, dim=-1)
            return joined if bias is None else joined + bias
        scale, zero = _of_tokens(x)
        out = self.inner.apply(state, _integers(x, scale, zero)) * scale
        return (out if bias is None else out + bias).to(x.dtype)


def _sizes(spec: LinearSpec, rows: int) -> list[int]:
    """Rows of each module in a tensor that may have several outputs in a row (words of zero points)."""
    return [size * rows // spec.out_features for size in spec.out_parts]


def _integers(x: Tensor, scale: Tensor | float, zero: Tensor | int) -> Tensor:
    """``q - zero`` [T, K] in x's dtype."""
    codes = (x.float() / scale + zero).clamp(_LOWEST, _HIGHEST).round()
    return (codes - zero).to(x.dtype)


def _of_tokens(x: Tensor) -> tuple[Tensor, Tensor]:
    """Scales and zero points [T, 1] float32 of rows, whose range takes in 0."""
    low = x.amin(dim=-1, keepdim=True).float().clamp(max=0)
    high = x.amax(dim=-1, keepdim=True).float().clamp(min=0)
    scale = (high - low) / (_HIGHEST - _LOWEST)
    scale = torch.where(scale == 0, torch.finfo(torch.float32).eps, scale)
    return scale, torch.round(_LOWEST - low / scale).clamp(_LOWEST, _HIGHEST)
