"""MiniCPM-V: SigLIP's tower on slices of any shape, and a resampler that makes as many vectors of each; and
MiniCPM-o 2.6, which hears as well, by Whisper's encoder.

Yao et al. 2024, arXiv:2408.01800.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.audio.whisper import AudioEncoder, encoder_rules
from headrace_models.layers.base import Layer
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.resampler import Resampler, resampler_rules
from headrace_models.layers.vision.towers.clip import Vector, tower_rules
from headrace_models.layers.vision.towers.fractional import FractionalTower
from headrace_models.layers.vision.towers.named_vit import NamedVit, named_vit_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _RESAMPLER = "vpm", "resampler"
_VISION: Mapping[str, Any] = {
    "hidden_size": 1152, "intermediate_size": 4304, "num_hidden_layers": 27, "num_attention_heads": 16,
    "image_size": 980, "patch_size": 14,
}  # fmt: skip
"""Values that configs may leave out."""
_NAMED, _IN_A_ROW = "2.0", "2.5"
"""The versions before 2.6."""
_PIXELS: Mapping[str, str] = {"image": "pixel_values", "video": "pixel_values_videos"}
"""Modality -> name of the model's input."""


class MiniCPMV(MediaDecoder):
    """An image is a small picture of the whole, and slices of it, a video is frames; each is as many
    vectors. The config may name no version where it is 2.0 or 2.5, which take no videos. The tower of 2.5
    tells the places of a slice's patches as if they stood in one row; that of 2.0 is called by a name, and
    queries of its resampler have places."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *named_vit_rules(_TOWER, "tower"),
        *resampler_rules(_RESAMPLER, "resampler"),
        WeightRule(f"{_RESAMPLER}.pos_embed", "resampler.places.vector"),
    )

    def place_media(self, whole: Mapping[str, Any]) -> None:
        """The version decides which modalities there are."""
        self.version = _version(whole)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        settings = Settings(whole)
        self.in_a_row = self.version == _IN_A_ROW
        number = settings.integer("query_num", 64)
        if self.version == _NAMED:
            drops = settings.flag("drop_vision_last_layer", True)
            vit = NamedVit(context, whole.get("vision_encoder"), _TOWER, drops_last=drops)
            self.tower: FractionalTower | NamedVit = vit
            queries = _PlacedQueries(context, (vit.size, self.hidden_size()), number)
            self.resampler: Resampler = queries
            return
        stated = {**_VISION, **part_of(whole, "vision_config"), "model_type": "siglip_vision_model"}
        if settings.flag("drop_vision_last_layer", True):
            layers = Settings(stated).integer("num_hidden_layers", minimum=2)
            stated["num_hidden_layers"] = layers - 1
        tower = FractionalTower(context, stated, _TOWER, final_norm=True)
        self.tower = tower
        sizes = (tower.positions.size, self.hidden_size())
        self.resampler = Resampler(context, _RESAMPLER, sizes, number)

    @property
    def modalities(self) -> Sequence[str]:  # type: ignore[override]
        """Of the version."""
        return ("image",) if self.version in (_NAMED, _IN_A_ROW) else ("image", "video")

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, 3 * patch * patch] of an image's slices, of videos
                ``pixel_values_videos`` of the frames, and ``tgt_sizes`` [slices, 2]: rows and columns of
                their patches.
        """
        sizes = [[(rows, columns) for rows, columns in own["tgt_sizes"].tolist()] for own in inputs]
        grids = [grid for own in sizes for grid in own]
        placed = [(1, rows * columns) for rows, columns in grids] if self.in_a_row else grids
        states = self.tower.packed(torch.cat([own[_PIXELS[modality]] for own in inputs]), placed)
        vectors = self.resampler(states, grids)
        return torch.split(vectors, [len(own) * self.resampler.number for own in sizes])


class _PlacedQueries(Resampler):
    """Queries stand on a square, as patches do on an image."""

    def __init__(self, context: BuildContext, sizes: tuple[int, int], number: int) -> None:
        super().__init__(context, _RESAMPLER, sizes, number)
        self.places = Vector(f"{_RESAMPLER}.pos_embed", number, sizes[1])

    def asked(self) -> Tensor:
        """See :meth:`Resampler.asked`."""
        return super().asked() + self.places.vector


