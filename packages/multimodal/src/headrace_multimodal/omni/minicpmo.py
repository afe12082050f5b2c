"""MiniCPM-o 2.6's media processor: images and videos as MiniCPM-V's, recordings of any length by the second.

Yao et al. 2024, arXiv:2408.01800 (images).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import INPUT_FEATURES, integer
from headrace_multimodal.audio.htk import Float
from headrace_multimodal.audio.pieces import OPTIONS, PiecesProcessor
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.images.minicpmv import MOST
from headrace_multimodal.images.processor import PIXEL_VALUES, part
from headrace_multimodal.images.words import Words
from headrace_multimodal.omni.by_modality import ByModality, Part
from headrace_multimodal.video.minicpmv import MiniCPMVVideos
from headrace_multimodal.video.processor import PIXEL_VALUES_VIDEOS

_WRITTEN = "(<audio>./</audio>)"
"""What prompts have for a recording, which is not one token."""
_BEGIN, _END, _VECTOR = "<|audio_start|>", "<|audio_end|>", "<unk>"
_CONTEXT, _BINS, _POSITIONS = 32_768, 80, 1500
_STATES_PER_SECOND = 50


class MiniCPMORecordings(PiecesProcessor):
    """``input_features`` are [frames, bins]: spectrograms of pieces of 30 s, one behind the other.

    The vectors of each second stand between two tokens. The first of these stands for a recording until it is
    laid out.
    """

    embeds_width = 1

    def __init__(self, config: Mapping[str, Any], path: Path, vector: int) -> None:
        encoder = {"num_mel_bins": _BINS, **part(config, "audio_config")}
        self._step = integer(config, "audio_pool_step", 2)
        self._states = integer(encoder, "max_source_positions", _POSITIONS)
        self._context = integer(config, "max_position_embeddings", _CONTEXT)
        words = Words(path)
        self._vector, self._end = vector, words.number(_END)
        super().__init__(encoder, path, words.number(_BEGIN), _BEGIN)
        if self._piece != 2 * self._states * self.mel.hop:
            raise UnsupportedModel(
                f"{path}: the preprocessor's chunk_length makes pieces of {self._piece} samples; the encoder "
                f"has places for {2 * self._states * self.mel.hop} (audio_config.max_source_positions)"
            )

    def longest(self, stated: Mapping[str, Any]) -> int:
        """As many whole pieces as the context holds."""
        self._piece = super().longest(stated)
        return self._piece * max(1, self._context // max(1, self._states // self._step))

    def frames(self, samples: Float) -> Float:
        """[frames, bins], piece by piece."""
        cuts = range(self._piece, len(samples), self._piece)
        pieces = np.split(samples, list(cuts))
        return np.concatenate([self.frames_within(own, self._piece) for own in pieces])

    def num_tokens(self, num_frames: int) -> int:
        """Vectors: of each piece the states that fill groups."""
        whole, rest = divmod(num_frames, 2 * self._states)
        return whole * (self._states // self._step) + (rest + 1) // 2 // self._step

    def _processed(self, samples: Float, cut: bool) -> ProcessedMedia:
        made = super()._processed(samples, cut)
        return replace(self.laid_out(made.num_tokens), inputs=made.inputs)

    def laid_out(self, num_vectors: int) -> ProcessedMedia:
        """Tokens of a recording of so many vectors."""
        most = max(1, _STATES_PER_SECOND // self._step)
        ids: list[int] = []
        runs = []
        for begin in range(0, num_vectors, most):
            number = min(most, num_vectors - begin)
            runs.append((len(ids) + 1, number))
            ids += [self.audio_token, *[self._vector] * number, self._end]
        return ProcessedMedia({}, len(ids), tuple(ids), tuple(runs))

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """A piece of silence, or what ``num_tokens`` or the stated ``length`` in samples allow."""
        second = max(1, _STATES_PER_SECOND // self._step)
        whole, rest = divmod(sizes.get("num_tokens", self._piece), second + 2)
        vectors = whole * second + max(0, rest - 2)
        length = min(self._piece, sizes.get("length", self._piece))
        least = 2 * self._step * self.mel.hop
        length = max(least, min(length, vectors * least))
        return self._processed(np.zeros(length, np.float32), cut=False)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A recording of so many vectors; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        if num_vectors > self._context:
            raise wrong_fact("vectors", num_vectors, f"at most {self._context}")
        return self.laid_out(num_vectors)


class MiniCPMOProcessor(ByModality):
    """Prompts have ``(<image>./</image>)``, ``(<video>./</video>)`` and ``(<audio>./</audio>)``, which are no
    tokens, or tokens that stand for items. A tower that the config leaves out takes nothing.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.
    """

    embeds_width = 1

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        self._words = Words(path)
        self._seen: MiniCPMVVideos | None = None
        self._heard: MiniCPMORecordings | None = None
        parts = []
        if "vision_config" in config:
            self._seen = seen = MiniCPMVVideos(config, path)
            marks = {PIXEL_VALUES: seen.placeholder_id}
            if seen.video_placeholder_id is not None:
                marks[PIXEL_VALUES_VIDEOS] = seen.video_placeholder_id
            parts.append(Part(seen, (MOST,), marks))
        self._vector = self._seen.placeholder_id if self._seen else self._words.number(_VECTOR)
        if "audio_config" in config:
            self._heard = heard = MiniCPMORecordings(config, path, self._vector)
            parts.append(Part(heard, OPTIONS, {INPUT_FEATURES: heard.audio_token}))
        super().__init__(parts, {})

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`; the token of a vector among them."""
        return tuple(dict.fromkeys((*super().placeholder_ids, self._vector)))

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """Each image behind its number."""
        others = [item for item in media if not self._is_heard(item)]
        if self._seen is not None and others:
            token_ids = self._seen.with_marks(token_ids, others)
        if self._heard is not None and len(others) < len(media):
            token_ids = self._words.replaced(token_ids, _WRITTEN, self._heard.audio_token)
        return super().place(token_ids, media)

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """See :class:`headrace_core.multimodal.TakesEmbeds`."""
        own = self._heard if modality == "audio" else self._seen
        assert own is not None
        return own.embedded(modality, num_vectors, facts)

    def _is_heard(self, item: ProcessedMedia) -> bool:
        return self._heard is not None and item.token_ids[:1] == (self._heard.audio_token,)

    def _kind(self, item: ProcessedMedia) -> int:
        """Items that come as vectors have no inputs that tell."""
        if self._heard is not None and self._is_heard(item):
            return self._heard.audio_token
        assert self._seen is not None
        known = PIXEL_VALUES_VIDEOS in item.inputs
        return super()._kind(item) if known else self._seen.placeholder_id
