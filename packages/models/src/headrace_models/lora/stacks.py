"""Adapters of a mixture's experts that transformers holds in one parameter, taken apart."""

from __future__ import annotations

from collections.abc import Iterator
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
    place: ExpertsPlace, stack: StackedFactors, settings: AdapterSettings, file: Path
) -> Iterator[Piece]:
    """The factors of each expert.

    Raises: WeightsError: they are of other sizes than the experts, or of another rank than is stated.
    """
    half, parameter = _half(place, stack, file)
    name = f"{stack.module}.{parameter}"
    for expert, factors in enumerate(_of_each(name, place.num_experts, stack, settings, file)):
        target = Target(place, f"{expert}.{half}.weight", _WHOLE, None)
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
    name: str, count: int, stack: StackedFactors, settings: AdapterSettings, file: Path
) -> Iterator[Factors]:
    rank, scale = settings.rank_of(name), settings.scale_of(name)
    if len(stack.down) != rank * count or stack.up.shape[1] != rank * count:
        raise WeightsError(
            f"{file}: factors of {name!r} have shapes {list(stack.down.shape)} and "
            f"{list(stack.up.shape)}: must be of rank {rank} for each of {count} experts"
        )
    down, up = stack.down.reshape(count, rank, -1), stack.up.reshape(-1, rank, count)
    for expert in range(count):
        yield Factors(down[expert], up[:, :, expert], scale)
