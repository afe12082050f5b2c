"""Cutting a built decoder: a stage keeps its range of the layers, the first one all else besides.

A family knows nothing of it. Its model is built whole, without weights, which shows how much memory each
layer takes; then what other stages have is taken out, and the forward pass is that of the stage.
"""

from __future__ import annotations

import logging
from collections import Counter
from typing import TYPE_CHECKING

from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_models.layers.attention.self_attention import Attention
from headrace_models.layers.base import Layer, WeightLayer, walk
from headrace_models.layers.decoder import Block, Decoder
from headrace_models.stages.division import PARTITION, layers_by_stage
from headrace_models.stages.passes import StagePasses
from headrace_models.weight_bytes import kept_bytes

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_models.stages.stage import Stage

logger = logging.getLogger(__name__)

FIELD = "pipeline_parallel_size"


class AbsentBlock(Block):
    """Stands where another stage has a layer."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor | None]:
        raise AssertionError("this layer is on another stage")


class _Absent(Layer):
    """Stands where the first stage has something."""


def cut(model: object, stage: Stage, dtype: str) -> None:
    """Take out of a model what is not on this stage.

    Args:
        model: built, without weights.
        dtype: of its floating weights.

    Raises:
        UnsupportedModel: its layers cannot be on several stages; says why.
        ConfigError: it has fewer layers than there are stages, or another number than is wanted.
    """
    name = type(model).__name__
    if not isinstance(model, Decoder):
        raise UnsupportedModel(
            f"{FIELD} = {stage.count}: {name} is not one of headrace's decoders, and cannot be cut"
        )
    reason = why_whole(model)
    if reason:
        raise UnsupportedModel(f"{FIELD} = {stage.count}: {name} cannot be cut: {reason}")
    numbers = _numbers(model, stage, dtype)
    start = sum(numbers[: stage.index])
    own = range(start, start + numbers[stage.index])
    total = len(model.layers)
    for index in range(total):
        if index not in own:
            model.layers[index] = AbsentBlock()
    if not stage.is_first:
        _take_out_rest(model)
    for name, made in StagePasses(model, stage, own).members().items():
        setattr(model, name, made)  # of this object
    if stage.is_first:
        parts = ", ".join(map(str, numbers))
        logger.info("%d stages, with %s of %d layers", stage.count, parts, total)


def why_whole(model: Decoder) -> str:
    """Why a decoder's layers cannot be on several stages; "": they can."""
    if model.no_stages:
        return model.no_stages
    if not model.runs_in_stages():
        return "it runs its layers in a way of its own"
    attending = (layer for _, layer in walk(model) if isinstance(layer, Attention))
    if any(layer.spec.kv_sharing_target is not None for layer in attending):
        return "some of its layers share a cache"
    leaves = [(path, leaf) for path, leaf in walk(model) if isinstance(leaf, WeightLayer)]
    places = Counter(id(leaf) for _, leaf in leaves)
    if any(places[id(leaf)] > 1 for path, leaf in leaves if path.startswith("layers.")):
        return "some of its layers share weights"
    return ""


def _numbers(model: Decoder, stage: Stage, dtype: str) -> tuple[int, ...]:
    """Numbers of layers by stage."""
    total = len(model.layers)
    if total < stage.count:
        raise ConfigError(
            f"parallel.{FIELD} = {stage.count}: must be at most {total}, the number of the model's layers",
            field=f"parallel.{FIELD}",
        )
    if stage.partition:
        if sum(stage.partition) != total:
            raise ConfigError(
                f"{PARTITION} = {','.join(map(str, stage.partition))}: these are {sum(stage.partition)} "
                f"layers, and the model has {total}",
                field=PARTITION,
            )
        return stage.partition
    costs = [kept_bytes(layer, dtype) for layer in model.layers]
    return layers_by_stage(costs, kept_bytes(model, dtype) - sum(costs), stage.count)


def _take_out_rest(model: Decoder) -> None:
    """Take out everything but layers."""
    for name, value in list(vars(model).items()):
        if value is model.layers:
            continue
        if isinstance(value, Layer):
            setattr(model, name, _Absent())
        elif isinstance(value, list):
            setattr(model, name, [one for one in value if not isinstance(one, Layer)])