def _version(whole: Mapping[str, Any]) -> str:
    """As ``config.json`` says it; the first configs do not."""
    stated = whole.get("version")
    if stated is not None:
        return str(stated)
    return _NAMED if "vision_encoder" in whole else _IN_A_ROW


_EAR, _PROJECTION = "apm", "audio_projection_layer"
_AUDIO: Mapping[str, Any] = {
    "d_model": 384, "encoder_layers": 4, "encoder_attention_heads": 6, "encoder_ffn_dim": 1536,
    "num_mel_bins": 80, "max_source_positions": 1500, "activation_function": "gelu",
}  # fmt: skip
"""Values that the part for recordings may leave out: those of Whisper's class."""
_STATES_PER_SECOND = 50


class MiniCPMO(MiniCPMV):
    """A recording is as many vectors as its length makes, in pieces of 30 s that do not hear each other.

    A tower whose part of the config is left out, as when its modalities are limited to 0, is neither made nor
    loaded.
    """

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *MiniCPMV.media_rules,
        *encoder_rules(_EAR, "hearing.encoder"),
        WeightRule(f"{_PROJECTION}.linear1", "hearing.projector.up"),
        WeightRule(f"{_PROJECTION}.linear2", "hearing.projector.down"),
    )

    def place_media(self, whole: Mapping[str, Any]) -> None:
        """The parts of the config decide which modalities there are."""
        super().place_media(whole)
        self.sees, self.hears = (f"{part}_config" in whole for part in ("vision", "audio"))

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        if self.sees:
            super().make_towers(context, whole)
        if self.hears:
            self.hearing = _Hearing(context, whole, self.hidden_size())

    @property
    def modalities(self) -> Sequence[str]:  # type: ignore[override]
        """Modalities of the towers that the config has."""
        seen = ("image", "video") if self.sees else ()
        return (*seen, "audio") if self.hears else seen

    def unread_weights(self) -> Mapping[str, str]:
        """Tensors of towers that were not made."""
        names = {"image": (_TOWER, _RESAMPLER), "audio": (_EAR, _PROJECTION)}
        return {
            rf"{name}\..*": f"{modality} is limited to 0"
            for modality, own in names.items()
            if modality not in self.modalities
            for name in own
        }

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of recordings ``input_features`` [frames, bins] each; of images and videos as
                :class:`MiniCPMV` takes them.
        """
        if modality != "audio":
            return super().embed_media(modality, inputs)
        return [self.hearing(item["input_features"]) for item in inputs]


class _Hearing(Layer):
    """Whisper's encoder, an MLP, and the mean of neighbouring vectors.

    A state hears those of its own second and of the seconds before (``audio_chunk_length``).

    Args:
        whole: ``config.json``.
        size: of the vectors.
    """

    def __init__(self, context: BuildContext, whole: Mapping[str, Any], size: int) -> None:
        settings = Settings(whole)
        settings.refuse("init_audio", True)
        stated = Settings({**_AUDIO, **part_of(whole, "audio_config")})
        states, wide = stated.integer("d_model"), stated.integer("encoder_ffn_dim")
        if wide // 4 != states:
            raise UnsupportedModel(
                f"config.json: audio_config.encoder_ffn_dim = {wide}: must be four times d_model = {states}"
            )
        self.encoder = AudioEncoder(context, stated, _EAR)
        self.window = 2 * self.encoder.num_positions
        self.group = settings.integer("audio_pool_step", 2)
        self.block = max(0, int(settings.number("audio_chunk_length", 1.0) * _STATES_PER_SECOND))
        self.projector = Projector(
            context,
            f"{_PROJECTION}.linear1",
            f"{_PROJECTION}.linear2",
            (states, size, size),
            "relu",
            bias=True,
        )

    def __call__(self, frames: Tensor) -> Tensor:
        """frames [F, bins] of a recording -> [vectors, size]."""
        return torch.cat([self._piece(own) for own in torch.split(frames, self.window)])

    def _piece(self, frames: Tensor) -> Tensor:
        """Of up to as many frames as the encoder has places for; states that fill no group are dropped."""
        x = self.projector(self.encoder.in_blocks(frames, self.block))
        number = len(x) // self.group
        groups = x[: number * self.group].view(number, self.group, x.shape[1])
        return groups.mean(1, dtype=torch.float32).to(x.dtype)
