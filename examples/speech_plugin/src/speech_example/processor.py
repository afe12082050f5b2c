"""From samples to the strength of bands of frequencies, one row for every 40 ms."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.arrays import PackedArray
from headrace_core.errors import RequestError
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.waveform import samples_of
from headrace_multimodal.placeholders import expanded

RATE, FRAME = 16_000, 640
LONGEST = 20 * RATE


class BandsProcessor:
    """See ``headrace_core.multimodal.MediaProcessor``."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self.num_bands: int = config["num_bands"]
        self.placeholder_id: int = config["audio_token_id"]

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        if options:
            raise RequestError(
                f"mm_processor_kwargs: {sorted(options)} are no options of this model"
            )
        return [self._bands(samples_of(item, RATE)) for item in items]

    def _bands(self, samples: np.ndarray[Any, Any]) -> ProcessedMedia:
        if len(samples) > LONGEST:
            raise RequestError(
                f"{len(samples) / RATE:.1f} s of audio; at most 20", param="multi_modal_data"
            )
        whole = np.pad(samples, (0, -len(samples) % FRAME))
        spectrum = np.abs(np.fft.rfft(whole.reshape(-1, FRAME) * np.hanning(FRAME)))[:, 1:]
        bands = np.stack([b.mean(axis=1) for b in np.array_split(spectrum, self.num_bands, 1)], 1)
        rows = np.log1p(bands).astype(np.float32)
        return ProcessedMedia(
            {"bands": PackedArray("float32", rows.shape, rows.tobytes())}, len(rows)
        )

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        return self._bands(np.zeros(LONGEST, np.float32))

    def placeholder(self, modality: Modality, index: int) -> str:
        return "<|audio|>"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        return expanded(token_ids, media, self.placeholder_id)
