"""``fp8``: weights in 8-bit floats (E4M3) with a scale for each block, or one for each tensor.

``weight`` float8_e4m3fn [N, K] and ``weight_scale_inv`` [ceil(N / n), ceil(K / k)], whose numbers multiply
the blocks of n rows and k columns (``weight_block_size``; DeepSeek-AI 2024, arXiv:2412.19437, section 3.3);
without blocks one number: ``weight_scale_inv``, ``weight_scale``, or Mistral's ``qscale_weight``. E4M3 is
that of the OCP 8-bit Floating Point Specification: no infinities, one NaN for each sign.

The weights become floats of the activations' dtype before they are fused or divided, so that blocks need
not fit heads or ranks; nothing is multiplied in 8 bits. Which layers are quantized is read off the
tensors: one in FP8 must have its scale, one in floats is as it is. Scales of activations are not needed.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar, NamedTuple

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.none import PlainWeight
from headrace_quant.stated import listed_names, refusal

if TYPE_CHECKING:
    from torch import Tensor

E4M3 = torch.float8_e4m3fn
_BETWEEN_BIASES = 256.0
"""2 ** (15 - 7), of the exponents of float16 and E4M3."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_BLOCK_SCALE = "_scale_inv"
"""What a scale's name has behind that of its tensor."""
_SCALES = {"weight_scale": "weight", "qscale_weight": "weight"}
"""Other last parts of a scale's name -> that of its tensor."""
_ACTIVATION_SCALES = ("input_scale", "activation_scale", "qscale_act")
_SHOWN = 5

_SERVED: Mapping[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "dequantize": (False, True),
    "is_checkpoint_fp8_serialized": (True,),
    "modules_to_convert": ([],),
}
"""Key -> values that are served; null is served everywhere."""
_LISTS = ("modules_to_not_convert", "ignored_layers")
_BLOCK = "weight_block_size"


class _Stored(NamedTuple):
    """A tensor of a checkpoint that waits for another."""

    name: str
    tensor: Tensor
    file: Path


