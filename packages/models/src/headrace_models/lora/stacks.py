"""Adapters of a mixture's experts that transformers holds in one parameter, taken apart."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path

from headrace_core.errors import WeightsError
from headrace_core.model import WeightRule
from headrace_models.loading.mapping import stored_shape
from headrace_models.lora.files import Factors, StackedFactors
from headrace_models.lora.places import ExpertsPlace
from headrace_models.lora.settings import AdapterSettings
from headrace_models.lora.targets import Piece, Target, pieces_of

_WHOLE = WeightRule("", "", split=())
"""Of a parameter that holds all parts of each expert's weight, in their order."""


def stack_pieces(
    place: ExpertsPlace,
    stack: StackedFactors,
    settings: AdapterSettings,
    file: Path,
    *,
    interleaved: bool = False,
) -> Iterator[Piece]:
    """The factors of each expert.

    Args:
        interleaved: rows of gates and ups alternate.

    Raises: WeightsError: they are of other sizes than the experts, or of another rank than is stated.
    """
    half, parameter = _half(place, stack, file)
    name, rule = f"{stack.module}.{parameter}", replace(_WHOLE, interleaved=interleaved)
    for expert, factors in enumerate(_of_each(name, place, stack, settings, file)):
        target = Target(place, f"{expert}.{half}.weight", rule, None)
        yield from pieces_of(target, name, factors, file)


def _half(place: ExpertsPlace, stack: StackedFactors, file: Path) -> tuple[str, str]:
    """Which of an expert's weights it is, by its sizes, and the parameter's name."""
    sizes = len(stack.up), stack.down.shape[1]
    for half, slot in place.weights.items():
        fits = stored_shape(slot, range(slot.num_parts), _WHOLE) == sizes
        for name in stack.parameters:
            if fits and ("down" in name) is (half == "down"):
                return half, name
    raise WeightsError(
        f"{file}: factors of {stack.module!r} are of weights {list(sizes)} [out, in], which none of the "
        f"experts' parameters {', '.join(stack.parameters)} has in this model"
    )


def _of_each(
    name: str, place: ExpertsPlace, stack: StackedFactors, settings: AdapterSettings, file: Path
) -> Iterator[Factors]:
    """Of each expert that has weights; transformers' parameters may have room for others behind them."""
    rank, scale = settings.rank_of(name), settings.scale_of(name)
    counts = (place.num_experts, place.num_experts + place.num_without_weights)
    count = next((n for n in counts if len(stack.down) == stack.up.shape[1] == rank * n), None)
    if count is None:
        raise WeightsError(
            f"{file}: factors of {name!r} have shapes {list(stack.down.shape)} and "
            f"{list(stack.up.shape)}: must be of rank {rank} for each of {counts[0]} experts"
        )
    down, up = stack.down.reshape(count, rank, -1), stack.up.reshape(-1, rank, count)
    for expert in range(place.num_experts):
        yield Factors(down[expert], up[:, :, expert], scale)
