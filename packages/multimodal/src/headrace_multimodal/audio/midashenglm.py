"""MiDashengLM's media processor: a spectrogram in decibels, a token for every 200 ms.

Xiaomi 2025, arXiv:2508.03983.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, audio_settings, integer
from headrace_multimodal.audio.htk import Float, Windows, mel_power
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.hashing import content_hash
from headrace_multimodal.images.processor import part, token_id
from headrace_multimodal.images.vocabulary import named_token, special_token_id
from headrace_multimodal.placeholders import expanded

NUM_HEARD = "num_heard"
"""Model input: [1] int64, states that hold nothing but the recording."""
MAX_SECONDS = 600
"""A recording is encoded whole, so that it must not be of any length."""
_FRAMES, _STATES = 4, 5
"""Of a state, and of a token."""
_FLOOR, _RANGE = 1e-10, 120.0
"""Least power, and decibels below the loudest that are kept."""


class MiDashengLMProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        encoder = part(config, "audio_encoder_config")
        rate = integer(encoder, "sample_rate", 16_000)
        self.windows = Windows(
            rate,
            integer(encoder, "n_fft", 512),
            integer(encoder, "win_length", 512),
            integer(encoder, "hop_length", 160),
            integer(encoder, "n_mels", 64),
        )
        self.joined = integer(config, "subsample_factor", _STATES)
        stated = audio_settings(path)
        for key, found, only in (
            ("f_min", encoder.get("f_min", 0), 0),
            ("f_max", encoder.get("f_max", rate / 2), rate / 2),
            ("center", encoder.get("center", True), True),
            ("sampling_rate", stated.get("sampling_rate", rate), rate),
            ("do_normalize", stated.get("do_normalize", False), False),
            ("patch_stride[1]", _columns(encoder), _FRAMES),
        ):
            if found != only:
                raise UnsupportedModel(f"MiDashengLM's {key} = {found!r}: must be {only!r}")
        if self.windows.window > self.windows.fft_size:
            raise UnsupportedModel(
                f"win_length = {self.windows.window}: must be at most n_fft = {self.windows.fft_size}"
            )
        self.audio_token = token_id(config, "audio_token_id")
        self._begin, self._end = (
            special_token_id(path, named_token(path, f"audio_{end}_token", f"<|audio_{end}|>"))
            for end in ("bos", "eos")
        )

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError: a recording that is too short or too long; any option."""
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {', '.join(map(repr, sorted(options)))}: MiDashengLM's processor has "
                "no options",
                param="mm_processor_kwargs",
            )
        return [self._processed(samples_of(item, self.windows.sample_rate)) for item in items]

    def _processed(self, samples: Float) -> ProcessedMedia:
        seconds = len(samples) / self.windows.sample_rate
        count = (1 + len(samples) // self.windows.hop) // _FRAMES // self.joined
        if not count or len(samples) <= self.windows.fft_size // 2:
            raise _wrong(f"audio of {seconds:.3f} s: too short to become a token")
        if seconds > MAX_SECONDS:
            raise _wrong(f"audio of {seconds:.2f} s: at most {MAX_SECONDS} s are taken at once")
        frames = self.frames(samples)
        heard = np.array([len(samples) // (self.windows.hop * _FRAMES)], np.int64)
        inputs = {
            INPUT_FEATURES: PackedArray("float32", frames.shape, frames.tobytes()),
            NUM_HEARD: PackedArray("int64", (1,), heard.tobytes()),
        }
        return ProcessedMedia(inputs, count)

    def frames(self, samples: Float) -> Float:
        """[1 + n // hop, bins] of decibels."""
        power = np.maximum(mel_power(samples, self.windows), np.float32(_FLOOR))
        loud = 10 * np.log10(power)
        return np.ascontiguousarray(np.maximum(loud, loud.max() - _RANGE), dtype=np.float32)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """Silence as long as the model takes it, or as ``num_tokens`` allow."""
        most = MAX_SECONDS * self.windows.sample_rate
        per_token = self.windows.hop * _FRAMES * self.joined
        if "num_tokens" in sizes:
            most = min(most, max(1, sizes["num_tokens"]) * per_token)
        silence = np.zeros(max(most, per_token), dtype=np.float32)
        item = MediaItem("audio", silence, content_hash("audio", silence), {})
        return self.process([item], {})[0]

    embeds_width = 1

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of as many vectors; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        samples = MAX_SECONDS * self.windows.sample_rate
        most = (1 + samples // self.windows.hop) // _FRAMES // self.joined
        if num_vectors > most:
            raise wrong_fact("vectors", num_vectors, f"at most {most}")
        return ProcessedMedia({}, num_vectors)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return "<|audio_bos|><|AUDIO|><|audio_eos|>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`. Placeholders that stand alone get the tokens
        that stand in front of a recording and behind it."""
        framed: list[int] = []
        neighbours = zip((-1, *token_ids[:-1]), token_ids, (*token_ids[1:], -1), strict=True)
        for before, token, after in neighbours:
            alone = before != self._begin and after != self._end
            own = token == self.audio_token and alone
            framed += [self._begin, token, self._end] if own else [token]
        return expanded(framed, media, self.audio_token)


def _columns(encoder: Mapping[str, Any]) -> object:
    stride = encoder.get("patch_stride")
    return stride[1] if isinstance(stride, list) and len(stride) == 2 else stride


def _wrong(what: str) -> RequestError:
    return RequestError(what, param="multi_modal_data")
