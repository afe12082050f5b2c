"""The tensors of an adapter's folder as PEFT saves them: two factors for each module."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple

import torch

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.formats.header import read_header
from headrace_models.formats.pickled import read_pickled
from headrace_models.formats.safetensors import DTYPES, read_tensors
from headrace_models.loading.finite import check_finite
from headrace_models.loading.mapping import listed
from headrace_models.lora.settings import CONFIG, AdapterSettings

if TYPE_CHECKING:
    from torch import Tensor

SAFETENSORS = "adapter_model.safetensors"
WEIGHTS = (SAFETENSORS, "adapter_model.bin", "adapter_model.pt")
"""Files that may hold the weights; the first that is there is read."""
_PREFIX = "base_model.model."
_PAIRS = (
    (".lora_A.weight", ".lora_B.weight", False),
    (".lora_embedding_A", ".lora_embedding_B", True),
)
"""Ends of the names of both factors, and whether they are a table's."""
_BASE, _WEIGHT = ".base_layer.weight", "weight"
_FLOATS = ("float32", "float16", "bfloat16", "float64")
_WHY = {
    ".lora_magnitude_vector": "DoRA",
    ".lora_B.bias": "a bias of the adapter (lora_bias)",
    ".trainable_tokens_delta": "trained rows of a table (trainable_token_indices)",
    ".lora_B.weight": "without its lora_A",
    ".lora_embedding_B": "without its lora_embedding_A",
}
_OF_A_RUN = re.compile(r"\.lora_(A|B|embedding_A|embedding_B)\.(?!weight$|bias$)[^.]+(\.weight)?$")
"""A factor's name with an adapter's in it, as state_dict() of a model in training has it."""
_ACCEPTED = "accepted are factors lora_A and lora_B, or lora_embedding_A and lora_embedding_B"


class Factors(NamedTuple):
    """What is added to a weight [out, in] is ``scale * up @ down``."""

    down: Tensor
    """[rank, in]."""
    up: Tensor
    """[out, rank]."""
    scale: float
    is_table: bool = False
    """The weight is a table of vectors [in, out]: ``down`` has a column for each of its rows."""

    @property
    def rank(self) -> int:
        return int(self.down.shape[0])


class StackedFactors(NamedTuple):
    """Factors of one parameter that holds all experts' matrices (``target_parameters``), each of rank r."""

    module: str
    parameters: Sequence[str]
    """Names below the module that it may be."""
    down: Tensor
    """[experts * r, in], an expert's rows together."""
    up: Tensor
    """[out, r * experts], of each rank all experts' columns together."""


@dataclass(frozen=True, slots=True)
class AdapterFiles:
    """What a folder holds.

    Args:
        path: of the weights; for messages.
        factors: by the module's name in the model that the adapter was trained on.
        stacks: those of parameters that hold many matrices.
        base_shapes: shapes of the base's own weights that PEFT has stored along, by module.
    """

    path: Path
    settings: AdapterSettings
    factors: Mapping[str, Factors]
    stacks: Sequence[StackedFactors] = ()
    base_shapes: Mapping[str, tuple[int, ...]] = field(default_factory=dict)


def read_folder(folder: Path, *, values: bool = True) -> AdapterFiles:
    """Settings and tensors of a folder, checked against each other.

    Args:
        values: False: tensors are on the device ``meta``, with shapes and dtypes as the file's header says,
            and none of its numbers is read.

    Raises:
        UnsupportedModel: its settings or tensors ask for more than products that are added.
        WeightsError: a file is missing, damaged, or needs code; a tensor has no partner, another rank than
            the settings say, or values that are not finite.
    """
    settings = AdapterSettings(folder)
    path = next((folder / name for name in WEIGHTS if (folder / name).is_file()), None)
    if path is None:
        raise WeightsError(
            f"{folder / SAFETENSORS}: is missing, and {CONFIG} is there; accepted are {', '.join(WEIGHTS)}"
        )
    stored = _tensors(path) if values else _shapes(path)
    factors, stacks = dict[str, Factors](), list[StackedFactors]()
    for end, other, is_table in _PAIRS:
        for name in [name for name in stored if name.endswith(end)]:
            down, up = stored.pop(name), stored.pop(name.removesuffix(end) + other, None)
            whole = name.removesuffix(end).removeprefix(_PREFIX)
            up = _check_pair(path, whole, down, up)
            module = re.sub(r"(\.base_layer)+$", "", whole)
            parameters = settings.parameters_of(module)
            if parameters and parameters != [_WEIGHT]:
                stacks.append(StackedFactors(module, parameters, down, up))
                continue
            named = f"{module}.{_WEIGHT}" if parameters else module
            _check_rank(path, settings, named, down, up)
            factors[module] = Factors(down, up, settings.scale_of(named), is_table)
    bases = {
        name.removesuffix(_BASE).removeprefix(_PREFIX): tuple(stored.pop(name).shape)
        for name in [name for name in stored if name.endswith(_BASE) and stored[name].ndim == 2]
    }
    if stored:
        raise _refused(path, list(stored))
    return AdapterFiles(path, settings, factors, stacks, bases)


def _tensors(path: Path) -> dict[str, Tensor]:
    """Read whole, not mapped: a server reads adapters beside its steps, and a file that is cut meanwhile must
    not end it."""
    if path.suffix == ".safetensors":
        headers = {path: read_header(path)}
        return {name: t for name, t, _ in read_tensors(headers, lambda _: None, eager=True)}
    return read_pickled(path, eager=True)


def _shapes(path: Path) -> dict[str, Tensor]:
    if path.suffix == ".safetensors":
        return {
            entry.name: torch.empty(entry.shape, dtype=DTYPES[entry.dtype], device="meta")
            for entry in read_header(path)
        }
    return {name: tensor.to("meta") for name, tensor in read_pickled(path).items()}


def _check_pair(path: Path, module: str, down: Tensor, up: Tensor | None) -> Tensor:
    """The second factor, if both are such."""
    if up is None:
        raise WeightsError(f"{path}: one of the factors of {module!r} is missing")
    for tensor in (down, up):
        if str(tensor.dtype).removeprefix("torch.") not in _FLOATS:
            raise WeightsError(
                f"{path}: factors of {module!r} have dtype {tensor.dtype}: must be {', '.join(_FLOATS)}"
            )
        if not tensor.is_meta:
            check_finite(module, tensor, path)
    if down.ndim != 2 or up.ndim != 2:
        raise UnsupportedModel(
            f"{path}: factors of {module!r} have shapes {list(down.shape)} and {list(up.shape)}: must be "
            "[rank, in] and [out, rank], of a linear layer or a table; convolutions take no adapters"
        )
    return up


def _check_rank(path: Path, settings: AdapterSettings, name: str, down: Tensor, up: Tensor) -> None:
    rank = settings.rank_of(name)
    if len(down) != rank or up.shape[1] != rank:
        raise WeightsError(
            f"{path}: factors of {name!r} have shapes {list(down.shape)} and {list(up.shape)}: their rank "
            f"must be {rank}, as r or rank_pattern in {CONFIG} says"
        )


def _refused(path: Path, names: list[str]) -> UnsupportedModel:
    why = next((w for end, w in _WHY.items() if any(name.endswith(end) for name in names)), "")
    if any(_OF_A_RUN.search(name) for name in names):
        why = "named as in state_dict(), with the adapter's name in it; save_pretrained leaves that out"
    reason = (
        f", {why}"
        if why
        else ", parameters that the adapter has trained as a whole (modules_to_save?)"
    )
    return UnsupportedModel(f"{path}: {listed(names)}{reason}: not supported; {_ACCEPTED}")
