"""Building a head and filling it from its checkpoint, as strictly as a model."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.config import LoadConfig
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_models.formats.contents import stored_tensors
from headrace_models.formats.dummy import dummy_tensors
from headrace_models.layers.base import WeightLayer, walk
from headrace_models.loading.loader import HARMLESS, Built, choose_format, fill
from headrace_models.loading.mapping import WeightMap
from headrace_models.speculators.base import Head, decoder_of
from headrace_models.speculators.eagle import EagleHead
from headrace_models.speculators.eagle3 import Eagle3Head
from headrace_models.speculators.found import MTP, HeadInfo
from headrace_models.speculators.medusa import MedusaHead
from headrace_models.speculators.mlp import MLPSpeculatorHead
from headrace_models.speculators.mtp import (
    ErnieMTPHead,
    LongcatMTPHead,
    MiMoMTPHead,
    MTPHead,
    QwenMTPHead,
)

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_models.loading.update import LoadRecord

_CLASSES: Mapping[str, type[Head]] = {
    "eagle": EagleHead, "eagle3": Eagle3Head, "mlp_speculator": MLPSpeculatorHead,
    "medusa": MedusaHead, "mimo_mtp": MiMoMTPHead, "qwen3_next_mtp": QwenMTPHead,
    "ernie_mtp": ErnieMTPHead, "longcat_flash_mtp": LongcatMTPHead,
}  # fmt: skip


def load_head(
    found: HeadInfo,
    info: ModelInfo,
    context: BuildContext,
    target: CausalLM,
    *,
    load: LoadConfig,
    seed: int = 0,
    record: LoadRecord | None = None,
) -> Head:
    """Build a head and fill it.

    Args:
        info: of the checkpoint that has its weights.
        context: of the head: its ``config`` is the head's.
        target: the model that it guesses for; its weights may still be missing.
        record: remembers how the head was filled, so that its weights can be replaced.

    Raises:
        UnsupportedFeature: the model is none that heads can read.
        UnsupportedModel: the head's config asks for something that is not served.
        WeightsError: a tensor is missing, left over or of a wrong shape; names tensor and file.
    """
    kind = found.method if found.method != MTP else str(found.config["mtp_family"])
    chosen = _CLASSES.get(kind, MTPHead)
    dummy = load.load_format.lower() == "dummy"
    names = set() if dummy else {chosen.rename(n, found.config) for n in _names(found.path, load)}
    context = replace(context, adapters=None)
    head = chosen(context, decoder_of(target), names)
    leaves = {path: leaf for path, leaf in walk(head) if isinstance(leaf, WeightLayer)}
    weights = WeightMap(tuple(head.rules()), leaves)
    built = Built(head, info, leaves, weights, {**HARMLESS, **head.passed_over()})  # type: ignore[arg-type]
    if record is not None:
        record.begin(built, context, head.check)
    with torch.no_grad():
        tensors = (
            dummy_tensors(weights.wanted(), context.dtype, seed)
            if dummy
            else _stored(built, head, context, load, found.path)
        )
        filled = fill(built, context, tensors)
        if record is not None and not dummy:
            record.filled = filled
    head.check()
    return head


def _stored(
    built: Built, head: Head, context: BuildContext, load: LoadConfig, path: Path
) -> Iterable[tuple[str, Tensor, Path]]:
    own = head.translate(choose_format(path, load).tensors(path))
    return context.quant.decode(own, context.dtype, built.passes_over)


def _names(path: Path, load: LoadConfig) -> Iterable[str]:
    """The checkpoint's tensors; a format without headers is read for them."""
    entries = stored_tensors(path, load)
    if all(entry.name for entry in entries):
        return [entry.name for entry in entries]
    return [name for name, _, _ in choose_format(path, load).tensors(path)]
