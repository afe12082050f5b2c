"""Traits of a class that generates, for whoever resolves a checkpoint. No torch.

As with pooling (:mod:`headrace_models.pooling.traits`), headrace's own classes are in a table and are
not imported for it; a class of another distribution is imported and asked.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_core.model import SupportsAlignment, SupportsEncoderDecoder
from headrace_core.multimodal import media_limit
from headrace_core.speech.model import SupportsTranscription
from headrace_models.catalogue.multimodal import WRAPPERS, Wrapper
from headrace_models.config.settings import Settings
from headrace_models.transformers_backend.library import takes_images

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class GeneratingTraits:
    """Capabilities of a class."""

    transcribes: bool = False
    generates: bool = True
    """False: it has no other use than to transcribe."""
    is_encoder_decoder: bool = False
    aligns: bool = False
    """It can tell the times of words; a checkpoint may lack what it needs."""

    def tasks(self, generation: Mapping[str, Any], config: Mapping[str, Any]) -> tuple[str, ...]:
        """Tasks of a checkpoint with that generation config and that ``config.json``."""
        named = (
            ("generate", self.generates),
            ("transcription", self.transcribes),
            ("align", self.aligns and _names_heads(generation, config)),
        )
        return tuple(task for task, can in named if can)


_GENERATES = GeneratingTraits()

TRAITS: Mapping[str, GeneratingTraits] = {
    "FunAsrNanoForConditionalGeneration": GeneratingTraits(transcribes=True),
    "Gemma3nForConditionalGeneration": GeneratingTraits(transcribes=True),
    "GlmAsrForConditionalGeneration": GeneratingTraits(transcribes=True),
    "GraniteSpeechForConditionalGeneration": GeneratingTraits(transcribes=True),
    "GraniteSpeechPlusForConditionalGeneration": GeneratingTraits(transcribes=True),
    "Qwen2AudioForConditionalGeneration": GeneratingTraits(transcribes=True),
    "Qwen3OmniMoeForConditionalGeneration": GeneratingTraits(transcribes=True),
    "Qwen3OmniMoeThinkerForConditionalGeneration": GeneratingTraits(transcribes=True),
    "Qwen3ASRForConditionalGeneration": GeneratingTraits(transcribes=True),
    "VoxtralForConditionalGeneration": GeneratingTraits(transcribes=True),
    "WhisperForConditionalGeneration": GeneratingTraits(
        transcribes=True, generates=False, is_encoder_decoder=True, aligns=True
    ),
}
"""Architecture -> traits, of headrace's own classes that do more than generate."""


def generating_traits(architecture: str) -> GeneratingTraits:
    """Raises: PluginLoadError: a class of another distribution cannot be imported."""
    plugin = plugins.installed("headrace.models").get(architecture)
    if plugin is None or plugin.distribution.startswith("headrace-models "):
        return TRAITS.get(architecture, _GENERATES)
    return traits_of(plugin.load())


def served_traits(architecture: str, processor: str, limits: Mapping[str, Any]) -> GeneratingTraits:
    """Traits of a checkpoint: a tower that is not loaded hears nothing.

    Args:
        processor: of :func:`processor_of`.
        limits: ``model.limit_mm_per_prompt``.
    """
    hears = bool(processor) and media_limit(limits, "audio") > 0
    return generating_traits(architecture) if hears or architecture not in WRAPPERS else _GENERATES


def traits_of(model_class: Any) -> GeneratingTraits:
    """Traits as the class's bases and members tell them."""
    if not isinstance(model_class, type):
        return _GENERATES
    transcribes = issubclass(model_class, SupportsTranscription)
    only = transcribes and bool(model_class.supports_transcription_only)  # type: ignore[attr-defined]
    return GeneratingTraits(
        transcribes=transcribes,
        generates=not only,
        is_encoder_decoder=issubclass(model_class, SupportsEncoderDecoder),
        aligns=issubclass(model_class, SupportsAlignment),
    )


