"""Ovis: a tower whose states become words of a visual vocabulary, each a mean of a table's rows.

Lu et al. 2024, arXiv:2405.20797; Lu et al. 2025, arXiv:2508.11737 (2.5). Letters: I tiles, W words of a
tile, V words of the vocabulary, H hidden size.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch
from torch.nn import functional

from headrace_core.errors import UnsupportedModel
from headrace_core.model import WeightRule
from headrace_models.config.settings import MAX_LAYERS, Settings
from headrace_models.layers.base import Layer, Part
from headrace_models.layers.decoders.gemma import embedding_scale
from headrace_models.layers.linear import Linear
from headrace_models.layers.mlp import GatedMLP
from headrace_models.layers.native_size.keye import KeyeTower
from headrace_models.layers.native_size.keye import tower_rules as keye_rules
from headrace_models.layers.norm import LayerNorm, RMSNorm
from headrace_models.layers.vision.blocks import Segments, VisionAttention, VisionBlock
from headrace_models.layers.vision.grid_decoder import GRID, PIXELS, grid_of
from headrace_models.layers.vision.media_decoder import MediaDecoder, part_of
from headrace_models.layers.vision.patches import PatchEmbedding, in_patches
from headrace_models.layers.vision.shuffle import joined
from headrace_models.layers.vision.towers.clip import ClipTower, Vector, tower_rules

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.model import BuildContext

_MARKS = 5
"""Words that stand for no part of a picture: the begin of an image, the end of its small picture, of a
column, of a row, and of the image."""
_VISION: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 2816, "num_hidden_layers": 24, "num_attention_heads": 8,
    "image_size": 224, "patch_size": 14, "rms_norm_eps": 1e-5, "hidden_act": "silu", "qkv_bias": False,
    "mlp_bias": False, "vocab_size": 16384, "hidden_stride": 1, "tokenize_function": "softmax",
}  # fmt: skip
"""Values that configs may leave out."""
_NAVIT: Mapping[str, Any] = {
    "hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 24, "num_attention_heads": 16,
    "image_size": 512, "patch_size": 16, "hidden_stride": 2,
}  # fmt: skip
"""The same of Ovis 2.5."""
_VOCABULARY = 65_536
_NORM_EPS = 1e-5
_TOWER, _BACKBONE = "vision_tower.transformer", "visual_tokenizer.backbone"
_SIGLIP, _NAVIT_TOWER = f"{_BACKBONE}.vision_model", "visual_tokenizer.vit.vision_model"
_ENDS: Mapping[str, tuple[int, int]] = {"image": (-4, -3), "video": (-2, -1)}
"""Modality -> rows of Ovis 2.5's table for an item's begin and its end."""
_NUM_ENDS = 4


class Ovis2(MediaDecoder):
    """As transformers has it. An image's marks take vectors, too."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_TOWER}.embeddings.patch_embedding", "tower.patches"),
        WeightRule(f"{_TOWER}.embeddings.rms_norm", "tower.patch_norm"),
        WeightRule(f"{_TOWER}.embeddings.position_embedding.weight", "tower.positions.vector"),
        *(
            WeightRule(f"{_TOWER}.encoder.layers.{{}}.{source}", f"tower.layers.{{}}.{target}", part)
            for source, target, part in [
                ("rms_norm1", "attention_norm", 0), ("attention.q_proj", "attention.qkv", 0),
                ("attention.k_proj", "attention.qkv", 1), ("attention.v_proj", "attention.qkv", 2),
                ("attention.out_proj", "attention.out", 0), ("rms_norm2", "mlp_norm", 0),
                ("ffn.gate_proj", "mlp.gate_up", 0), ("ffn.up_proj", "mlp.gate_up", 1),
                ("ffn.down_proj", "mlp.down", 0),
            ]
        ),
        WeightRule(f"{_TOWER}.rms_norm", "tower.last_norm"),
        WeightRule("vision_tower.head_linear", "words.linear"),
        WeightRule("vision_tower.head_norm", "words.norm"),
        WeightRule("visual_embeddings_table.weight", "table.vector"),
    )  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = {**_VISION, **part_of(whole, "vision_config")}
        settings = Settings(stated)
        self.tower: Aimv2Tower | ClipTower = Aimv2Tower(context, settings, last_norm=True)
        self.make_words(context, settings, settings.integer("hidden_size"))
        if settings.integer("num_visual_indicator_tokens", _MARKS) != _MARKS:
            raise UnsupportedModel(
                f"config.json: num_visual_indicator_tokens = {stated['num_visual_indicator_tokens']}: must "
                f"be {_MARKS}"
            )

    def make_words(self, context: BuildContext, settings: Settings, size: int) -> None:
        """What makes words of states of a size."""
        number = settings.integer("vocab_size", minimum=_MARKS + 1)
        self.stride = settings.integer("hidden_stride")
        self.words = Words(context, size * self.stride**2, number - _MARKS, settings)
        self.table = Vector("visual_embeddings_table.weight", number, self.hidden_size())

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [I, 3, side, side] each; ``marks`` [tokens]: which of the five marks each
                of the image's tokens is; -1: it is a word of a tile.
        """
        words = self.words(self._joined(self.tower(torch.cat([x["pixel_values"] for x in inputs]))))
        vectors = (words @ self.table.vector[:-_MARKS]) * self.vectors_scale()
        marks = self.table.vector[-_MARKS:] * self.vectors_scale()
        counts = [len(own["pixel_values"]) for own in inputs]
        found = []
        for own, tiles in zip(inputs, torch.split(vectors, counts), strict=True):
            is_word = own["marks"] < 0
            mine = marks[own["marks"].clamp(min=0)]
            mine[is_word] = tiles.flatten(0, 1)
            found.append(mine)
        return found

    def vectors_scale(self) -> float:
        """What the decoder multiplies its own tokens' vectors by, and images' as well."""
        return 1.0

    def _joined(self, states: Tensor) -> Tensor:
        """states [I, side * side, S] -> [I, W, stride * stride * S]; beyond the edges are zeros."""
        side = round(states.shape[1] ** 0.5)
        more = -side % self.stride
        if more:
            square = states.unflatten(1, (side, side))  # type: ignore[no-untyped-call]
            states = functional.pad(square, (0, 0, 0, more, 0, more)).flatten(1, 2)
        return joined(states, side + more, self.stride)


class Ovis(Ovis2):
    """As published, 1.6 and 2: the tower's last norm is not used, and it may be SigLIP's."""

    media_rules: ClassVar[Sequence[WeightRule]] = (
        WeightRule(f"{_BACKBONE}.preprocessor.patchifier.proj", "tower.patches"),
        WeightRule(f"{_BACKBONE}.preprocessor.patchifier.norm", "tower.patch_norm"),
        WeightRule(f"{_BACKBONE}.preprocessor.pos_embed", "tower.positions.vector"),
        *(
            WeightRule(f"{_BACKBONE}.trunk.blocks.{{}}.{source}", f"tower.layers.{{}}.{target}", part)
            for source, target, part in [
                ("norm_1", "attention_norm", 0), ("attn.proj", "attention.out", 0),
                ("norm_2", "mlp_norm", 0), ("mlp.fc1", "mlp.gate_up", 0), ("mlp.fc3", "mlp.gate_up", 1),
                ("mlp.fc2", "mlp.down", 0),
            ]
        ),
        WeightRule(
            f"{_BACKBONE}.trunk.blocks.{{}}.attn.qkv", "tower.layers.{}.attention.qkv", split=()
        ),
        *tower_rules(_SIGLIP, "tower"),
        WeightRule("visual_tokenizer.head.0", "words.linear"),
        WeightRule("visual_tokenizer.head.1", "words.norm"),
        WeightRule("vte.weight", "table.vector"),
    )  # fmt: skip

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = part_of(whole, "visual_tokenizer_config")
        settings = Settings({**_VISION, **stated})
        for key in ("use_indicators", "drop_cls_token", "hd_booster"):
            settings.refuse(key, False)
        backbone = dict(part_of(stated, "backbone_config"))
        kind = backbone.get("model_type")
        if kind == "aimv2":
            backbone.setdefault("mlp_bias", backbone.get("use_bias", False))
            own = Settings({**_VISION, **backbone})
            self.tower = Aimv2Tower(context, own, last_norm=False)
        elif kind == "siglip_vision_model":
            self.tower = ClipTower(context, backbone, _SIGLIP)
        else:
            raise UnsupportedModel(
                f"config.json: visual_tokenizer_config.backbone_config.model_type = {kind!r}: must be aimv2 "
                "or siglip_vision_model"
            )
        size = self.tower.size if isinstance(self.tower, Aimv2Tower) else self.tower.positions.size
        self.make_words(context, settings, size)

    def unread_weights(self) -> Mapping[str, str]:
        """What stands behind the tower's blocks."""
        why = "behind the states of the tower that are read"
        return {
            rf"{_BACKBONE}\.(trunk\.post_trunk_norm|vision_model\.(post_layernorm|head))\..*": why
        }

    def translate(
        self, tensors: Iterable[tuple[str, Tensor, Path]]
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Places without the axis of images."""
        inner = getattr(super(), "translate", None)
        named = _without_axis(tensors)
        found: Iterable[tuple[str, Tensor, Path]] = named if inner is None else inner(named)
        return found

    def vectors_scale(self) -> float:
        """Gemma's, as its class in the library of that time multiplied all vectors that it was given."""
        if self.settings.config.get("model_type") != "gemma2":
            return 1.0
        return embedding_scale(self.context, self.hidden_size())


class Ovis25(MediaDecoder):
    """Ovis 2.5: images of any size and videos, each between two marks, which take vectors, too. Four patches
    are a word."""

    modalities: ClassVar[Sequence[str]] = ("image", "video")
    media_rules: ClassVar[Sequence[WeightRule]] = (
        *keye_rules(_NAVIT_TOWER, "tower"),
        WeightRule("visual_tokenizer.head.0", "words.linear"),
        WeightRule("visual_tokenizer.head.1", "words.norm"),
        WeightRule("vte.weight", "table.vector"),
    )

    def make_towers(self, context: BuildContext, whole: Mapping[str, Any]) -> None:
        stated = {**_NAVIT, **part_of(whole, "vit_config")}
        settings = Settings(stated)
        settings.refuse("fullatt_block_indexes")
        for key, only in (
            ("num_patches", -1), ("temporal_patch_size", 1), ("use_rope", True),
            ("preserve_original_pe", True),
        ):  # fmt: skip
            settings.refuse(key, only)
        self.merge = settings.integer("hidden_stride")
        stated["spatial_merge_size"] = self.merge
        self.tower = KeyeTower(context, stated, _NAVIT_TOWER, cubic=True, last_norm=False)
        number = Settings(whole).integer("visual_vocab_size", _VOCABULARY, minimum=_NUM_ENDS + 1)
        unit = self.tower.size * self.merge**2
        self.words = Words(context, unit, number - _NUM_ENDS, Settings({}))
        self.table = Vector("vte.weight", number, self.hidden_size())

    def unread_weights(self) -> Mapping[str, str]:
        """What stands behind the tower's blocks."""
        pattern = _NAVIT_TOWER.replace(".", r"\.")
        return {rf"{pattern}\.post_layernorm\..*": "behind the states of the tower that are read"}

    def embed_media(
        self, modality: str, inputs: Sequence[Mapping[str, Tensor]]
    ) -> Sequence[Tensor]:
        """See :class:`headrace_core.model.SupportsMultiModal`.

        Args:
            inputs: ``pixel_values`` [patches, 3 * patch * patch], square by square, and ``image_grid_thw``
                [3] each; of videos ``pixel_values_videos`` and ``video_grid_thw``.
        """
        grids = [grid_of(item[GRID[modality]]) for item in inputs]
        states = self.tower([item[PIXELS[modality]] for item in inputs], grids)
        words = self.words(states.view(1, -1, self.tower.size * self.merge**2))[0]
        vectors = self.tower.split(words @ self.table.vector[:-_NUM_ENDS], grids)
        begin, end = (self.table.vector[row][None] for row in _ENDS[modality])
        return [torch.cat((begin, own, end)) for own in vectors]


class Aimv2Tower(Layer):
    """Patches through a norm, learned places, blocks with RMS norms and gated MLPs (Fini et al. 2024,
    arXiv:2411.14402).

    Args:
        last_norm: the norm behind the last block.
    """

    def __init__(self, context: BuildContext, settings: Settings, *, last_norm: bool) -> None:
        self.size, self.patch = settings.integer("hidden_size"), settings.integer("patch_size")
        self.side = settings.integer("image_size") // self.patch
        eps = settings.number("rms_norm_eps")
        self.ops, self.dtype = context.ops, getattr(torch, context.dtype)
        kernel, inner = (3, self.patch, self.patch), f"{_TOWER}.embeddings"
        self.patches = PatchEmbedding(
            context, f"{inner}.patch_embedding", kernel, self.size, bias=True
        )
        self.patch_norm = RMSNorm(context, f"{inner}.rms_norm", self.size, eps)
        self.positions = Vector(f"{inner}.position_embedding.weight", self.side**2, self.size)
        number = settings.integer("num_hidden_layers", maximum=MAX_LAYERS)
        self.layers = [
            _block(context, settings, f"{_TOWER}.encoder.layers.{index}") for index in range(number)
        ]
        self.last_norm = (
            RMSNorm(context, f"{_TOWER}.rms_norm", self.size, eps) if last_norm else None
        )

    def __call__(self, images: Tensor) -> Tensor:
        """images [I, 3, side, side] -> [I, patches, size]."""
        flat = in_patches(images.to(self.dtype), self.patch)
        count, number, _ = flat.shape
        x = self.patch_norm(self.patches(flat.flatten(0, 1)))
        x = (x.view(count, number, -1) + self.positions.vector).flatten(0, 1)
        segments, residual = Segments.of([number] * count, x.device), None
        for layer in self.layers:
            x, residual = layer(x, residual, segments)
        if self.last_norm is not None:
            x, _ = self.last_norm.add(x, residual)
        elif residual is not None:
            x = self.ops.add(x, residual)
        return x.view(count, number, -1)


class Words(Layer):
    """Of each place, the share of each word of the visual vocabulary.

    Args:
        size: of a place's states.
        number: words.
    """

    def __init__(self, context: BuildContext, size: int, number: int, settings: Settings) -> None:
        kinds = ("softmax", "st_argmax")
        self.is_soft = settings.choice("tokenize_function", kinds, "softmax") == "softmax"
        self.linear = Linear(context, "vision_tower.head_linear", size, [Part(number)])
        self.norm = LayerNorm(context, "vision_tower.head_norm", number, _NORM_EPS)

    def __call__(self, states: Tensor) -> Tensor:
        """states [I, W, size] -> [I, W, number]."""
        logits = self.norm(self.linear(states.flatten(0, 1))).view(*states.shape[:2], -1)
        if self.is_soft:
            return logits.softmax(-1)
        return functional.one_hot(logits.argmax(-1), logits.shape[-1]).to(logits)


def _block(context: BuildContext, settings: Settings, name: str) -> VisionBlock:
    size, eps = settings.integer("hidden_size"), settings.number("rms_norm_eps")
    bias = settings.flag("qkv_bias", False)
    return VisionBlock(
        RMSNorm(context, f"{name}.rms_norm1", size, eps),
        VisionAttention(
            context,
            f"{name}.attention",
            hidden_size=size,
            num_heads=settings.integer("num_attention_heads"),
            bias=bias,
            out_bias=settings.flag("use_bias", bias),
        ),
        RMSNorm(context, f"{name}.rms_norm2", size, eps),
        GatedMLP(
            context,
            f"{name}.ffn",
            size,
            settings.integer("intermediate_size"),
            settings.activation("hidden_act"),
            bias=settings.flag("mlp_bias", False),
        ),
    )


def _without_axis(
    tensors: Iterable[tuple[str, Tensor, Path]],
) -> Iterator[tuple[str, Tensor, Path]]:
    for name, tensor, file in tensors:
        if name == f"{_BACKBONE}.preprocessor.pos_embed" and tensor.dim() == 3:
            tensor = tensor[0]
        yield name, tensor, file
