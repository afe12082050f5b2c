"""Media processing for a model: its processor, and what both sides of an engine need of it."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

from headrace.assembly.missing_packages import missing
from headrace_core import plugins
from headrace_core.multimodal import MediaInput, media_limit

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.model import ModelInfo
    from headrace_core.multimodal import MediaProcessor
    from headrace_engine.input_processing.media import AudioDecode, MediaReader


def media_processor(info: ModelInfo) -> MediaProcessor | None:
    """The model's processor; None: it takes no media.

    Raises:
        PluginNotFound, PluginLoadError: it is not installed, or cannot be imported.
    """
    if not info.processor:
        return None
    factory = plugins.load("headrace.multimodal_processors", info.processor)
    processor: MediaProcessor = factory(info.whole_config or info.config, info.path)
    return processor


def media_reader(
    resolved: ResolvedConfig, decode_audio: AudioDecode | None = None
) -> MediaReader | None:
    """Reads what prompts bring besides text; None: the model takes nothing else.

    Args:
        decode_audio: decodes files that chats bring; None: they may bring none.
    """
    config, info = resolved.config, resolved.info
    processor = media_processor(info)
    if processor is None:
        return None
    try:
        from headrace_engine.input_processing.media import MediaReader
        from headrace_multimodal import content_hash
    except ImportError as error:
        raise missing(error) from error
    start = info.generation_config.get(
        "decoder_start_token_id", info.config.get("decoder_start_token_id")
    )
    return MediaReader(
        processor,
        content_hash,
        limits=config.model.limit_mm_per_prompt,
        is_encoder_decoder=info.is_encoder_decoder,
        decoder_start_token_id=start if isinstance(start, int) else None,
        decode_audio=decode_audio,
    )


def largest_media(resolved: ResolvedConfig) -> Callable[[], Sequence[MediaInput]] | None:
    """Makes the largest item of each modality that prompts may bring, for measuring memory."""
    limits, info = resolved.config.model.limit_mm_per_prompt, resolved.info
    if not info.processor:
        return None

    def make() -> list[MediaInput]:
        processor = media_processor(info)
        assert processor is not None
        found = []
        for modality in processor.modalities():
            if media_limit(limits, modality):
                item = processor.largest(modality)
                found.append(
                    MediaInput(modality, dict(item.inputs), "", item.num_tokens, runs=item.runs)
                )
        return found

    return make
