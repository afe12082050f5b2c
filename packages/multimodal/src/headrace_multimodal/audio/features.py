"""From audio items to spectrograms of a model's fixed length, by its ``preprocessor_config.json``.

Whisper and the families that took over its encoder share this.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal.audio.mel import MelSettings, log_mel
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.hashing import content_hash

Float = npt.NDArray[np.float32]

INPUT_FEATURES = "input_features"
"""Model input: [frames, bins] float32."""
NUM_FRAMES = "num_frames"
"""Model input: [1] int64; of the frames, how many hold audio and not only appended silence."""

_NAMES = ("preprocessor_config.json", "processor_config.json")


@dataclass(frozen=True, slots=True)
class Spectrogram:
    """A clip as an encoder takes it."""

    frames: Float
    """[frames, bins]."""
    num_frames: int
    """See :data:`NUM_FRAMES`."""

    def inputs(self) -> dict[str, PackedArray]:
        """For the model's encoder."""
        frames = np.ascontiguousarray(self.frames)
        count = np.array([self.num_frames], dtype=np.int64)
        return {
            INPUT_FEATURES: PackedArray("float32", frames.shape, frames.tobytes()),
            NUM_FRAMES: PackedArray("int64", (1,), count.tobytes()),
        }


class FeatureExtractor:
    """Makes spectrograms of one length.

    Args:
        num_frames: what the encoder takes.
    """

    def __init__(self, mel: MelSettings, num_frames: int) -> None:
        self.mel = mel
        self.num_frames = num_frames
        self.num_samples = num_frames * mel.hop

    @classmethod
    def of(cls, encoder: Mapping[str, Any], path: Path) -> FeatureExtractor:
        """By the encoder's part of ``config.json`` and the folder's preprocessor settings.

        Raises:
            UnsupportedModel: a file or value is unusable, or the two disagree.
        """
        stated = audio_settings(path)
        bins = integer(encoder, "num_mel_bins", 80)
        mel = mel_settings(stated, bins, path)
        num_frames = 2 * integer(encoder, "max_source_positions", 1500)
        made = stated.get("chunk_length")
        if made is not None and made * mel.sample_rate // mel.hop != num_frames:
            raise UnsupportedModel(
                f"{path}: the preprocessor makes frames of {made} s, the encoder takes {num_frames} of "
                f"{mel.hop} samples each"
            )
        return cls(mel, num_frames)

    def __call__(self, item: MediaItem, options: Mapping[str, Any]) -> Spectrogram:
        """One item, silence appended.

        Args:
            options: ``truncation``, true to cut longer audio off.

        Raises:
            RequestError: an unknown option; or audio longer than the model takes at once.
        """
        cut = truncation(options)
        samples = samples_of(item, self.mel.sample_rate)
        # Resampling a clip of exactly the limit may yield a few samples more.
        if len(samples) >= self.num_samples + self.mel.hop and not cut:
            seconds = len(samples) / self.mel.sample_rate
            limit = self.num_samples / self.mel.sample_rate
            raise RequestError(
                f"audio of {seconds:.2f} s: at most {limit:g} s are taken at once; cut it, or set "
                "mm_processor_kwargs to {'truncation': true}",
                param="multi_modal_data",
            )
        samples = samples[: self.num_samples]
        padded = np.zeros(self.num_samples, dtype=np.float32)
        padded[: len(samples)] = samples
        return Spectrogram(log_mel(padded, self.mel), -(-len(samples) // self.mel.hop))

    def longest(self) -> MediaItem:
        """Silence as long as the model takes it."""
        silence = np.zeros(self.num_samples, dtype=np.float32)
        return MediaItem("audio", silence, content_hash("audio", silence), {})


def mel_settings(stated: Mapping[str, Any], bins: int, path: Path) -> MelSettings:
    """A spectrogram as a preprocessor's settings have it.

    Args:
        stated: of :func:`audio_settings`.
        bins: that the encoder takes.
        path: the checkpoint's folder, for messages.

    Raises:
        UnsupportedModel: a value is unusable, or makes another number of bins.
    """
    mel = MelSettings(
        num_bins=integer(stated, "feature_size", bins),
        sample_rate=integer(stated, "sampling_rate", 16000),
        fft_size=integer(stated, "n_fft", 400),
        hop=integer(stated, "hop_length", 160),
    )
    if mel.num_bins != bins:
        raise UnsupportedModel(
            f"{path}: the preprocessor makes {mel.num_bins} bins, the encoder takes {bins} bins"
        )
    if stated.get("dither") or stated.get("do_normalize"):
        raise UnsupportedModel(
            f"{path}: preprocessor settings dither and do_normalize are not supported"
        )
    return mel


def truncation(options: Mapping[str, Any]) -> bool:
    """The option of that name; false where it is left out.

    Raises: RequestError: it is no truth value, or another option is given.
    """
    unknown = sorted(set(options) - {"truncation"})
    if unknown:
        raise RequestError(
            f"mm_processor_kwargs: {', '.join(map(repr, unknown))}: the only option is 'truncation'",
            param="mm_processor_kwargs",
        )
    value = options.get("truncation", False)
    if not isinstance(value, bool):
        raise RequestError(
            f"mm_processor_kwargs: truncation = {value!r}: must be true or false",
            param="mm_processor_kwargs",
            value=value,
        )
    return value


def audio_settings(path: Path) -> dict[str, Any]:
    """Settings of the feature extractor; newer checkpoints keep them one level deeper."""
    for name in _NAMES:
        try:
            value = json.loads((path / name).read_text(encoding="utf-8"))
        except FileNotFoundError:
            continue
        except (OSError, ValueError, RecursionError) as error:
            raise UnsupportedModel(
                f"{path / name}: unreadable: {type(error).__name__}: {error}"
            ) from error
        inner = value.get("feature_extractor", value) if isinstance(value, dict) else None
        if not isinstance(inner, dict):
            raise UnsupportedModel(f"{path / name}: must hold a JSON object")
        return inner
    return {}


def integer(settings: Mapping[str, Any], name: str, default: int) -> int:
    """A size among settings; the default where it is left out.

    Raises: UnsupportedModel: it is none.
    """
    value = settings.get(name)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or not 1 <= value <= 1 << 20:
        raise UnsupportedModel(f"{name} = {value!r}: must be an integer from 1 to {1 << 20}")
    return value
