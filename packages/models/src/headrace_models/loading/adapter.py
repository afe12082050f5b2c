"""An adapter that lies beside a checkpoint's weights and belongs to them: it is added to them.

Hu et al. 2021, arXiv:2106.09685. Files are those of peft, read by :mod:`headrace_models.lora.files`.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_models.lora.files import AdapterFiles, Factors, read_folder
from headrace_models.lora.settings import CONFIG

if TYPE_CHECKING:
    from torch import Tensor


@dataclass(frozen=True)
class Adapter:
    """An adapter, read.

    Args:
        path: of its weights; for messages.
        factors: by name of the weight.
    """

    path: Path
    factors: Mapping[str, Factors]

    @classmethod
    def of(cls, folder: Path, own_name: Callable[[str], str | None]) -> Adapter | None:
        """The adapter of a checkpoint; None: it has none.

        Args:
            own_name: a published name of a tensor -> that under which :meth:`added` meets it; None: it
                has no place.

        Raises:
            UnsupportedModel: its settings ask for more than products of linear layers.
            WeightsError: a file is missing or unreadable, or a tensor has no partner or no place.
        """
        if not (folder / CONFIG).is_file():
            return None
        files = read_folder(folder)
        if files.settings.fan_in_fan_out or files.base_shapes or files.stacks:
            raise UnsupportedModel(
                f"{files.settings.path}: fan_in_fan_out = true, target_parameters of experts, and weights of "
                "the base beside the factors are not supported here"
            )
        return cls(files.path, _by_weight(files, own_name))

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
        product = factors.scale * (factors.up.float() @ factors.down.float())
        if product.shape != tensor.shape or not tensor.is_floating_point():
            raise WeightsError(
                f"{self.path}: adds {list(product.shape)} floats to {name!r}, which has {list(tensor.shape)} "
                f"of {tensor.dtype}"
            )
        return (tensor.float() + product).to(tensor.dtype)


def _by_weight(files: AdapterFiles, own_name: Callable[[str], str | None]) -> dict[str, Factors]:
    found: dict[str, Factors] = {}
    for module, factors in files.factors.items():
        own = own_name(f"{module}.weight")
        if own is None or factors.is_table:
            raise WeightsError(f"{files.path}: module {module!r} has no place")
        found[own] = factors
    return found
