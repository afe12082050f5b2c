"""Idefics3 and SmolVLM beside transformers: squares of patches, joined."""

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
from headrace_models.layers.vision.towers.fractional import fractions


class Idefics3(VisionConformance):
    side: ClassVar[int] = 28
    """Of a tile, in pixels."""
    factor: ClassVar[int] = 2

    def hf_class(self) -> Any:
        from transformers import Idefics3ForConditionalGeneration

        return Idefics3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Idefics3Config

        return Idefics3Config(
            vision_config=TOWER, text_config={**TEXT, "model_type": "llama"},
            image_token_id=IMAGE, scale_factor=self.factor,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {"pixel_values": drawn(seed, tiles, 3, self.side, self.side)}
            for seed, tiles in enumerate((3, 1))
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])[None]}


class TestIdefics3(Idefics3):
    def test_a_factor_that_does_not_divide_is_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.scale_factor = 3
        self.hf_class()(config).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="scale_factor = 3"):
            self.load(tmp_path)


class TestIdefics3OfOtherTiles(Idefics3):
    """Tiles of more patches than the table has positions."""

    side = 42


class TestSmolVLM(Idefics3):
    factor = 4

    def hf_class(self) -> Any:
        from transformers import SmolVLMForConditionalGeneration

        return SmolVLMForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import SmolVLMConfig

        return SmolVLMConfig(
            vision_config=TOWER, text_config={**TEXT, "model_type": "llama"},
            image_token_id=IMAGE, scale_factor=self.factor,
        )  # fmt: skip


@pytest.mark.parametrize("size", range(3, 64))
@pytest.mark.parametrize("number", [None, 26, 37])
def test_places_are_the_librarys(number: int | None, size: int) -> None:
    from transformers.models.idefics3.configuration_idefics3 import Idefics3VisionConfig
    from transformers.models.idefics3.modeling_idefics3 import Idefics3VisionEmbeddings

    number = size if number is None else number
    config = Idefics3VisionConfig(hidden_size=1, image_size=size, patch_size=1)
    embeddings = Idefics3VisionEmbeddings(config)
    with torch.no_grad():
        embeddings.patch_embedding.weight.zero_()
        assert embeddings.patch_embedding.bias is not None
        embeddings.patch_embedding.bias.zero_()
        embeddings.position_embedding.weight.copy_(torch.arange(size**2)[:, None])
        mask = torch.ones(1, number, number, dtype=torch.bool)
        places = embeddings(torch.zeros(1, 3, number, number), mask).view(number, number)
    own = fractions(number, size)
    assert torch.equal(places.long(), own[:, None] * size + own[None, :])
