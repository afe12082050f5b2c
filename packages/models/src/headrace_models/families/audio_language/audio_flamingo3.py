"""Audio Flamingo 3: Whisper's encoder on pieces of 30 s, pooled by two, in front of a Qwen2 decoder; and
Music Flamingo, whose states turn with their time.

Goel et al. 2025, arXiv:2507.08128; Ghosh et al. 2025, arXiv:2511.10289.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.vision.axes import frequencies
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
_THETA, _PARTIAL, _FRAME = 1200.0, 0.2, 0.01
"""Of Music Flamingo: what configs may leave out; seconds of a frame are the last."""
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
        states = self._states(pieces, [n for own in lengths for n in own])
        vectors = self.projector(self.placed(states, [[n // 2 for n in own] for own in lengths]))
        return torch.split(vectors, [sum(length // 2 for length in own) for own in lengths])

    def placed(self, states: Tensor, lengths: Sequence[Sequence[int]]) -> Tensor:
        """States with their places in time.

        Args:
            states: [S, size] of all recordings.
            lengths: states of each recording's pieces.
        """
        return states

    def _states(self, pieces: Sequence[Tensor], lengths: Sequence[int]) -> Tensor:
        """A few pieces at a time: memory is that of those, however long the recordings."""
        steps = range(0, len(pieces), _AT_ONCE)
        return torch.cat(
            [self.encoder(pieces[i : i + _AT_ONCE], lengths[i : i + _AT_ONCE]) for i in steps]
        )


class MusicFlamingo(AudioFlamingo3):
    """Pairs of neighbouring numbers of a state turn by its piece's place and by its own within the piece, and
    both faster the later it is."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        super().make_towers(context, whole)
        stated = {"rope_parameters": {}, **whole}
        rope = Settings({"rope_theta": _THETA, **part_of(stated, "rope_parameters")})
        rope.refuse("rope_type", "default")
        size = self.encoder.final_norm.size
        self.most = rope.positive("rope_theta")
        turning = int(size * rope.positive("partial_rotary_factor", _PARTIAL))
        if 2 * turning > size or turning % 2:
            raise UnsupportedModel(
                f"config.json: rope_parameters.partial_rotary_factor: {turning} of {size} numbers must be "
                "even and at most half"
            )
        self.frequencies = frequencies(self.most, turning // 2)
        self.step = 4 * Settings(whole).positive("audio_frame_step", _FRAME)
        self.piece = self.encoder.num_positions // 2

    def placed(self, states: Tensor, lengths: Sequence[Sequence[int]]) -> Tensor:
        angles = torch.cat(
            [self._angles(index, length) for own in lengths for index, length in enumerate(own)]
        ).to(states.device)
        cosines, sines = angles.cos().double(), angles.sin().double()
        begin = states[:, : 2 * angles.shape[1]].double()
        even, odd = begin[:, 0::2], begin[:, 1::2]
        turned = torch.stack((even * cosines - odd * sines, odd * cosines + even * sines), dim=-1)
        rest = states[:, 2 * angles.shape[1] :]
        return torch.cat((turned.flatten(1).to(states.dtype), rest), dim=1)

    def _angles(self, index: int, length: int) -> Tensor:
        """[length, pairs] float32 of a piece's states, rounded as the checkpoint's makers did: angles are
        large."""
        within = torch.arange(length, dtype=torch.float32)
        seconds = torch.tensor(index) * self.piece * self.step + within * self.step
        by_piece = (torch.tensor(float(index)) / self.most * self.frequencies).expand(length, -1)
        by_place = (within / self.most * (2 * math.pi))[:, None] * self.frequencies
        return torch.cat((by_piece, by_place), dim=1) * (-seconds * 2 * math.pi)[:, None]


def _frames(pieces: Tensor, num_frames: int) -> list[int]:
    """Frames of each piece that hold audio."""
    most = pieces.shape[1]
    return [min(most, num_frames - most * index) for index in range(len(pieces))]
