"""Adapters that lie beside a checkpoint's weights, each for prompts with media of some modality."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from typing import Any, NamedTuple

from headrace_core.model import ModelInfo
from headrace_core.multimodal import media_limit
from headrace_models.catalogue.multimodal import WRAPPERS
from headrace_models.lora.settings import CONFIG, AdapterSettings

logger = logging.getLogger(__name__)


class OwnAdapters(NamedTuple):
    """A checkpoint's own adapters."""

    paths: Mapping[str, str]
    """Keys as :attr:`headrace_models.catalogue.multimodal.wrapper.Wrapper.adapters`."""
    rank: int
    """The largest of their ranks; 0: there are none."""


def own_adapters(info: ModelInfo, limits: Mapping[str, Any]) -> OwnAdapters:
    """The adapters of media that prompts may bring. One that is not there is said in a warning: the published
    model does not understand such media without, another that was made of it may.

    Args:
        limits: see :func:`headrace_core.multimodal.media_limit`.

    Raises:
        UnsupportedModel: an adapter's settings cannot be used.
        WeightsError: they are damaged.
    """
    wrapper = WRAPPERS.get(info.architecture)
    stated = (
        {} if wrapper is None or not info.has_towers or not info.processor else wrapper.adapters
    )
    paths, rank = dict[str, str](), 0
    for key, name in stated.items():
        folder = info.path / name
        if not all(media_limit(limits, modality) for modality in key.split("+")):
            continue
        if not (folder / CONFIG).is_file():
            logger.warning("%s: is missing: prompts with %s have no adapter", folder / CONFIG, key)
            continue
        settings = AdapterSettings(folder)
        paths[key] = str(folder)
        rank = max(rank, settings.rank, *(int(own) for _, own in settings.ranks))
    return OwnAdapters(paths, rank)
