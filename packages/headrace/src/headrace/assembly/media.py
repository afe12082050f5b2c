"""Media processing for a model: its processor, and what both sides of an engine need of it."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.assembly.media_files import file_reading, frame_sampling
from headrace.assembly.missing_packages import missing
from headrace.assembly.served import hidden_size
from headrace_core import plugins
from headrace_core.errors import ConfigError, RequestError
from headrace_core.multimodal import MediaInput, MediaItem, TakesEmbeds, media_limit

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace.assembly.speech.served import ServedSpeech
    from headrace_core.model import ModelInfo
    from headrace_core.multimodal import MediaProcessor, Modality
    from headrace_engine.config import MultiModalConfig
    from headrace_engine.execution.measuring.largest import LargestItem
    from headrace_engine.input_processing.media import MediaReader
    from headrace_engine.input_processing.media_embeds import MediaEmbeds
    from headrace_engine.input_processing.media_items import ContentHash

LONGEST_SIDE = 1 << 16
"""Pixels of a side that an operator may state for measuring memory."""


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
    resolved: ResolvedConfig, speech: ServedSpeech | None = None
) -> MediaReader | None:
    """Reads what prompts bring besides text; None: the model takes nothing else.

    Args:
        speech: of a model that transcribes, too; None: it does not.

    Raises:
        ConfigError: the folder of local media is none.
    """
    config, info = resolved.config, resolved.info
    processor = media_processor(info)
    _check_embeds(resolved, processor)
    options = _options(config.multimodal, processor)
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
        options=options,
        max_kept_bytes=int(config.multimodal.mm_processor_cache_gb * (1 << 30)),
        is_encoder_decoder=info.is_encoder_decoder,
        decoder_start_token_id=start if isinstance(start, int) else None,
        max_tokens=info.max_model_len,
        max_step=config.scheduler.max_num_batched_tokens or info.max_model_len,
        whole_items=config.scheduler.disable_chunked_mm_input,
        files=file_reading(config, speech, tuple(processor.modalities())),
        embeds=_media_embeds(resolved, processor, content_hash),
        interleaves=config.multimodal.interleave_mm_strings,
    )


def _check_embeds(resolved: ResolvedConfig, processor: MediaProcessor | None) -> None:
    """Raises: ConfigError: media are to come as vectors, and the model takes none."""
    if not resolved.config.model.enable_mm_embeds or isinstance(processor, TakesEmbeds):
        return
    reason = "takes no media" if processor is None else f"has {type(processor).__name__}"
    raise ConfigError(
        f"model.enable_mm_embeds = True: must be False for {resolved.info.architecture}, which {reason}",
        field="model.enable_mm_embeds",
    )


def _media_embeds(
    resolved: ResolvedConfig, processor: MediaProcessor, content_hash: ContentHash
) -> MediaEmbeds | None:
    """Reads media that come as vectors; None: none may."""
    info = resolved.info
    if not resolved.config.model.enable_mm_embeds:
        return None
    from headrace_engine.input_processing.media_embeds import MediaEmbeds

    assert isinstance(processor, TakesEmbeds)
    size = hidden_size(info, "model.enable_mm_embeds")
    return MediaEmbeds(processor, size, info.dtype, info.max_model_len, content_hash)


def _options(config: MultiModalConfig, processor: MediaProcessor | None) -> dict[str, Any]:
    """Options of the processor that hold for all requests.

    Raises: ConfigError: it does not take them.
    """
    options, rate = dict(config.mm_processor_kwargs), config.video_pruning_rate
    if processor is not None and options:
        _check(processor, options, "multimodal.mm_processor_kwargs", "multimodal.")
    if rate:
        name = "video_pruning_rate"
        if processor is None or "video" not in processor.modalities():
            raise ConfigError(
                f"multimodal.{name} = {rate}: must be left out: this model takes no videos",
                field=f"multimodal.{name}",
            )
        pruning = {name: rate}
        _check(processor, pruning, f"multimodal.{name}", f"multimodal.{name} = {rate}: ")
        options |= pruning
    return options


def _check(
    processor: MediaProcessor, options: Mapping[str, Any], field: str, beginning: str
) -> None:
    """Try options on an empty image.

    Raises: ConfigError: the processor does not take them.
    """
    if "image" not in processor.modalities():
        return
    import numpy as np

    blank = MediaItem("image", np.zeros((224, 224, 3), np.uint8), "", {})
    try:
        processor.process([blank], options)
    except RequestError as error:
        raise ConfigError(f"{beginning}{error}", field=field) from error


def largest_media(resolved: ResolvedConfig) -> Callable[[], Sequence[LargestItem]] | None:
    """Makes an item of each modality that prompts may bring, for measuring memory: on a GPU the largest; on
    a CPU a small one, and how many times as much the largest takes, as encoding that may take minutes. None:
    there is none, or the operator vouches for the memory.

    Raises:
        ConfigError: an item of the stated sizes would be larger than any that is taken.
    """
    limits, info = resolved.config.model.limit_mm_per_prompt, resolved.info
    if not info.processor or resolved.config.multimodal.skip_mm_profiling:
        return None
    for modality in limits:
        _check_pixels(modality, limits[modality], resolved.config.multimodal.max_image_pixels)

    def make() -> list[LargestItem]:
        processor = media_processor(info)
        assert processor is not None
        return [
            _largest(processor, modality, resolved)
            for modality in processor.modalities()
            if media_limit(limits, modality)
        ]

    return make


def _check_pixels(modality: str, stated: object, most: int) -> None:
    """Check the stated size of an image or a frame, as one of it is made."""
    sizes: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    width, height = (sizes.get(name) or 1 for name in ("width", "height"))
    if max(width, height) > LONGEST_SIDE or width * height > most:
        field = f"model.limit_mm_per_prompt.{modality}"
        raise ConfigError(
            f"{field} = {dict(sizes)}: width and height must be at most {LONGEST_SIDE}, and together no more "
            f"than max_image_pixels = {most}",
            field=field,
        )


def _largest(
    processor: MediaProcessor, modality: Modality, resolved: ResolvedConfig
) -> LargestItem:
    from headrace_engine.execution.measuring.largest import MEASURED_TOKENS, LargestItem

    sizes = _sizes(modality, resolved)
    try:
        item = processor.largest(modality, sizes)
    except RequestError as error:  # of no size that is taken: the operator's
        field = f"model.limit_mm_per_prompt.{modality}"
        raise ConfigError(f"{field}: {error}", field=field) from error
    factor, whole = 1.0, item.num_tokens
    if resolved.platform.device == "cpu" and whole > MEASURED_TOKENS:
        item = processor.largest(modality, {**sizes, "num_tokens": MEASURED_TOKENS})
        factor = max(1.0, whole / item.num_tokens)
    inputs = dict(item.inputs)
    return LargestItem(MediaInput(modality, inputs, "", item.num_tokens, runs=item.runs), factor)


def _sizes(modality: str, resolved: ResolvedConfig) -> dict[str, int]:
    """Sizes of an item to measure with: as the operator states them, or as much as a prompt can have. On a
    CPU, where encoding so long a video takes minutes, a video has as many tokens as a step."""
    config = resolved.config
    found = {"num_tokens": resolved.info.max_model_len}
    per_step = config.scheduler.max_num_batched_tokens
    if modality == "video" and resolved.platform.device == "cpu" and per_step is not None:
        found["num_tokens"] = min(found["num_tokens"], per_step)
    if modality == "video":
        most = config.multimodal.max_video_frames
        found["num_frames"] = frame_sampling(config.multimodal).most(most)
    stated = config.model.limit_mm_per_prompt.get(modality)
    options: Mapping[str, Any] = stated if isinstance(stated, Mapping) else {}
    given = {name: size for name, size in options.items() if size is not None and name != "count"}
    return {**found, **given}
