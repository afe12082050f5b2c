"""Tensors of a checkpoint that other stages wait for, which this one passes over."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_models.layers.base import Layer, WeightLayer, walk
from headrace_models.loading.cache_scales import CacheScales
from headrace_models.loading.mapping import WeightMap
from headrace_models.stages.cut import cut

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext, CausalLM, WeightRule


class Elsewhere:
    """What other stages have of a model. A tensor of none of its stages still is an error.

    Args:
        model: built whole, without weights; it is cut now.
        rules: of its tensors' names.
        context: with a stage.

    Raises:
        UnsupportedModel, ConfigError: see :func:`headrace_models.stages.cut.cut`.
    """

    def __init__(self, model: CausalLM, rules: Sequence[WeightRule], context: BuildContext) -> None:
        leaves, layers = leaves_of(model), dict(model.attention_layers())
        cut(model, context.stage, context.dtype)
        here = leaves_of(model)
        absent = {path: leaf for path, leaf in leaves.items() if path not in here}
        for name in model.attention_layers():
            del layers[name]
        self.weights = WeightMap(rules, absent)
        """Names and slots of what other stages have."""
        self._scales = CacheScales(layers, "auto")

    def waits_for(self, name: str) -> bool:
        """True if another stage waits for a checkpoint's tensor."""
        return self.weights.find(name) is not None

    def takes_scale(self, name: str, tensor: Tensor, file: Path) -> bool:
        """True if it is a scale of the cache of another stage's layer."""
        return self._scales.take(name, tensor, file)

    def slots(self, leaf: str) -> Mapping[str, object] | None:
        """Slots of another stage's leaf; None: it has no such leaf."""
        return self.weights.slots.get(leaf)


def leaves_of(model: object) -> dict[str, WeightLayer]:
    """Leaves of a built model, by path."""
    assert isinstance(model, Layer)
    return {path: leaf for path, leaf in walk(model) if isinstance(leaf, WeightLayer)}
