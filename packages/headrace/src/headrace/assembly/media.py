"""Media processing for a model: its processor, and what both sides of an engine need of it."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.assembly.missing_packages import missing
from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.multimodal import MediaInput, media_limit

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.model import ModelInfo
    from headrace_core.multimodal import MediaProcessor
    from headrace_engine.config import MultiModalConfig
    from headrace_engine.input_processing.media import AudioDecode, FileReading, MediaReader


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
        decode_audio: decodes recordings that chats bring; None: they may bring none.

    Raises:
        ConfigError: the folder of local media is none.
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
        options=config.multimodal.mm_processor_kwargs,
        max_kept_bytes=int(config.multimodal.mm_processor_cache_gb * (1 << 30)),
        is_encoder_decoder=info.is_encoder_decoder,
        decoder_start_token_id=start if isinstance(start, int) else None,
        files=_file_reading(config.multimodal, decode_audio, "image" in processor.modalities()),
    )


def _file_reading(
    config: MultiModalConfig, decode_audio: AudioDecode | None, reads_images: bool
) -> FileReading:
    """Readers of files; processes that decode start when they are needed.

    Raises:
        ConfigError: the folder of local media is none.
    """
    from headrace_engine.input_processing.media import FileReading
    from headrace_multimodal.fetch import FetchRules
    from headrace_multimodal.fetching import MediaFetcher
    from headrace_multimodal.images.decoding import ImageDecoder
    from headrace_multimodal.images.pixels import ImageLimits, pixels_of

    folder = config.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"multimodal.allowed_local_media_path = {folder!r}: must be a folder",
            field="multimodal.allowed_local_media_path",
        )
    hosts = frozenset(config.allowed_media_domains)
    rules = FetchRules(
        allowed_hosts=hosts or None,
        allow_private=config.allow_private_media,
        max_bytes=config.max_image_file_bytes,
    )
    fetch = MediaFetcher(rules, folder=None if folder is None else Path(folder))
    if not reads_images:
        return FileReading(audio=decode_audio, fetch=fetch, close=fetch.close)
    limits = ImageLimits(config.max_image_file_bytes, config.max_image_pixels)
    decode = ImageDecoder(limits, processes=config.image_decoders)

    def close() -> None:
        fetch.close()
        decode.close()

    return FileReading(
        audio=decode_audio,
        image=decode,
        pixels=functools.partial(pixels_of, limits=limits),
        fetch=fetch,
        close=close,
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
                inputs = dict(item.inputs)
                found.append(MediaInput(modality, inputs, "", item.num_tokens, runs=item.runs))
        return found

    return make
