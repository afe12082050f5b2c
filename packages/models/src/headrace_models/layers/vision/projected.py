"""A tower of images of one size, and the MLP that brings its states into the decoder's size.

Liu et al. 2023, arXiv:2310.03744.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import Settings
from headrace_models.layers.base import Layer
from headrace_models.layers.norm import LayerNorm
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.layers.vision.mlp import Projector
from headrace_models.layers.vision.towers.clip import ClipTower, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

TOWER, PROJECTOR = "vision_tower", "multi_modal_projector"
TOWER_NAMES = (("vision_tower.vision_model.", "vision_tower."),)
"""See :attr:`~headrace_models.layers.vision.media_decoder.MediaDecoder.media_names`."""


def projected_rules(target: str, name: str = TOWER) -> tuple[WeightRule, ...]:
    """Rules of a :class:`ProjectedTower`, by its name in the model.

    Args:
        name: the tower's, as the checkpoint spells it.
    """
    return (
        *tower_rules(name, f"{target}.tower"),
        WeightRule(f"{PROJECTOR}.pre_norm", f"{target}.first_norm"),
        WeightRule(f"{PROJECTOR}.linear_1", f"{target}.projector.up"),
        WeightRule(f"{PROJECTOR}.linear_2", f"{target}.projector.down"),
    )


def feature_layer(whole: Mapping[str, Any], default: int) -> int:
    """The layer whose states are read, as transformers counts hidden states.

    Raises: UnsupportedModel: they are several.
    """
    layer = whole.get("vision_feature_layer", default)
    if type(layer) is not int:
        raise UnsupportedModel(f"config.json: vision_feature_layer = {layer!r}: must be one layer")
    return layer


def unread_weights(tower: ClipTower, name: str = TOWER) -> Mapping[str, str]:
    """For ``ignored_weights``: what lies behind the layer whose states are read.

    Args:
        name: the tower's.
    """
    why = "behind the layer of the tower that is read"
    unused = range(len(tower.layers), tower.num_layers)
    own = {rf"{name}\.encoder\.layers\.{index}\..*": why for index in unused}
    norm = "" if tower.last_norm is not None else "post_layernorm|"
    return {**own, rf"{name}\.({norm}head)\..*": why}


class ProjectedTower(Layer):
    """Images -> a vector in the decoder's size for each of their states.

    Args:
        whole: ``config.json``.
        hidden_size: the decoder's.
        layer, strategy: what configs leave out: the layer that is read, and which of its states
            (``default``: all but the first; ``full``).
        norm_eps: of a norm in front of the projector; None: there is none.
        widening: the decoder's sizes between the projector's products.
        name: the tower's, as the checkpoint spells it.
    """

    def __init__(
        self,
        context: BuildContext,
        whole: Mapping[str, Any],
        hidden_size: int,
        *,
        layer: int = -2,
        strategy: str = "default",
        norm_eps: float | None = None,
        widening: int = 1,
        name: str = TOWER,
    ) -> None:
        settings = Settings(whole)
        vision = part_of(whole, "vision_config")
        self.tower = ClipTower(context, vision, name, last=feature_layer(whole, layer))
        kept = settings.choice("vision_feature_select_strategy", ("default", "full"), strategy)
        self.num_skipped = int(kept == "default")
        size = self.tower.positions.size
        self.first_norm: LayerNorm | None = None
        if norm_eps is not None:
            self.first_norm = LayerNorm(context, f"{PROJECTOR}.pre_norm", size, norm_eps)
        self.projector = Projector(
            context,
            f"{PROJECTOR}.linear_1",
            f"{PROJECTOR}.linear_2",
            (size, widening * hidden_size, hidden_size),
            settings.activation("projector_hidden_act", default="gelu"),
            bias=settings.flag("multimodal_projector_bias", True),
        )

    @property
    def num_vectors(self) -> int:
        """Vectors of an image."""
        return self.tower.num_states - self.num_skipped

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, height, width] -> [I, num_vectors, hidden_size]."""
        kept = self.tower(images)[:, self.num_skipped :].contiguous()
        count, number, _ = kept.shape
        flat = kept.flatten(0, 1)
        if self.first_norm is not None:
            flat = self.first_norm(flat)
        return self.projector(flat).view(count, number, -1)
