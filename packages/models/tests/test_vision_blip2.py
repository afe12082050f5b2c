"""BLIP-2 beside transformers: a Q-Former in front of OPT."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel


class TestBlip2(VisionConformance):
    """Two blocks of the Q-Former see the image, one does not."""

    vision: ClassVar[dict[str, Any]] = {"qkv_bias": True}
    former: ClassVar[dict[str, Any]] = {"num_hidden_layers": 3}

    def hf_class(self) -> Any:
        from transformers import Blip2ForConditionalGeneration

        return Blip2ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Blip2Config

        former = {
            "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40, **self.former,
        }  # fmt: skip
        text = {**TEXT, "model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48}
        text.pop("num_key_value_heads")
        return Blip2Config(
            vision_config={**TOWER, **self.vision}, qformer_config=former, text_config=text,
            num_query_tokens=5, image_token_index=IMAGE,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, 28, 28)} for seed in range(2)]

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        """The class takes no prompt without an image, so its language model reads those."""
        if images:
            return super().logprobs(reference, tokens, images)
        with torch.inference_mode():
            logits = reference.language_model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(
            UnsupportedModel,
            match="begin with an image, and it can bring none",
        ):
            self.load(folder, limit_mm_per_prompt={"image": 0})


class TestBlip2WithTextLayers(TestBlip2):
    """Every block sees the image; the files have what the Q-Former reads texts with, too."""

    vision: ClassVar = {"qkv_bias": False}
    former: ClassVar = {
        "num_hidden_layers": 2, "cross_attention_frequency": 1, "use_qformer_text_input": True,
    }  # fmt: skip

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        file = folder / "model.safetensors"
        tensors = load_file(file)
        assert any(".intermediate.dense" in name for name in tensors)
        tensors["qformer.embeddings.word_embeddings.weight"] = torch.zeros(3, 24)
        save_file(tensors, file, metadata={"format": "pt"})

    def test_other_language_models_are_refused(self, tmp_path: Path) -> None:
        """Of an encoder and a decoder, such as Flan-T5."""
        from transformers import Blip2Config

        config = self.hf_config().to_dict()
        text = {"model_type": "t5", "d_model": 48, "num_layers": 1, "vocab_size": 131}
        given = {**config, "text_config": text, "architectures": ["Blip2ForConditionalGeneration"]}
        Blip2Config(**given).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="is an encoder-decoder model"):
            self.load(tmp_path)

    def test_heads_that_do_not_divide_are_refused(self, tmp_path: Path) -> None:
        config = self.hf_config()
        config.qformer_config.num_attention_heads = 5
        config.architectures = ["Blip2ForConditionalGeneration"]
        config.save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="hidden_size = 24"):
            self.load(tmp_path)
