"""Readers of the files and objects that requests bring, as the engine's configuration has them."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace.assembly.speech.served import audio_limits, chat_audio_decoder
from headrace.environment import FETCH_TIMEOUTS, REDIRECTS
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace.assembly.speech.served import ServedSpeech
    from headrace_engine.config import EngineConfig, MultiModalConfig
    from headrace_engine.input_processing.media_items import FileReading
    from headrace_multimodal.fetching import MediaFetcher
    from headrace_multimodal.images.pixels import Colour
    from headrace_multimodal.video.limits import VideoLimits
    from headrace_multimodal.video.sampling import FrameSampling


def file_reading(
    config: EngineConfig, speech: ServedSpeech | None, modalities: tuple[str, ...]
) -> FileReading:
    """Readers for a model's modalities; processes that decode start when they are needed.

    Args:
        speech: of a model that transcribes, too; None: it does not.

    Raises:
        ConfigError: the folder of local media is none, a limit is wrong, or a variable is malformed.
    """
    from headrace_engine.input_processing.media_items import NO_FILES
    from headrace_multimodal.reading import reading as during

    fetch = _fetcher(config)
    reading = NO_FILES._replace(fetch=fetch, during=during)
    closers: list[Callable[[], None]] = [fetch.close]
    if "audio" in modalities:
        decode = chat_audio_decoder(config.speech, speech)
        closers.append(decode.close)
        reading = reading._replace(audio=decode)
    if "image" in modalities:
        reading = _with_images(reading, config.multimodal, closers)
    if "video" in modalities:
        reading = _with_videos(reading, config.multimodal, closers)

    def close() -> None:
        for closer in closers:
            closer()

    return reading._replace(close=close)


def _with_images(
    reading: FileReading, config: MultiModalConfig, closers: list[Callable[[], None]]
) -> FileReading:
    from headrace_multimodal.images.decoding import ImageDecoder
    from headrace_multimodal.images.pixels import ImageLimits, pixels_of

    limits = ImageLimits(config.max_image_file_bytes, config.max_image_pixels)
    background = _background(config)
    decode = ImageDecoder(limits, processes=config.image_decoders, background=background)
    closers.append(decode.close)
    pixels = functools.partial(pixels_of, limits=limits, background=background)
    return reading._replace(image=decode, pixels=pixels)


def _with_videos(
    reading: FileReading, config: MultiModalConfig, closers: list[Callable[[], None]]
) -> FileReading:
    from headrace_multimodal.video.clip import clips_of
    from headrace_multimodal.video.decoding import VideoDecoder

    limits = _video_limits(config)
    decode = VideoDecoder(
        limits,
        frame_sampling(config),
        seconds=config.video_decode_seconds,
        processes=config.video_decoders,
    )
    closers.append(decode.close)
    return reading._replace(video=decode, videos=functools.partial(clips_of, limits=limits))


def frame_sampling(config: MultiModalConfig) -> FrameSampling:
    """Frames that are taken of a video in a file."""
    from headrace_multimodal.video.sampling import FrameSampling

    return FrameSampling(**config.media_io_kwargs.get("video", {}))


def _video_limits(config: MultiModalConfig) -> VideoLimits:
    from headrace_multimodal.video.limits import VideoLimits

    return VideoLimits(
        encoded_bytes=config.max_video_file_bytes,
        frame_pixels=config.max_image_pixels,
        seconds=config.max_video_seconds,
        frames=config.max_video_frames,
        pixels=config.max_video_pixels,
    )


def _background(config: MultiModalConfig) -> Colour:
    from headrace_multimodal.images.pixels import WHITE

    stated = config.media_io_kwargs.get("image", {}).get("rgba_background_color", WHITE)
    red, green, blue = stated
    return red, green, blue


def _fetcher(engine_config: EngineConfig) -> MediaFetcher:
    """Raises: ConfigError: the folder of local media is none, or a variable is malformed."""
    from headrace_multimodal.fetch import FetchRules
    from headrace_multimodal.fetching import MediaFetcher

    config = engine_config.multimodal
    folder = config.allowed_local_media_path
    if folder is not None and not Path(folder).is_dir():
        raise ConfigError(
            f"multimodal.allowed_local_media_path = {folder!r}: must be a folder",
            field="multimodal.allowed_local_media_path",
        )
    rules = FetchRules(
        allowed_hosts=frozenset(config.allowed_media_domains) or None,
        allow_private=config.allow_private_media,
        max_bytes=config.max_image_file_bytes,
    )
    if not follows_redirects(os.environ):
        rules = rules.without_redirects()
    return MediaFetcher(
        rules,
        seconds=fetch_seconds(os.environ),
        max_bytes={
            "audio": audio_limits(engine_config.speech, os.environ).file_bytes,
            "video": config.max_video_file_bytes,
        },
        folder=None if folder is None else Path(folder),
    )


def fetch_seconds(environ: Mapping[str, str]) -> dict[str, float]:
    """Seconds of a transfer, by modality, that variables state.

    Raises:
        ConfigError: one is not a number above 0.
    """
    found = {}
    for modality, name in FETCH_TIMEOUTS.items():
        given = environ.get(name, "")
        if not given:
            continue
        try:
            seconds = float(given)
        except ValueError:
            seconds = 0.0
        if not 0 < seconds < 1e6:  # false for what is no number, too
            raise ConfigError(f"{name} = {given!r}: must be seconds above 0", field=name)
        found[modality] = seconds
    return found


def follows_redirects(environ: Mapping[str, str]) -> bool:
    """
    Raises:
        ConfigError: the variable is neither 0 nor 1.
    """
    given = environ.get(REDIRECTS, "1")
    if given not in ("0", "1"):
        raise ConfigError(f"{REDIRECTS} = {given!r}: must be 0 or 1", field=REDIRECTS)
    return given == "1"
