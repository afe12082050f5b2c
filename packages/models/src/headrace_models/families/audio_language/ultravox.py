"""Ultravox: Whisper's encoder, eight states to a vector, in front of a decoder that another checkpoint has.

Fixie AI 2024, "Ultravox".
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.linear import Linear
from headrace_models.layers.norm import RMSNorm
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "audio_tower", "multi_modal_projector"
_EPS = 1e-6
_SWIGLU = "swiglu"
_ENCODER = {"activation_function": "gelu"}
"""Value that configs may leave out."""
_MARGIN = 2
"""Frames behind the audio that the last state depends on, through two convolutions."""


class StackProjector(Layer):
    """Neighbouring states side by side, through a norm, two products and another norm.

    Args:
        whole: ``config.json``.
        sizes: of a state, and of a vector.
    """

    def __init__(
        self, context: BuildContext, whole: Mapping[str, Any], name: str, sizes: tuple[int, int]
    ) -> None:
        settings, (state, vector) = Settings(whole), sizes
        self.ops, self.group = context.ops, settings.integer("stack_factor", 8)
        hidden = settings.integer("hidden_size", 4096)
        self.gated = whole.get("projector_act", _SWIGLU) == _SWIGLU
        self.activation = "silu" if self.gated else settings.activation("projector_act")
        between = hidden // 2 if self.gated else hidden
        self.norm = RMSNorm(context, f"{name}.ln_pre", self.group * state, _EPS)
        self.up = Linear(context, f"{name}.linear_1", self.group * state, [Part(hidden)])
        self.down = Linear(context, f"{name}.linear_2", between, [Part(vector)])
        self.inner_norm = self.last_norm = None
        if settings.flag("projector_ln_mid", False):
            self.inner_norm = RMSNorm(context, f"{name}.ln_mid", between, _EPS)
        else:
            self.last_norm = RMSNorm(context, f"{name}.ln_post", vector, _EPS)

    def __call__(self, states: Tensor) -> Tensor:
        """states [S, state] -> [ceil(S / group), vector]; zeros fill up the last group."""
        padded = functional.pad(states, (0, 0, 0, -len(states) % self.group))
        x = self.up(self.norm(padded.view(-1, self.group * states.shape[1])))
        x = self._activated(x)
        x = self.down(x if self.inner_norm is None else self.inner_norm(x))
        return x if self.last_norm is None else self.last_norm(x)

    def _activated(self, x: Tensor) -> Tensor:
        """The second half is the gate."""
        if not self.gated:
            return self.ops.activation(x, self.activation)
        made, gate = x.chunk(2, dim=-1)
        return made * self.ops.activation(gate.contiguous(), self.activation)


class Ultravox(MediaDecoder):
    """A recording takes a placeholder for every 160 ms of a window of 30 s."""

    modalities: ClassVar[Sequence[str]] = ("audio",)
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *encoder_rules(_TOWER, "encoder"),
        WeightRule(f"{_PROJECTOR}.ln_pre", "projector.norm"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.ln_mid", "projector.inner_norm"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
        WeightRule(f"{_PROJECTOR}.ln_post", "projector.last_norm"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = ((f"{_TOWER}.model.encoder.", f"{_TOWER}."),)
    """Of towers that are in a checkpoint of Whisper's."""

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        settings.refuse("audio_latency_block_size")
        settings.refuse("num_projector_layers", 0)
        audio = Settings({**_ENCODER, **part_of(whole, "audio_config")})
        if audio.flag("scale_embedding", False):
            raise UnsupportedModel(
                "config.json: audio_config.scale_embedding = True: must be false"
            )
        self.encoder = AudioEncoder(context, audio, _TOWER)
        self.window = 2 * self.encoder.num_positions
        sizes = (audio.integer("d_model"), self.hidden_size())
        self.projector = StackProjector(context, whole, _PROJECTOR, sizes)

    def unread_weights(self) -> Mapping[str, str]:
        """Whisper's decoder."""
        return {rf"{_TOWER}\.(model\.decoder|proj_out)\..*": "it is not used"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``input_features`` [frames, bins] each, of whole recordings.
        """
        return [self._recording(item["input_features"]) for item in inputs]

    def _recording(self, frames: Tensor) -> Tensor:
        """A window at a time: memory is that of one, however long the recording."""
        first, *others = torch.split(frames, self.window)
        vectors = [self.projector(self.encoder([first]))]
        return torch.cat([*vectors, *(self.projector(self._further(own)) for own in others)])

    def _further(self, frames: Tensor) -> Tensor:
        """States of a window behind the first: silence follows a short one, and the last group has states of
        it, which nothing else sees."""
        if len(frames) == self.window:
            return self.encoder([frames])
        group = 2 * self.projector.group
        kept = -(-len(frames) // group) * group
        more = min(self.window, kept + _MARGIN) - len(frames)
        padded = functional.pad(frames, (0, 0, 0, more))
        return self.encoder.partly_seen(padded, kept // 2, (len(frames) + 1) // 2)
