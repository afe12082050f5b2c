"""An adapter that lies beside a checkpoint's weights and belongs to them: it is added to them.

Hu et al. 2021, arXiv:2106.09685; a factor by the root of the rank: Kalajdzievski 2023, arXiv:2312.03732.
Files are those of peft: ``adapter_config.json`` and ``adapter_model.safetensors``.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.config.settings import Settings
from headrace_models.formats.header import read_header
from headrace_models.formats.safetensors import read_tensors

if TYPE_CHECKING:
    from torch import Tensor

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
_PREFIX = "base_model.model."
_DOWN, _UP = ".lora_A.weight", ".lora_B.weight"
_OTHER_KINDS = ("use_dora", "modules_to_save", "rank_pattern", "alpha_pattern", "fan_in_fan_out",
                "layer_replication", "trainable_token_indices", "lora_bias")  # fmt: skip
"""Settings of adapters that do more than to add a product to a weight."""


class Factors(NamedTuple):
    """What is added to a weight [out, in] is a multiple of ``up @ down``."""

    down: Tensor
    """[rank, in]."""
    up: Tensor
    """[out, rank]."""


@dataclass(frozen=True)
class Adapter:
    """An adapter, read.

    Args:
        path: of its weights; for messages.
        scale: of every product.
        factors: by name of the weight.
    """

    path: Path
    scale: float
    factors: Mapping[str, Factors]

    @classmethod
    def of(cls, folder: Path, own_name: Callable[[str], str | None]) -> Adapter | None:
        """The adapter of a checkpoint; None: it has none.

        Args:
            own_name: a published name of a tensor -> that under which :meth:`added` meets it; None: it
                has no place.

        Raises:
            UnsupportedModel: its settings ask for more than products.
            WeightsError: a file is missing or unreadable, or a tensor has no partner or no place.
        """
        if not (folder / CONFIG).is_file():
            return None
        scale = _scale(folder / CONFIG)
        path = folder / WEIGHTS
        if not path.is_file():
            raise WeightsError(f"{path}: is missing, and {CONFIG} is there")
        return cls(path, scale, _factors(path, own_name))

    def added(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Weights with their products added to them; other tensors as they are.

        Raises: WeightsError: a weight of the adapter does not come, or has another shape.
        """
        waiting = dict(self.factors)
        for name, tensor, file in tensors:
            factors = waiting.pop(name, None)
            yield name, tensor if factors is None else self._sum(name, tensor, factors), file
        if waiting:
            raise WeightsError(
                f"{self.path}: {len(waiting)} weights that it adds to are not in the checkpoint as floats, "
                f"{next(iter(waiting))!r} among them"
            )

    def _sum(self, name: str, tensor: Tensor, factors: Factors) -> Tensor:
        product = self.scale * (factors.up.float() @ factors.down.float())
        if product.shape != tensor.shape or not tensor.is_floating_point():
            raise WeightsError(
                f"{self.path}: adds {list(product.shape)} floats to {name!r}, which has {list(tensor.shape)} "
                f"of {tensor.dtype}"
            )
        return (tensor.float() + product).to(tensor.dtype)


def _scale(path: Path) -> float:
    try:
        stated: Any = json.loads(path.read_text(encoding="utf-8"))
    except (OSError, ValueError, RecursionError) as error:
        raise WeightsError(f"{path}: unreadable: {type(error).__name__}: {error}") from error
    if not isinstance(stated, dict):
        raise UnsupportedModel(f"{path}: must hold a JSON object")
    settings = Settings(stated, file=CONFIG)
    settings.refuse("peft_type", "LORA")
    settings.refuse("bias", "none")
    for name in _OTHER_KINDS:
        settings.refuse(name, False, [], {})
    rank, alpha = settings.integer("r"), settings.positive("lora_alpha", 8)
    return alpha / (math.sqrt(rank) if settings.flag("use_rslora", False) else rank)


def _factors(path: Path, own_name: Callable[[str], str | None]) -> dict[str, Factors]:
    stored = {name: t for name, t, _ in read_tensors({path: read_header(path)}, lambda _: None)}
    found: dict[str, Factors] = {}
    for name in [name for name in stored if name.endswith(_DOWN)]:
        module = name.removesuffix(_DOWN)
        down, up = stored.pop(name), stored.pop(f"{module}{_UP}", None)
        own = own_name(f"{module.removeprefix(_PREFIX)}.weight")
        if up is None or own is None or down.ndim != 2 or up.ndim != 2 or len(down) != up.shape[1]:
            raise WeightsError(f"{path}: tensor {name!r}: has no partner of its rank, or no place")
        found[own] = Factors(down, up)
    if stored:
        raise WeightsError(
            f"{path}: tensor {next(iter(stored))!r}: must end in {_DOWN} or {_UP}, and have the other"
        )
    return found
