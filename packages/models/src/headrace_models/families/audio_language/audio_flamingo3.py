"""Audio Flamingo 3: Whisper's encoder on pieces of 30 s, pooled by two, in front of a Qwen2 decoder.

Goel et al. 2025, arXiv:2507.08128.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_WHISPERS_NAMES = {
    "hidden_size": "d_model",
    "num_hidden_layers": "encoder_layers",
    "num_attention_heads": "encoder_attention_heads",
    "intermediate_size": "encoder_ffn_dim",
}
_ENCODER = {
    "d_model": 1280, "encoder_layers": 32, "encoder_attention_heads": 20, "encoder_ffn_dim": 5120,
    "num_mel_bins": 128, "max_source_positions": 1500, "activation_function": "gelu",
}  # fmt: skip
"""Values that a config may leave to be known."""
_MARGIN = 2
"""Frames after the audio that the last state depends on, through two convolutions."""
_AT_ONCE = 4
"""Pieces that are encoded together."""


class AudioFlamingo3(MediaDecoder):
    """A recording takes a placeholder for every 40 ms; states of silence behind it are not seen."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = part_of(whole, "audio_config")
        named = {_WHISPERS_NAMES.get(key, key): value for key, value in stated.items()}
        settings, hidden = Settings({**_ENCODER, **named}), self.hidden_size()
        self.encoder = AudioEncoder(context, settings, _TOWER, pools=True)
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (settings.integer("d_model"), hidden, hidden),
            Settings(whole).activation("projector_hidden_act", default="gelu"),
            bias=Settings(whole).flag("projector_bias", True),
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [pieces, frames, bins] each, and ``num_frames`` [1]: frames of all
                pieces that hold audio; silence is behind them.
        """
        pieces: list[Tensor] = []
        lengths: list[list[int]] = []
        for item in inputs:
            counts = _frames(item["input_features"], int(item["num_frames"][0]))
            whole = zip(item["input_features"], counts, strict=True)
            pieces += [piece[: count + _MARGIN] for piece, count in whole]
            lengths.append([(count + 1) // 2 for count in counts])
        vectors = self.projector(self._states(pieces, [n for own in lengths for n in own]))
        return torch.split(vectors, [sum(length // 2 for length in own) for own in lengths])

    def _states(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """A few pieces at a time: memory is that of those, however long the recordings."""
        steps = range(0, len(pieces), _AT_ONCE)
        return torch.cat(
            [self.encoder(pieces[i : i + _AT_ONCE], lengths[i : i + _AT_ONCE]) for i in steps]
        )


def _frames(pieces: Tensor, num_frames: int) -> list[int]:
    """Frames of each piece that hold audio."""
    most = pieces.shape[1]
    return [min(most, num_frames - most * index) for index in range(len(pieces))]
