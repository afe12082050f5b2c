"""Qwen2-Audio's media processor: Whisper's spectrogram, a placeholder for every 40 ms of audio."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, MediaPlacement, Modality, ProcessedMedia
from headrace_multimodal.audio.features import FeatureExtractor, Spectrogram
from headrace_multimodal.embeds_facts import check_facts, wrong_fact
from headrace_multimodal.placeholders import expanded

_ENCODER = {"num_mel_bins": 128, "max_source_positions": 1500}
"""Values that the published configs leave out."""
_AUDIO_TOKEN = 151646
_MARGIN = 2
"""Frames after the audio that the last encoder state depends on, through two convolutions."""


class Qwen2AudioProcessor:
    """See :class:`headrace_core.multimodal.MediaProcessor`."""

    def __init__(self, config: Mapping[str, Any], path: Path) -> None:
        stated = config.get("audio_config")
        encoder = {} if stated is None else stated
        if not isinstance(encoder, Mapping):
            raise UnsupportedModel(f"config.json: audio_config = {encoder!r}: must be an object")
        self.extract = FeatureExtractor.of({**_ENCODER, **encoder}, path)
        token = config.get("audio_token_index", config.get("audio_token_id", _AUDIO_TOKEN))
        if isinstance(token, bool) or not isinstance(token, int) or token < 0:
            raise UnsupportedModel(
                f"config.json: audio_token_index = {token!r}: must be a token id"
            )
        self.audio_token = token

    def modalities(self) -> Sequence[Modality]:
        return ("audio",)

    def process(
        self, items: Sequence[MediaItem], options: Mapping[str, Any]
    ) -> list[ProcessedMedia]:
        """Raises: RequestError if a clip is too long, or too short to become a token."""
        return [self._processed(self.extract(item, options)) for item in items]

    def _processed(self, whole: Spectrogram) -> ProcessedMedia:
        """The silence behind the audio is left out: the encoder's attention does not see it."""
        count = num_audio_tokens(whole.num_frames)
        if count == 0:
            seconds = whole.num_frames * self.extract.mel.hop / self.extract.mel.sample_rate
            raise RequestError(
                f"audio of {seconds:.2f} s: too short; the model needs 0.03 s",
                param="multi_modal_data",
            )
        kept = Spectrogram(whole.frames[: whole.num_frames + _MARGIN], whole.num_frames)
        return ProcessedMedia(kept.inputs(), count)

    def largest(self, modality: Modality, sizes: Mapping[str, int]) -> ProcessedMedia:
        """A clip of the full length."""
        return self.process([self.extract.longest()], {})[0]

    embeds_width = 1

    def embedded(
        self, modality: Modality, num_vectors: int, facts: Mapping[str, Any]
    ) -> ProcessedMedia:
        """A clip of as many vectors; see :class:`headrace_core.multimodal.TakesEmbeds`."""
        check_facts(facts, ())
        most = num_audio_tokens(self.extract.num_frames)
        if num_vectors > most:
            raise wrong_fact("vectors", num_vectors, f"at most {most}, which a clip has")
        return ProcessedMedia({}, num_vectors)

    @property
    def placeholder_ids(self) -> tuple[int, ...]:
        """See :class:`headrace_core.multimodal.MediaProcessor`."""
        return (self.audio_token,)

    def placeholder(self, modality: Modality, index: int) -> str:
        """As the model's own chat template writes it."""
        return f"Audio {index + 1}: <|audio_bos|><|AUDIO|><|audio_eos|>\n"

    def place(self, token_ids: Sequence[int], media: Sequence[ProcessedMedia]) -> MediaPlacement:
        """See :func:`headrace_multimodal.placeholders.expanded`."""
        return expanded(token_ids, media, self.audio_token)


def num_audio_tokens(num_frames: int) -> int:
    """A convolution halves the frames, rounding up; pooling halves again, rounding down."""
    return (num_frames + 1) // 2 // 2
