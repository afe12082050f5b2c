"""LLaVA 1.5: CLIP's or SigLIP's patches through a small MLP, in front of any decoder.

Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.vision.clip import ClipTower, tower_rules
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.mlp import Projector

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_TOWER, _PROJECTOR = "vision_tower", "multi_modal_projector"


class Llava(MediaDecoder):
    """An image is a vector for each of its patches."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        WeightRule(f"{_PROJECTOR}.linear_1", "projector.up"),
        WeightRule(f"{_PROJECTOR}.linear_2", "projector.down"),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("vision_tower.vision_model.", "vision_tower."),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        vision, settings = part_of(whole, "vision_config"), Settings(whole)
        layer = whole.get("vision_feature_layer", -2)
        if type(layer) is not int:
            raise UnsupportedModel(
                f"config.json: vision_feature_layer = {layer!r}: must be one layer"
            )
        self.tower = ClipTower(context, vision, _TOWER, last=layer)
        strategy = whole.get("vision_feature_select_strategy", "default")
        if strategy not in ("default", "full"):
            raise UnsupportedModel(
                f"config.json: vision_feature_select_strategy = {strategy!r}: must be default or full"
            )
        self.num_skipped = int(strategy == "default")
        bias = settings.flag("multimodal_projector_bias", True)
        hidden = self.hidden_size()
        self.projector = Projector(
            context,
            f"{_PROJECTOR}.linear_1",
            f"{_PROJECTOR}.linear_2",
            (self.tower.positions.size, hidden, hidden),
            settings.activation("projector_hidden_act", default="gelu"),
            bias=bias,
        )

    @property
    def ignored_weights(self) -> Mapping[str, str]:
        """What lies behind the layer whose states are taken."""
        why = "behind the layer of the tower that is read"
        unused = range(len(self.tower.layers), self.tower.num_layers)
        own = {rf"{_TOWER}\.encoder\.layers\.{index}\..*": why for index in unused}
        inherited = getattr(super(), "ignored_weights", {})
        return {**inherited, **own, rf"{_TOWER}\.(post_layernorm|head)\..*": why}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [3, height, width] each.
        """
        states = self.tower(torch.stack([item["pixel_values"] for item in inputs]))
        kept = states[:, self.num_skipped :].contiguous()
        count, number, _ = kept.shape
        return list(self.projector(kept.flatten(0, 1)).view(count, number, -1))
