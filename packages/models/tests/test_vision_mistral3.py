"""Pixtral's tower with a merger behind it, beside transformers: Mistral Small 3.1, LightOnOCR."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import torch
from test_vision_language import TEXT
from test_vision_pixtral import TOWER, PixtralConformance
from vision_conformance import IMAGE


class Mistral3(PixtralConformance):
    def hf_class(self) -> Any:
        from transformers import Mistral3ForConditionalGeneration

        return Mistral3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Mistral3Config

        text = {**TEXT, "model_type": self.text, "rms_norm_eps": 1e-3, "head_dim": 12}
        return Mistral3Config(
            vision_config=self.tower, text_config=text, image_token_index=IMAGE, **self.settings
        )


class TestMistral3(Mistral3):
    pass


class TestMistral3Bias(Mistral3):
    """States of an inner layer, squares of three by three, and images that these do not cover."""

    tower: ClassVar = {**TOWER, "hidden_act": "silu"}
    text = "ministral3"
    sizes = ((24, 28), (32, 12))
    settings: ClassVar = {
        "vision_feature_layer": -2, "spatial_merge_size": 3, "multimodal_projector_bias": True,
        "projector_hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip

    def hf_config(self) -> Any:
        config = super().hf_config()
        rope = {
            "rope_type": "yarn", "rope_theta": 10000.0, "factor": 2.0, "beta_fast": 32.0,
            "beta_slow": 1.0, "original_max_position_embeddings": 64, "llama_4_scaling_beta": 0.1,
        }  # fmt: skip
        config.text_config.rope_parameters = rope
        return config


class TestLightOnOCR(PixtralConformance):
    tower: ClassVar = {**TOWER, "hidden_act": "silu"}

    def hf_class(self) -> Any:
        from transformers import LightOnOcrForConditionalGeneration

        return LightOnOcrForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LightOnOcrConfig

        return LightOnOcrConfig(
            vision_config=self.tower,
            text_config={**TEXT, "model_type": "qwen3", "head_dim": 12},
            image_token_id=IMAGE,
        )

    def test_the_first_spelling_of_the_class(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        named = {"architectures": ["LightOnOCRForConditionalGeneration"]}
        other = self.load(self.with_config(folder, tmp_path, **named))
        for own, found in zip(
            self.embed(model, self.images()), self.embed(other, self.images()), strict=True
        ):
            torch.testing.assert_close(found, own)