def alignment_heads(generation: Mapping[str, Any], settings: Settings) -> list[tuple[int, int]]:
    """(layer, head) of the decoder's attention that follows the audio, as a generation config names them;
    empty: it names none.

    Raises:
        UnsupportedModel: they are no pairs, or not within the decoder.
    """
    stated = generation.get("alignment_heads")
    if stated is None:
        return []
    layers = settings.integer("decoder_layers")
    heads = settings.integer("decoder_attention_heads")
    good = isinstance(stated, list) and all(
        isinstance(pair, list)
        and [type(number) for number in pair] == [int, int]
        and 0 <= pair[0] < layers
        and 0 <= pair[1] < heads
        for pair in stated
    )
    if not good:
        raise UnsupportedModel(
            f"generation_config.json: alignment_heads = {stated!r:.200}: must be pairs of a layer "
            f"below {layers} and a head below {heads}"
        )
    return [(layer, head) for layer, head in stated]


def _names_heads(generation: Mapping[str, Any], config: Mapping[str, Any]) -> bool:
    """A checkpoint with wrong heads transcribes all the same; models distilled from another may keep
    its heads by mistake."""
    try:
        return bool(alignment_heads(generation, Settings(config)))
    except UnsupportedModel as error:
        logger.warning("times of words are not to be had: %s", error)
        return False


def processor_of(
    architecture: str, whole: Mapping[str, Any], limits: Mapping[str, Any], *, embeds: bool = False
) -> str:
    """The entry of ``headrace.multimodal_processors`` for a checkpoint; "" if it takes no media: there is
    none, its tower is of another kind, or the operator limits all of its modalities to 0.

    Args:
        whole: ``config.json``.
        limits: ``model.limit_mm_per_prompt``.
        embeds: media may come as vectors, whatever the limits.
    """
    installed = plugins.installed("headrace.multimodal_processors")
    wrapper = WRAPPERS.get(architecture)
    name = architecture if wrapper is None else wrapper.processor or architecture
    if name not in installed:
        return ""
    if wrapper is None:
        return name
    served = wrapper.tower_of(whole) is not None
    return name if served and (embeds or _any_taken(wrapper, whole, limits)) else ""


def reads_towers(architecture: str, whole: Mapping[str, Any], limits: Mapping[str, Any]) -> bool:
    """False if the operator limits all modalities of a checkpoint of a joined architecture to 0.

    Args:
        whole: ``config.json``.
        limits: ``model.limit_mm_per_prompt``.
    """
    wrapper = WRAPPERS.get(architecture)
    return wrapper is None or _any_taken(wrapper, whole, limits)


def _any_taken(wrapper: Wrapper, whole: Mapping[str, Any], limits: Mapping[str, Any]) -> bool:
    return any(media_limit(limits, modality) for modality in wrapper.media_of(whole))


def with_used_towers(
    architecture: str, whole: Mapping[str, Any], limits: Mapping[str, Any]
) -> Mapping[str, Any]:
    """A config without those of several towers that nothing goes into: all modalities of such a one are
    limited to 0. Where nothing goes into any, the config is whole, as media may come as vectors.

    Args:
        whole: ``config.json``.
        limits: ``model.limit_mm_per_prompt``.
    """
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None or not _any_taken(wrapper, whole, limits):
        return whole
    return wrapper.without_towers(whole, limits)


AUTO_PROCESSOR = "transformers"
"""Entry of ``headrace.multimodal_processors`` that drives a checkpoint's own processor."""
_PROCESSOR_FILES = ("processor_config.json", "preprocessor_config.json")


def auto_processor_of(
    architecture: str, path: Path, limits: Mapping[str, Any], *, pools: bool, is_told: bool = True
) -> str:
    """:data:`AUTO_PROCESSOR` for a checkpoint that transformers' code runs; "" if it takes no images: its
    class has no towers, the folder no processor, the operator limits images to 0, or none is installed.

    Args:
        path: the checkpoint's folder.
        limits: ``model.limit_mm_per_prompt``.
        pools: the model is run for that.
        is_told: log what is missing.
    """
    if pools or not media_limit(limits, "image") or not takes_images(architecture):
        return ""
    missing = ""
    if AUTO_PROCESSOR not in plugins.installed("headrace.multimodal_processors"):
        missing = "images need pip install 'headrace-multimodal[transformers]'"
    elif not any((path / name).is_file() for name in _PROCESSOR_FILES):
        missing = f"{path} has no {' or '.join(_PROCESSOR_FILES)}"
    if missing and is_told:
        logger.warning("%s: text only: %s", architecture, missing)
    return "" if missing else AUTO_PROCESSOR
