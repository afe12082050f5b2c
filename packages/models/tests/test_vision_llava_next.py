"""LLaVA-NeXT and LLaVA-OneVision beside transformers: tiles, margins, ends of rows."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT as SHORT
from test_vision_language import TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance
from vision_names import OtherNames

from headrace_core.errors import UnsupportedModel

TEXT: dict[str, Any] = {**SHORT, "max_position_embeddings": 256}
PINPOINTS = [[28, 56], [56, 28], [56, 56], [84, 28], [28, 84]]
CLIP: dict[str, Any] = {**TOWER, "model_type": "clip_vision_model"}
SIGLIP: dict[str, Any] = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


class LlavaNext(OtherNames, VisionConformance):
    tower: ClassVar[dict[str, Any]] = CLIP
    text = "mistral"
    settings: ClassVar[dict[str, Any]] = {}
    sizes: ClassVar[tuple[tuple[int, int, int], ...]] = ((40, 30, 4), (100, 20, 3))
    """Of images: height, width, tiles."""

    def hf_class(self) -> Any:
        from transformers import LlavaNextForConditionalGeneration

        return LlavaNextForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaNextConfig

        return LlavaNextConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_index=IMAGE, image_grid_pinpoints=PINPOINTS, **self.settings,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, 1 + tiles, 3, 28, 28),
                "image_sizes": torch.tensor([height, width]),
            }
            for seed, (height, width, tiles) in enumerate(self.sizes)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        most = max(len(image["pixel_values"]) for image in images)
        padded = torch.zeros(len(images), most, 3, 28, 28)
        for row, image in zip(padded, images, strict=True):
            row[: len(image["pixel_values"])] = image["pixel_values"]
        sizes = torch.stack([image["image_sizes"] for image in images])
        return {"pixel_values": padded, "image_sizes": sizes}


class TestLlavaNextClip(LlavaNext):
    pass


class TestLlavaNextSiglip(LlavaNext):
    """Another tower, another decoder, wide images."""

    tower: ClassVar = SIGLIP
    text = "qwen2"
    settings: ClassVar = {
        "vision_feature_layer": -1, "vision_feature_select_strategy": "full",
        "multimodal_projector_bias": False,
    }  # fmt: skip
    sizes: ClassVar = ((19, 70, 3), (56, 56, 4))

    def test_states_that_are_no_patches_are_refused(self, tmp_path: Path) -> None:
        torch.manual_seed(0)
        config = self.hf_config()
        config.vision_feature_select_strategy = "default"
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="vision_feature_select_strategy = 'default'"):
            self.load(tmp_path)

    def test_a_canvas_of_parts_of_tiles_is_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.image_grid_pinpoints = [[28, 40]]
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=r"image_grid_pinpoints = \[\[28, 40\]\]"):
            self.load(tmp_path)


class TestLlavaOnevision(LlavaNext):
    """The first image is interpolated, the second is not."""

    tower: ClassVar = SIGLIP
    text = "qwen2"
    settings: ClassVar = {"vision_aspect_ratio": "anyres_max_2"}
    sizes: ClassVar = ((60, 50, 4), (100, 20, 3))

    def hf_class(self) -> Any:
        from transformers import LlavaOnevisionForConditionalGeneration

        return LlavaOnevisionForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaOnevisionConfig

        return LlavaOnevisionConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_index=IMAGE, video_token_index=121, image_grid_pinpoints=PINPOINTS,
            **self.settings,
        )  # fmt: skip

    def test_only_the_first_is_interpolated(self, model: Any) -> None:
        counts = [len(vectors) for vectors in self.embed(model, self.images())]
        # 8 rows of 6 become 6 of 4; of 12 rows of 4, all of 2 columns are left
        assert counts == [16 + 6 * (4 + 1), 16 + 12 * (2 + 1)]

    def test_other_ratios_are_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.vision_aspect_ratio = "pad"
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="vision_aspect_ratio = 'pad'"):
            self.load(tmp_path)


class TestLlavaNextVideo(LlavaNext):
    """Images of the class that takes videos as well."""

    def hf_class(self) -> Any:
        from transformers import LlavaNextVideoForConditionalGeneration

        return LlavaNextVideoForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaNextVideoConfig

        return LlavaNextVideoConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_index=IMAGE, video_token_index=121, image_grid_pinpoints=PINPOINTS,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("key", "value"), [("spatial_pool_mode", "max"), ("spatial_pool_stride", 4)]
    )
    def test_other_pooling_is_refused(self, key: str, value: Any, tmp_path: Path) -> None:
        config = self.hf_config()
        setattr(config, key, value)
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=f"{key} = {value!r}"):
            self.load(tmp_path)


class NormedProjector(torch.nn.Module):
    """A plain reading of what R-4B and Bee-8B have in place of LLaVA-OneVision's."""

    def __init__(self, before: int, between: int, after: int) -> None:
        super().__init__()
        self.pre_norm = torch.nn.LayerNorm(before, eps=1e-6)
        self.linear_1 = torch.nn.Linear(before, between)
        self.linear_2 = torch.nn.Linear(between, after)

    def forward(self, states: Tensor) -> Tensor:
        x = torch.nn.functional.gelu(self.linear_1(self.pre_norm(states)))
        found: Tensor = self.linear_2(x)
        return found


class TestR4B(TestLlavaOnevision):
    """No image is interpolated."""

    text = "qwen3"
    settings: ClassVar = {"vision_aspect_ratio": "anyres_max_1000"}
    stated: ClassVar[str] = "anyres"
    """The same in the saved config, where transformers' class reads a number."""
    name: ClassVar[str] = "RForConditionalGeneration"
    widening: ClassVar[int] = 1

    def hf_class(self) -> Any:
        def made(config: Any) -> Any:
            model = super(TestR4B, self).hf_class()(config)
            before, after = config.vision_config.hidden_size, config.text_config.hidden_size
            model.model.multi_modal_projector = NormedProjector(
                before, self.widening * after, after
            )
            return model

        return made

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        file = folder / "config.json"
        own = {"architectures": [self.name], "vision_aspect_ratio": self.stated}
        file.write_text(json.dumps({**json.loads(file.read_text()), **own}))

    test_other_ratios_are_refused = None  # type: ignore[assignment]

    def test_only_the_first_is_interpolated(self, model: Any) -> None:
        """Here none is; nor do videos come."""
        counts = [len(vectors) for vectors in self.embed(model, self.images())]
        assert counts == [16 + 8 * (6 + 1), 16 + 12 * (2 + 1)]
        assert model.modalities == ("image",)


class TestBee(TestR4B):
    settings: ClassVar = {"vision_aspect_ratio": "anyres_max_2"}
    stated: ClassVar[str] = "anyres_max_2"
    name: ClassVar[str] = "BeeForConditionalGeneration"
    widening: ClassVar[int] = 4

    def test_only_the_first_is_interpolated(self, model: Any) -> None:
        TestLlavaOnevision.test_only_the_first_is_interpolated(self, model)