class Fp8(QuantMethod):
    """See the module's docstring.

    Args:
        block: rows and columns that share a scale; None: a tensor has one.
        has_activation_scales: pass over the scales of activations.
        ignore: entries of layers that the checkpoint says it left alone.
    """

    name: ClassVar[str] = "fp8"

    def __init__(
        self,
        ops: OpTable,
        block: tuple[int, int] | None,
        *,
        has_activation_scales: bool = False,
        ignore: Sequence[str] = (),
    ) -> None:
        self.ops, self.block = ops, block
        self.has_activation_scales = has_activation_scales
        self.ignore = {entry: _pattern(entry) for entry in ignore}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Fp8:
        if config is None:
            raise ConfigError(
                "quantization 'fp8' needs a checkpoint made with it: floats are not rounded to FP8 while "
                "loading; 'int8' rounds them to 8 bits",
                field="model.quantization",
            )
        for key, value in config.items():
            if key not in (*_SERVED, *_LISTS, _BLOCK) and value is not None:
                raise refusal(key, value, "absent: fp8 knows no such key")
        for key, served in _SERVED.items():
            value = config.get(key)
            if not any(value == one and type(value) is type(one) for one in (None, *served)):
                raise refusal(key, value, " or ".join(map(repr, served)))
        return cls(
            ops,
            _block(config.get(_BLOCK)),
            has_activation_scales=config.get("activation_scheme") == "static",
            ignore=[entry for key in _LISTS for entry in listed_names(key, config.get(key) or [])],
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        return PlainWeight(self.ops)

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """See :meth:`headrace_core.linear.QuantMethod.decode`. A tensor and its scale may be far apart:
        the one that comes first waits."""
        weights: dict[str, _Stored] = {}
        scales: dict[str, _Stored] = {}
        for stored in map(_Stored._make, tensors):
            if self._is_of_activations(stored.name):
                continue
            scaled = _scaled(stored.name)
            is_weight = scaled is None and stored.tensor.dtype == E4M3
            if passes_over(stored.name) or (scaled is None and not is_weight):
                yield stored
                continue
            key, waiting = (scaled or stored.name), weights if is_weight else scales
            if key in waiting:
                raise WeightsError(
                    f"{stored.file}: tensor {stored.name!r}: {waiting[key].name!r} of "
                    f"{waiting[key].file} is the same, and comes too"
                )
            waiting[key] = stored
            if key in weights and key in scales:
                weight, scale = weights.pop(key), scales.pop(key)
                yield key, self._floats(weight, scale, getattr(torch, dtype)), weight.file
        _check_none_waits(weights, scales)

    def _is_of_activations(self, name: str) -> bool:
        return self.has_activation_scales and name.rpartition(".")[2] in _ACTIVATION_SCALES

    def _floats(self, weight: _Stored, scale: _Stored, dtype: torch.dtype) -> Tensor:
        module = weight.name.rpartition(".")[0]
        for entry, pattern in self.ignore.items():
            if pattern.match(module) or module.endswith(entry):
                raise WeightsError(
                    f"{weight.file}: tensor {weight.name!r} is in FP8, but quantization_config says by "
                    f"{entry!r} that it was not converted"
                )
        _check_scale(weight, scale, self.block)
        out = dequantize(weight.tensor, scale.tensor, self.block, dtype)
        if out.numel() and not (_are_numbers(weight.tensor) and _are_finite(out)):
            raise WeightsError(
                f"{weight.file}: tensor {weight.name!r} holds what is no number, or none that "
                f"{str(dtype).removeprefix('torch.')} can hold"
            )
        return out


def dequantize(
    weight: Tensor, scale: Tensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    """weight [..., N, K] times the scales of its blocks [..., ceil(N / n), ceil(K / k)], or a single
    scale: multiplied in float32, rounded once. NaN is not known, see :func:`_are_numbers`."""
    factors = scale.float() * _BETWEEN_BIASES
    if block is None:
        return (_as_half(weight).float() * factors.reshape(())).to(dtype)
    (rows, columns), inputs = block, weight.shape[-1]
    out = torch.empty(weight.shape, dtype=dtype, device=weight.device)
    # By rows of blocks: float32 of a whole matrix would be four times what is read.
    for index, start in enumerate(range(0, weight.shape[-2], rows)):
        piece = _as_half(weight[..., start : start + rows, :]).float()
        wide = factors[..., index, :].repeat_interleave(min(columns, inputs), dim=-1)
        out[..., start : start + rows, :] = piece.mul_(wide[..., None, :inputs])
    return out


def _as_half(codes: Tensor) -> Tensor:
    """E4M3 over :data:`_BETWEEN_BIASES`, as float16 that has the same bits: many times as fast as torch's
    conversion, and exact, subnormal numbers included."""
    extended = codes.view(torch.int8).to(torch.int16)
    # 4 + 3 bits go below the topmost exponent bit, which the sign's extension has set.
    return extended.bitwise_left_shift_(7).bitwise_and_(~(1 << 14)).view(torch.float16)


def _are_numbers(codes: Tensor) -> bool:
    """Whether no code is E4M3's NaN, all ones but the sign."""
    return int((codes.view(torch.uint8) & 127).amax()) != 127


def _are_finite(values: Tensor) -> bool:
    smallest, largest = torch.aminmax(values)  # NaN is both
    return bool(smallest.isfinite() & largest.isfinite())


def _scaled(name: str) -> str | None:
    """Name of the tensor that the one of this name scales; None if it is no scale."""
    module, dot, last = name.rpartition(".")
    tensor = _SCALES.get(last)
    if last.endswith(_BLOCK_SCALE):
        tensor = last.removesuffix(_BLOCK_SCALE)
    return None if tensor is None else f"{module}{dot}{tensor}"


def _check_scale(weight: _Stored, scale: _Stored, block: tuple[int, int] | None) -> None:
    """Raises: WeightsError: it is none of such a weight."""
    found, dtype = list(scale.tensor.shape), scale.tensor.dtype
    of = f"the scale of {weight.name!r} {list(weight.tensor.shape)}"
    if block is None and scale.tensor.numel() != 1:
        raise WeightsError(
            f"{scale.file}: tensor {scale.name!r} has shape {found}; {of} must be one number, as "
            f"quantization_config has no {_BLOCK}"
        )
    if block is not None and found != (wanted := _scale_shape(weight, block)):
        raise WeightsError(
            f"{scale.file}: tensor {scale.name!r} has shape {found}; {of} in blocks of {list(block)} "
            f"must have {wanted}"
        )
    if dtype not in _SCALE_DTYPES:
        accepted = " or ".join(str(one).removeprefix("torch.") for one in _SCALE_DTYPES)
        raise WeightsError(
            f"{scale.file}: tensor {scale.name!r} has dtype {str(dtype).removeprefix('torch.')}; {of} "
            f"must have {accepted}"
        )
    numbers = scale.tensor.float()
    if not bool((numbers.isfinite() & (numbers >= 0)).all()):
        raise WeightsError(
            f"{scale.file}: tensor {scale.name!r}: {of} has a number that is negative, infinite or none"
        )


def _scale_shape(weight: _Stored, block: tuple[int, int]) -> list[int]:
    shape = list(weight.tensor.shape)
    if len(shape) < 2:
        raise WeightsError(
            f"{weight.file}: tensor {weight.name!r} has shape {shape}: FP8 in blocks has rows and columns"
        )
    return [*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=True))]


def _check_none_waits(weights: Mapping[str, _Stored], scales: Mapping[str, _Stored]) -> None:
    """Raises: WeightsError: a weight without a scale, or a scale without a weight."""
    for waiting, complaint in (
        (weights, "in FP8, but their scales (..._scale_inv or weight_scale) are missing"),
        (scales, "scales, but there is nothing in FP8 that they belong to"),
    ):
        if waiting:
            entries = list(waiting.values())
            more = f" and {len(entries) - _SHOWN} more" if len(entries) > _SHOWN else ""
            names = ", ".join(repr(entry.name) for entry in entries[:_SHOWN])
            raise WeightsError(f"{entries[0].file}: tensors {names}{more} are {complaint}")


def _pattern(entry: str) -> re.Pattern[str]:
    """A name, or the beginning of one up to a dot, in which ``.`` and ``*`` may mean what they do in
    patterns; that it may also be the end of a name is seen to where it is asked."""
    try:
        return re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    except re.error as error:
        raise ConfigError(f"quantization_config: {entry!r} is not a pattern: {error}") from error


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and min(value) > 0:
            return rows, columns
    raise refusal(_BLOCK, value, "a list of two sizes, or null")
