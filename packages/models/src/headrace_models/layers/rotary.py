"""Tables of cosines and sines, with Hugging Face's numerics (float32 throughout).

Letters: P positions, R dimensions of a head that turn.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import UnsupportedModel
from headrace_models.config.rope import RopeSettings

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

ROTARY_ROWS = "rotary_rows"
"""Key of :attr:`ForwardBatch.extra`: [T, R], the cosines and sines of the batch's tokens row by row, in
place of those of their positions (:func:`rows_by_axes`)."""
_MROPE_AXES = 3
MAX_TABLE = 2**30
"""Entries of a table: a config that lies about its context must not eat all memory."""


def rotary_table(
    context: BuildContext,
    rope: RopeSettings,
    head_dim: int,
    *,
    max_positions: int | None = None,
    length: int | None = None,
) -> Tensor:
    """[length, R] float32: R/2 cosines, then R/2 sines, by position.

    Args:
        max_positions: the config's ``max_position_embeddings`` (for LongRoPE's and YaRN's
            default factor and dynamic NTK).
        length: None: ``context.max_model_len``.
    """
    length = context.max_model_len if length is None else length
    dim = _turning(rope, head_dim)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise UnsupportedModel(
            f"head_dim = {head_dim} with partial_rotary_factor = {rope.partial_rotary_factor}: "
            "the number of rotated dimensions must be even, and at most head_dim"
        )
    if length * dim > MAX_TABLE:
        raise UnsupportedModel(
            f"max_model_len = {context.max_model_len}: the rotary table would have more than "
            f"{MAX_TABLE} entries; set a smaller max_model_len"
        )
    limit = max_positions or rope.original_max_position_embeddings
    try:
        frequencies, factor = _KINDS[rope.kind](rope, dim, context.max_model_len, limit)
    except UnsupportedModel:
        raise
    except (ArithmeticError, ValueError) as error:  # a logarithm of 0, a division by log(1), ...
        raise _impossible(rope) from error
    if not (bool(frequencies.isfinite().all()) and math.isfinite(factor)):
        raise _impossible(rope)
    positions = torch.arange(length, dtype=torch.float32)
    angles = positions[:, None] * frequencies[None, :]
    return torch.cat((angles.cos() * factor, angles.sin() * factor), dim=-1).to(context.device)


def rows_by_axes(table: Tensor, positions: Tensor, rope: RopeSettings) -> Tensor:
    """[T, R]: the cosines and sines of tokens that stand in time, height and width.

    Each frequency turns by one of a token's positions, as ``rope.sections`` says. The result is a
    table of its own: row t belongs to token t, so what rotates by it takes 0 to T - 1 as positions.
    Tokens of text stand at the same place on all axes, for which it holds the table's own rows.

    Args:
        table: [P, R] (:func:`rotary_table`).
        positions: [3, T] int64.

    Raises:
        UnsupportedModel: the sections are not R/2 frequencies together.
    """
    axes = _axes(rope, table.shape[-1] // 2)
    return rows_by_axis(table, positions, axes.to(table.device))


def rows_by_axis(table: Tensor, positions: Tensor, axes: Tensor) -> Tensor:
    """[T, R]: see :func:`rows_by_axes`.

    Args:
        axes: [R/2] int64; the axis by which each frequency turns.
    """
    cosines, sines = table.chunk(2, dim=-1)
    frequencies = torch.arange(cosines.shape[-1], device=table.device)
    rows = positions[axes].T  # [T, R/2]
    return torch.cat((cosines[rows, frequencies], sines[rows, frequencies]), dim=-1)


def _axes(rope: RopeSettings, frequencies: int) -> Tensor:
    """[R/2]: the axis by which each frequency turns."""
    if sum(rope.sections) != frequencies or len(rope.sections) != _MROPE_AXES:
        raise UnsupportedModel(
            f"config.json: mrope_section = {list(rope.sections)}: must be {frequencies} frequencies "
            f"together, by {_MROPE_AXES} axes"
        )
    if not rope.interleaved_sections:
        return torch.arange(len(rope.sections)).repeat_interleave(torch.tensor(rope.sections))
    axes = torch.zeros(frequencies, dtype=torch.int64)
    for axis, size in enumerate(rope.sections[1:], start=1):
        axes[axis : 3 * size : 3] = axis  # what no axis takes is left to time
    return axes


def _turning(rope: RopeSettings, head_dim: int) -> int:
    """Dimensions of a head that the table is for; of the proportional kind some of them stay."""
    if rope.kind == "proportional":
        return head_dim
    return int(head_dim * rope.partial_rotary_factor)


def _impossible(rope: RopeSettings) -> UnsupportedModel:
    return UnsupportedModel(
        f"config.json: rope_type = {rope.kind!r} with rope_theta = {rope.theta:g} and "
        f"{dict(rope.scaling)!r} gives no finite frequencies"
    )


def _plain(theta: float, dim: int) -> Tensor:
    """theta^(-2i/dim), [dim/2]."""
    return 1.0 / (theta ** (torch.arange(0, dim, 2, dtype=torch.float32) / dim))


def _default(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    return _plain(rope.theta, dim), 1.0


def _linear(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    return _plain(rope.theta, dim) / rope.number("factor"), 1.0


def _dynamic(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """NTK-aware scaling for one fixed length: the trained context, or max_model_len if longer."""
    if rope.scaling.get("alpha"):  # Hunyuan: one stretch at every length
        stretch = rope.number("alpha")
        return _plain(rope.theta * stretch ** (dim / (dim - 2)), dim), 1.0
    factor = rope.number("factor")
    stretch = factor * max(length, limit) / limit - (factor - 1)
    theta = rope.theta * stretch ** (dim / (dim - 2)) if dim > 2 else rope.theta
    return _plain(theta, dim), 1.0


def _ntk(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """GTE's: a base times the factor, all frequencies less by the factor to the 2/dim. The same at
    every length: its models were trained so."""
    if rope.scaling.get("mixed_b") is not None:
        raise UnsupportedModel(
            f"config.json: mixed_b = {rope.scaling['mixed_b']!r}: must be left out"
        )
    factor = rope.number("factor")
    return _plain(rope.theta * factor, dim) / factor ** (2 / dim), 1.0


def _proportional(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """Gemma 4's: of the whole head's frequencies only the first turn, and pairs lie half a head apart
    all the same."""
    if rope.partial_rotary_factor > 1:
        raise UnsupportedModel(
            f"config.json: partial_rotary_factor = {rope.partial_rotary_factor:g}: must be at most 1"
        )
    frequencies = _plain(rope.theta, dim) / rope.number("factor", 1.0)
    frequencies[int(rope.partial_rotary_factor * dim // 2) :] = 0
    return frequencies, 1.0


def _llama3(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """Long wavelengths are divided by the factor, short ones kept, those between blended."""
    low, high = rope.number("low_freq_factor"), rope.number("high_freq_factor")
    factor, original = rope.number("factor"), rope.original_max_position_embeddings
    frequencies = _plain(rope.theta, dim)
    wavelengths = 2 * math.pi / frequencies
    slowed = frequencies / factor
    smooth = (original / wavelengths - low) / (high - low)
    blended = (1 - smooth) * slowed + smooth * frequencies
    scaled = torch.where(wavelengths > original / low, slowed, blended)
    return torch.where(wavelengths < original / high, frequencies, scaled), 1.0


def _yarn(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """Peng et al. 2023, arXiv:2309.00071."""
    original = rope.original_max_position_embeddings
    factor = rope.number("factor", limit / original)
    plain = _plain(rope.theta, dim)
    # A config that writes null or 0 means the values of the paper.
    fast = rope.number("beta_fast") if rope.scaling.get("beta_fast") else 32.0
    slow = rope.number("beta_slow") if rope.scaling.get("beta_slow") else 1.0
    low = _rotations_to_dim(fast, dim, rope.theta, original)
    high = _rotations_to_dim(slow, dim, rope.theta, original)
    if rope.scaling.get("truncate", True):
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    frequencies = plain / factor * ramp + plain * (1 - ramp)
    return frequencies, _yarn_attention_factor(rope.scaling, rope, factor)


def _rotations_to_dim(rotations: float, dim: int, theta: float, original: int) -> float:
    """The dimension whose angle makes that many full turns over the original context."""
    return dim * math.log(original / (rotations * 2 * math.pi)) / (2 * math.log(theta))


def _yarn_attention_factor(scaling: Mapping[str, Any], rope: RopeSettings, factor: float) -> float:
    if scaling.get("attention_factor") is not None:
        return rope.number("attention_factor")

    def temperature(mscale: float) -> float:
        return 1.0 if factor <= 1 else 0.1 * mscale * math.log(factor) + 1.0

    if scaling.get("mscale") and scaling.get("mscale_all_dim"):
        return temperature(rope.number("mscale")) / temperature(rope.number("mscale_all_dim"))
    return temperature(1.0)


def _longrope(rope: RopeSettings, dim: int, length: int, limit: int) -> tuple[Tensor, float]:
    """Ding et al. 2024, arXiv:2402.13753.

    Hugging Face changes from the short to the long factors when a sequence outgrows the original
    context, which invalidates its cache. Here ``max_model_len`` decides, once: to serve short
    prompts exactly as trained, set it to the original context.
    """
    original = rope.original_max_position_embeddings
    name = "long_factor" if length > original else "short_factor"
    factors = rope.scaling.get(name)
    if not isinstance(factors, list) or len(factors) != dim // 2:
        raise UnsupportedModel(f"config.json: {name} = {factors!r}: must be {dim // 2} numbers")
    if not all(type(factor) in (int, float) and 0 < factor < math.inf for factor in factors):
        raise UnsupportedModel(f"config.json: {name} = {factors!r}: must be numbers above 0")
    stretch = torch.tensor(factors, dtype=torch.float32)
    frequencies = 1.0 / (stretch * rope.theta ** (torch.arange(0, dim, 2).float() / dim))
    if rope.scaling.get("attention_factor") is not None:
        return frequencies, rope.number("attention_factor")
    factor = rope.number("factor", limit / original)
    attention = 1.0 if factor <= 1 else math.sqrt(1 + math.log(factor) / math.log(original))
    return frequencies, attention


_KINDS: Mapping[str, Callable[[RopeSettings, int, int, int], tuple[Tensor, float]]] = {
    "default": _default,
    "linear": _linear,
    "dynamic": _dynamic,
    "llama3": _llama3,
    "yarn": _yarn,
    "longrope": _longrope,
    "proportional": _proportional,
    "ntk": _ntk,
}
