"""MiDashengLM: Dasheng's states, some of which become a vector, in front of the text of Qwen2.5-Omni.

Xiaomi 2025, arXiv:2508.03983.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.dasheng import Dasheng, encoder_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_encoder", "audio_projector.net"
_JOINED = 5
"""States of a vector, where configs leave it out."""


class MiDashengLM(MediaDecoder):
    """A recording takes a placeholder for every 200 ms."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.0", "projector.up"),
        WeightRule(f"{_PROJECTOR}.2", "projector.down"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.encoder = Dasheng(context, part_of(whole, "audio_encoder_config"), _TOWER)
        self.joined = Settings(whole).integer("subsample_factor", _JOINED, maximum=1 << 10)
        hidden = self.hidden_size()
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.0",
            f"{_PROJECTOR}.2",
            (self.joined * self.encoder.hidden_size, hidden, hidden),
            "gelu",
        )

    def unread_weights(self) -> Mapping[str, str]:
        """The spectrogram's tables are made where recordings are read."""
        return {
            rf"{_TOWER}\.front_end\..*": "made by the processor",
            rf"{_TOWER}\.init_bn\.num_batches_tracked": "of training",
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] and ``num_heard`` [1] each, states that are heard.
        """
        return [self._recording(x["input_features"], int(x["num_heard"][0])) for x in inputs]

    def _recording(self, frames: Tensor, num_heard: int) -> Tensor:
        states = self.encoder(frames, num_heard)
        whole = len(states) // self.joined * self.joined
        return self.projector(states[:whole].reshape(-1, self.joined * states.shape[1]))
