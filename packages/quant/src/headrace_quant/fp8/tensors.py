"""Tensors in 8-bit floats (E4M3) and their scales, as they come from a checkpoint: brought together, and made
floats where they are not kept.

E4M3 is that of the OCP 8-bit Floating Point Specification: no infinities, one NaN for each sign.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace_core.errors import WeightsError

if TYPE_CHECKING:
    from torch import Tensor

E4M3 = torch.float8_e4m3fn
_BETWEEN_BIASES = 256.0
"""2 ** (15 - 7), of the exponents of float16 and E4M3."""
_SCALE_DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float8_e8m0fnu)
_BLOCK_SCALE = "_scale_inv"
"""Suffix of a scale's name behind that of its tensor."""
_SCALES = {"weight_scale": "weight", "qscale_weight": "weight"}
"""Other last parts of a scale's name -> that of its tensor."""
_ACTIVATION_SCALES = ("input_scale", "activation_scale", "qscale_act")
_SHOWN = 5


class Fp8Layout(NamedTuple):
    """How the FP8 weight of a module is scaled."""

    block: tuple[int, int] | None
    """Rows and columns that share a scale; None: the tensor has one."""
    has_activation_scales: bool = False
    """Scales of activations stand beside the weight, and are passed over."""
    activations: str = "float"
    """Form that the checkpoint names, where the layer stays packed: ``fp8`` with a step for each token."""


class StoredTensor(NamedTuple):
    """A tensor of a checkpoint that waits for another."""

    name: str
    tensor: Tensor
    file: Path


Keep = Callable[[str, "Tensor", "Tensor", Fp8Layout], Mapping[str, "Tensor"] | None]


def decode_fp8(
    tensors: Iterable[tuple[str, Tensor, Path]],
    dtype: torch.dtype,
    layout_of: Callable[[str], Fp8Layout | None],
    *,
    passes_over: Callable[[str], bool],
    check: Callable[[StoredTensor], None] = lambda _: None,
    keep: Keep = lambda *_: None,
) -> Iterator[tuple[str, Tensor, Path]]:
    """A checkpoint's tensors, those in FP8 as floats of ``dtype`` in place of codes and scales.

    A tensor and its scale may be far apart: the one that comes first waits.

    Args:
        layout_of: of the module of a name; None: its tensors stay as they are.
        passes_over: whether the model does without the tensor of a name.
        check: is shown each weight in FP8, and may refuse it.
        keep: of a module's name, weight, scale and layout: the tensors by suffix that stay in FP8; None:
            it becomes floats.

    Raises:
        WeightsError: naming file and tensor: a weight without a scale, or the other way round; a scale that
            does not fit; numbers that ``dtype`` does not hold.
    """
    weights: dict[str, StoredTensor] = {}
    scales: dict[str, StoredTensor] = {}
    for stored in map(StoredTensor._make, tensors):
        module, _, last = stored.name.rpartition(".")
        layout = layout_of(module)
        if layout is not None and layout.has_activation_scales and last in _ACTIVATION_SCALES:
            continue
        scaled = None if layout is None else _scaled(stored.name)
        is_weight = layout is not None and scaled is None and stored.tensor.dtype == E4M3
        if passes_over(stored.name) or (scaled is None and not is_weight):
            yield stored
            continue
        assert layout is not None
        key, waiting = (scaled or stored.name), weights if is_weight else scales
        if key in waiting:
            raise WeightsError(
                f"{stored.file}: tensor {stored.name!r}: {waiting[key].name!r} of "
                f"{waiting[key].file} is the same, and comes too"
            )
        waiting[key] = stored
        if key in weights and key in scales:
            weight, scale = weights.pop(key), scales.pop(key)
            check(weight)
            _check_scale(weight, scale, layout.block)
            owner = key.rpartition(".")[0]
            kept = keep(owner, weight.tensor, scale.tensor, layout)
            if kept is None:
                yield key, _floats(weight, scale, layout.block, dtype), weight.file
                continue
            for suffix, tensor in kept.items():
                yield f"{owner}.{suffix}", tensor, weight.file
    _check_none_waits(weights, scales)


def _floats(
    weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None, dtype: torch.dtype
) -> Tensor:
    out = dequantize(weight.tensor, scale.tensor, block, dtype)
    if out.numel() and not (_are_numbers(weight.tensor) and _are_finite(out)):
        raise WeightsError(
            f"{weight.file}: tensor {weight.name!r} has NaN, or a value that "
            f"{str(dtype).removeprefix('torch.')} cannot hold"
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
    """True if no code is E4M3's NaN, all ones but the sign."""
    return int((codes.view(torch.uint8) & 127).amax()) != 127


def _are_finite(values: Tensor) -> bool:
    smallest, largest = torch.aminmax(values)  # NaN is both
    return bool(smallest.isfinite() & largest.isfinite())


def _scaled(name: str) -> str | None:
    """Name of the tensor that the one of this name scales; None if it is not a scale."""
    module, dot, last = name.rpartition(".")
    tensor = _SCALES.get(last)
    if last.endswith(_BLOCK_SCALE):
        tensor = last.removesuffix(_BLOCK_SCALE)
    return None if tensor is None else f"{module}{dot}{tensor}"


def _check_scale(weight: StoredTensor, scale: StoredTensor, block: tuple[int, int] | None) -> None:
    """Raises: WeightsError: it is none of such a weight."""
    found, dtype = list(scale.tensor.shape), scale.tensor.dtype
    of = f"the scale of {weight.name!r} {list(weight.tensor.shape)}"
    if block is None and scale.tensor.numel() != 1:
        raise WeightsError(
            f"{scale.file}: tensor {scale.name!r} has shape {found}; {of} must be one number, as "
            "quantization_config names no blocks"
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
            f"{scale.file}: tensor {scale.name!r}: {of} has a value that is negative, infinite or NaN"
        )


def _scale_shape(weight: StoredTensor, block: tuple[int, int]) -> list[int]:
    shape = list(weight.tensor.shape)
    if len(shape) < 2:
        raise WeightsError(
            f"{weight.file}: tensor {weight.name!r} has shape {shape}: FP8 in blocks has rows and columns"
        )
    return [*shape[:-2], *(-(-size // step) for size, step in zip(shape[-2:], block, strict=True))]


def _check_none_waits(
    weights: Mapping[str, StoredTensor], scales: Mapping[str, StoredTensor]
) -> None:
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
