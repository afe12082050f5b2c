"""ERNIE 4.5 VL with images and videos: a tower and a resampler, places in time, height and width, and experts
of their own for tokens of both.

Baidu 2025, ERNIE 4.5 technical report, section 2.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, MROPE_POSITIONS, InputEmbeds, WeightRule
from headrace_models.config.rope import rope_settings
from headrace_models.config.settings import Settings
from headrace_models.layers.blocks import PreNormBlock
from headrace_models.layers.decoder import Block
from headrace_models.layers.decoders.ernie_moe import corrected_router, ernie_routing
from headrace_models.layers.decoders.moe import MoEDecoder
from headrace_models.layers.moe.sparse_moe import SparseMoE
from headrace_models.layers.native_size.ernie_vl import (
    FRAMES,
    ErnieResampler,
    ErnieTower,
    check_frames,
    resampler_rules,
    tower_rules,
)
from headrace_models.layers.rotary import rows_by_axis
from headrace_models.layers.vision.grid_decoder import GRID, PIXELS, GridDecoder, grid_of
from headrace_models.layers.vision.media_decoder import part_of
from headrace_models.loading.rules.moe import expert_rules, router_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch
    from headrace_core.model import BuildContext
    from headrace_core.multimodal import MediaInput
    from headrace_models.layers.vision.towers.qwen_vl import Grid

_TOWER, _RESAMPLER = "vision_tower", "resampler_model"
_MEDIA_ROWS = "media_rows"
"""Key of :attr:`headrace_core.batch.ForwardBatch.extra`: rows of tokens that go to experts of images."""
_THETA = 500_000.0
_SECTIONS = (22, 22, 20)
"""Numbers of frequencies that go by height, width and time, where configs leave them out."""
_MARKS: Mapping[str, int] = {
    "image_token_id": 100295, "image_start_token_id": 101304, "image_end_token_id": 101305,
    "video_start_token_id": 101306, "video_end_token_id": 101307, "video_token_id": 103367,
}  # fmt: skip
"""Key of a token that goes to experts of images -> its id, where configs leave it out."""
_BY_KIND = ("moe_num_experts", "moe_intermediate_size")
"""Settings that are lists: for text, then for images."""
_MIXTURE = "model.layers.{}.mlp.vision_moe"
_CORRECTION = "moe_statics.e_score_correction_bias"
_EXPERT = re.compile(r"\.mlp\.experts\.(\d+)\.")


class TwoKinds(SparseMoE):
    """A mixture for text, and beside it one for images; what all tokens go to takes both."""

    no_adapters = "its rows are divided between experts for text and for images"
    images: SparseMoE

    def __call__(self, x: Tensor, media_rows: Tensor | None = None) -> Tensor:
        """x [T, H] -> the same shape.

        Args:
            media_rows: [M] int64, those for the images' experts; None: there are none.
        """
        if media_rows is None:
            return super().__call__(x)
        is_text = torch.ones(len(x), dtype=torch.bool, device=x.device)
        is_text[media_rows] = False
        (text_rows,) = is_text.nonzero(as_tuple=True)
        out = torch.empty_like(x)
        if len(text_rows):
            out = out.index_copy(0, text_rows, super().__call__(x[text_rows]))
        mine = x[media_rows]
        found = self.images(mine)
        if self.shared is not None:
            found = self.ops.add(found, self.shared(mine))
        return out.index_copy(0, media_rows, found)


class TwoKindsBlock(PreNormBlock):
    """``h = x + attention(norm(x)); h + mixture(norm(h))``, whose mixture knows the tokens of images."""

    def __call__(
        self, x: Tensor, residual: Tensor | None, batch: ForwardBatch
    ) -> tuple[Tensor, Tensor]:
        x, stream = self.input_norm.add(x, residual)
        x = self.attention(x, batch)
        x, stream = self.mlp_norm.add(x, stream)
        assert isinstance(self.mlp, TwoKinds)
        return self.mlp(x, batch.extra.get(_MEDIA_ROWS)), stream


class Ernie4_5VL(GridDecoder, MoEDecoder):
    """Four patches of an image are a vector, eight of two frames of a video. Tokens around either go to the
    images' experts, too."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *tower_rules(_TOWER, "tower"),
        *resampler_rules(_RESAMPLER, "resampler"),
    )
    decoder_rules: ClassVar[Sequence[WeightRule]] = (
        *expert_rules(f"{_MIXTURE}.experts", "layers.{}.mlp.images.experts"),
        *router_rules(
            f"{_MIXTURE}.gate", f"{_MIXTURE}.gate.{_CORRECTION}", "layers.{}.mlp.images.router"
        ),
    )
    media_names: ClassVar[Sequence[tuple[str, str]]] = (
        ("vision_model.", f"{_TOWER}."),
        *(
            (f"{_RESAMPLER}.{half}.{theirs}.", f"{_RESAMPLER}.{half}.{ours}.")
            for half in ("spatial_linear", "temporal_linear")
            for theirs, ours in (("fc1", "0"), ("fc2", "2"), ("ln", "3"))
        ),
    )
    """The tower as published, and the resampler as transformers' modules are called."""

    def __init__(self, context: BuildContext, prefix: str = "") -> None:
        self.by_kind = Settings(_of_images(context.config))
        super().__init__(context, prefix)
        self.marks = _marks(context.whole_config).to(context.device)

    def place_media(self, whole: Mapping[str, Any]) -> None:
        check_frames(whole)
        vision = Settings(part_of(whole, "vision_config"))
        self.merge = vision.integer("spatial_merge_size", 2)
        rope = rope_settings(self.settings.config, theta=_THETA)
        self.rope = replace(rope, sections=rope.sections or _SECTIONS)

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        self.tower = ErnieTower(context, part_of(whole, "vision_config"), _TOWER)
        unit, eps = self.tower.size * self.merge**2, (self.tower.eps, self.norm_eps())
        self.resampler = ErnieResampler(context, _RESAMPLER, unit, self.hidden_size(), eps)

    def make_block(self, context: BuildContext, index: int, name: str) -> Block:
        block = super().make_block(context, index, name)
        assert isinstance(block, PreNormBlock)
        if self.is_dense(index):
            return block
        return TwoKindsBlock(block.input_norm, block.attention, block.mlp_norm, block.mlp)

    def mixture_class(self) -> type[SparseMoE]:
        return TwoKinds

    def make_mixture(
        self, context: BuildContext, index: int, name: str, **differences: Any
    ) -> SparseMoE:
        mixture = super().make_mixture(context, index, name, **differences)
        assert isinstance(mixture, TwoKinds)
        mixture.images = SparseMoE(
            context,
            f"{name}.vision_moe",
            hidden_size=self.hidden_size(),
            intermediate_size=self.by_kind.integer("moe_intermediate_size"),
            routing=ernie_routing(self.by_kind),
            activation=self.gate(),
            **corrected_router(self.by_kind),
        )
        return mixture

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: of images ``pixel_values`` [patches, channels * patch * patch] and ``image_grid_thw`` [3]
                each; of videos ``pixel_values_videos`` and ``video_grid_thw``, of an even number of frames.
        """
        grids = [grid_of(item[GRID[modality]]) for item in inputs]
        states = self.tower([item[PIXELS[modality]] for item in inputs], grids)
        counts = [math.prod(self.in_vectors(grid)) for grid in grids]
        return torch.split(self.resampler(states, grids), counts)

    def in_vectors(self, grid: Grid) -> Grid:
        """Vectors of an item in time, height and width."""
        time, height, width = grid
        return -(-time // FRAMES), height // self.merge, width // self.merge

    def mrope_positions(self, num_tokens: int, media: Sequence[MediaInput]) -> Tensor:
        """See :class:`headrace_core.model.SupportsMRoPE`. The height of tokens beside an image is given as
        its complement, a number below 0: :meth:`forward` sees that they may go to the images' experts."""
        places = super().mrope_positions(num_tokens, media)
        sides = [
            side for item in media for side in (item.offset - 1, item.offset + item.num_tokens)
        ]
        beside = [side for side in sides if 0 <= side < num_tokens]
        places[1, beside] = ~places[1, beside]
        return places

    def box(self, sizes: Grid, item: MediaInput) -> Tensor:
        """See :meth:`GridDecoder.box`; two frames are a place."""
        time, height, width = sizes
        return super().box((-(-time // FRAMES), height, width), item)

    def rotary_rows(self, table: Tensor, places: Tensor) -> Tensor:
        """See :meth:`GridDecoder.rotary_rows`: height and width take turns, the last frequencies go by
        time."""
        height, width, time = self.rope.sections
        if height != width or 2 * sum(self.rope.sections) != table.shape[-1]:
            raise UnsupportedModel(
                f"config.json: mrope_section = {list(self.rope.sections)}: must be {table.shape[-1] // 2} "
                "frequencies together, as many by height as by width"
            )
        axes = torch.tensor([1, 2] * height + [0] * time)
        places = torch.where(places < 0, ~places, places)
        return rows_by_axis(table, places, axes.to(table.device))

    def prepare_batch(self, batch: ForwardBatch) -> ForwardBatch:
        """See :meth:`headrace_models.layers.decoder.Decoder.prepare_batch`. What the model has said itself
        never goes to the images' experts."""
        places: Tensor | None = batch.extra.get(MROPE_POSITIONS)
        if places is not None:
            at_image = places[1] < 0
            given: InputEmbeds | None = batch.extra.get(INPUT_EMBEDS)
            if given is not None:
                at_image[given.rows] = True
            at_image &= torch.isin(batch.input_ids, self.marks)
            (rows,) = at_image.nonzero(as_tuple=True)
            if len(rows):
                batch = replace(batch, extra={**batch.extra, _MEDIA_ROWS: rows})
        return super().prepare_batch(batch)

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The images' experts under a name of their own, beside what text needs."""
        count = self.settings.integer("moe_num_experts")
        for name, tensor, file in tensors:
            found = _for_images(name, tensor, count)
            if found is not None:
                yield (*found, file)
            yield from super().translate([(name, tensor, file)])  # type: ignore[misc] # the text's


def _marks(whole: Mapping[str, Any]) -> Tensor:
    """Ids of tokens that go to the images' experts.

    Args:
        whole: ``config.json``.
    """
    image = whole.get("im_patch_id", _MARKS["image_token_id"])
    defaults, stated = {**_MARKS, "image_token_id": image}, Settings(whole)
    found = [stated.integer(key, default, minimum=0) for key, default in defaults.items()]
    return torch.tensor(sorted(set(found)))


def _of_images(config: Mapping[str, Any]) -> dict[str, Any]:
    """Settings whose lists by kind are those of images."""
    lists = {key: config[key] for key in _BY_KIND if isinstance(config.get(key), list)}
    return {**config, **{key: value[-1] for key, value in lists.items() if value}}


def _for_images(name: str, tensor: Tensor, count: int) -> tuple[str, Tensor] | None:
    """A tensor of the images' experts, which published files number behind the text's, and its name; None: it
    is of text alone.

    Args:
        count: the text's experts.
    """
    expert = _EXPERT.search(name)
    if ".mlp.vision_moe." in name:
        return name, tensor
    if expert is not None and int(expert[1]) >= count:
        own = f".mlp.vision_moe.experts.{int(expert[1]) - count}."
        return name.replace(expert[0], own), tensor
    if name.endswith(".mlp.gate.weight_1"):
        return name.replace("gate.weight_1", "vision_moe.gate.weight"), tensor.t().contiguous()
    if name.endswith(f".mlp.{_CORRECTION}"):
        own = f".mlp.vision_moe.gate.{_CORRECTION}"
        return name.replace(f".mlp.{_CORRECTION}", own), tensor[1:].contiguous()
    return None
