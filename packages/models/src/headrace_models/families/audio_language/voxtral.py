"""Voxtral: Whisper's encoder on pieces of 30 s, four states to a vector, in front of a Llama decoder.

Liu et al. 2025, arXiv:2507.13264.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio_encoder import AudioEncoder, encoder_rules
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


class Voxtral(MediaDecoder):
    """A recording takes a placeholder for every 80 ms, silence up to the next 30 s included."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = _encoder_settings(part_of(whole, "audio_config"))
        self.group_size = settings.integer("encoder_ffn_dim")
        self.piece = 2 * settings.integer("max_source_positions")
        _check_groups(settings)
        self.encoder = AudioEncoder(context, settings, _TOWER)
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (self.group_size, self.hidden_size(), self.hidden_size()),
            Settings(whole).activation("projector_hidden_act", default="gelu"),
            bias=False,
        )

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] each; a multiple of a piece's frames.
        """
        return [self._recording(item["input_features"]) for item in inputs]

    def _recording(self, frames: Tensor) -> Tensor:
        """A piece at a time: memory is that of one, however long the recording."""
        return torch.cat([self._piece(piece) for piece in torch.split(frames, self.piece)])

    def _piece(self, frames: Tensor) -> Tensor:
        return self.projector(self.encoder([frames]).reshape(-1, self.group_size))


def _encoder_settings(stated: Mapping[str, Any]) -> Settings:
    """The encoder's settings under Whisper's names."""
    named = {_WHISPERS_NAMES.get(key, key): value for key, value in stated.items()}
    return Settings({**_ENCODER, **named})


def _check_groups(settings: Settings) -> None:
    """Raises: UnsupportedModel: a piece's states do not make whole groups."""
    hidden, grouped = settings.integer("d_model"), settings.integer("encoder_ffn_dim")
    positions = settings.integer("max_source_positions")
    if grouped % hidden or positions % (grouped // hidden):
        raise UnsupportedModel(
            f"config.json: audio_config: {positions} states of {hidden} numbers (max_source_positions, "
            f"hidden_size) do not make whole groups of {grouped} (intermediate_size)"
        )
