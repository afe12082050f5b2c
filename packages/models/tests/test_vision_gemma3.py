"""Gemma 3 beside transformers: means of patches, images whose tokens see each other."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel


class Gemma3(VisionConformance):
    sees_whole: ClassVar = True
    window: ClassVar[int] = 6
    settings: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        from transformers import Gemma3ForConditionalGeneration

        return Gemma3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Gemma3Config

        text = {**TEXT, "head_dim": 12, "sliding_window": self.window, "query_pre_attn_scalar": 12,
                "layer_types": ["sliding_attention", "full_attention"]}  # fmt: skip
        return Gemma3Config(
            vision_config={**TOWER, "model_type": "siglip_vision_model"}, text_config=text,
            mm_tokens_per_image=4, image_token_index=IMAGE, boi_token_index=121, eoi_token_index=122,
            **self.settings,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 1, 3, 28, 28)} for seed in range(2)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])}

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        ids = torch.tensor([tokens])
        given = self.hf_inputs(images) if images else {}
        with torch.inference_mode():
            logits = reference(
                input_ids=ids, attention_mask=torch.ones_like(ids),
                token_type_ids=(ids == IMAGE).int(), **given,
            ).logits[0]  # fmt: skip
        return torch.log_softmax(logits.float(), dim=-1)


class TestGemma3(Gemma3):
    def test_an_image_beyond_the_window_is_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.text_config.sliding_window = 3
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="at most sliding_window = 3"):
            self.load(tmp_path)

    def test_tokens_that_are_no_square_are_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.mm_tokens_per_image = 3
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="mm_tokens_per_image = 3"):
            self.load(tmp_path)


class TestGemma3OfLongWindows(Gemma3):
    window = 64
