"""Aya Vision and Command A Vision beside transformers: tiles, joined patches, a gated projector."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance
from vision_names import PUBLISHED, OtherNames

from headrace_core.errors import UnsupportedModel

SIGLIP: dict[str, Any] = {**TOWER, "model_type": "siglip_vision_model", "vision_use_head": False}


class Tiled(OtherNames, VisionConformance):
    text = "cohere2"
    tiles = (3, 1)
    refused: ClassVar[dict[str, Any]]
    """Key of the config -> a value that is not served."""

    def hf_config(self) -> Any:
        raise NotImplementedError

    def text_config(self) -> dict[str, Any]:
        # transformers leaves the scale out around the decoder, whose own class has it.
        return {
            **TEXT, "model_type": self.text, "tie_word_embeddings": True, "logit_scale": 1.0,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {"pixel_values": drawn(seed, tiles, 3, 28, 28)} for seed, tiles in enumerate(self.tiles)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])}

    def test_what_is_not_served_is_refused(self, reference: Any, folder: Path) -> None:
        for key, value in self.refused.items():
            with pytest.raises(UnsupportedModel, match=re.escape(f"{key} = {value!r}")):
                self.load(folder, hf_overrides={key: value})


class TestAyaVision(Tiled):
    refused: ClassVar = {
        "downsample_factor": 3, "vision_feature_select_strategy": "default",
        "alignment_intermediate_size": 33, "vision_feature_layer": [-1, -2],
    }  # fmt: skip
    settings: ClassVar[dict[str, Any]] = {"alignment_intermediate_size": 40}

    def hf_class(self) -> Any:
        from transformers import AyaVisionForConditionalGeneration

        return AyaVisionForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import AyaVisionConfig

        return AyaVisionConfig(
            vision_config=SIGLIP,
            text_config=self.text_config(),
            image_token_index=IMAGE,
            **self.settings,
        )


class TestAyaVisionOfAnotherLayer(TestAyaVision):
    """And of the decoder's own width, in front of another decoder."""

    text = "cohere"
    settings: ClassVar = {"vision_feature_layer": -2, "downsample_factor": 4}


class TestCohere2Vision(Tiled):
    """Its tower is stored with a head, which is not read."""

    spellings: ClassVar = (PUBLISHED,)
    refused: ClassVar = {"downsample_factor": 3, "alignment_intermediate_size": 33}

    def hf_class(self) -> Any:
        from transformers import Cohere2VisionForConditionalGeneration

        return Cohere2VisionForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Cohere2VisionConfig

        return Cohere2VisionConfig(
            vision_config={**SIGLIP, "vision_use_head": True}, text_config=self.text_config(),
            image_token_id=IMAGE, alignment_intermediate_size=40,
        )  # fmt: skip
