"""InstructBLIP beside transformers: a Q-Former that reads a text, in front of Llama."""

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

FORMER: dict[str, Any] = {
    "hidden_size": 24, "num_attention_heads": 2, "intermediate_size": 40, "vocab_size": 60,
    "max_position_embeddings": 9,
}  # fmt: skip


class TestInstructBlip(VisionConformance):
    """Two blocks of the Q-Former see the image, one does not."""

    former: ClassVar[dict[str, Any]] = {"num_hidden_layers": 3}
    text: ClassVar[dict[str, Any]] = {**TEXT, "model_type": "llama"}

    def hf_class(self) -> Any:
        from transformers import InstructBlipForConditionalGeneration

        return InstructBlipForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import InstructBlipConfig

        return InstructBlipConfig(
            vision_config=TOWER, qformer_config={**FORMER, **self.former}, text_config=self.text,
            num_query_tokens=5, image_token_index=IMAGE,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of one prompt, so that one text stands beside both."""
        ids = torch.tensor([50, 7, 8, 8, 51])
        return [
            {"pixel_values": drawn(seed, 3, 28, 28), "qformer_input_ids": ids} for seed in range(2)
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {name: torch.stack([image[name] for image in images]) for name in images[0]}

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        """The class takes no prompt without an image, so its language model reads those."""
        if images:
            return super().logprobs(reference, tokens, images)
        with torch.inference_mode():
            logits = reference.language_model(torch.tensor([tokens])).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(UnsupportedModel, match="begin with an image, and it can bring none"):
            self.load(folder, limit_mm_per_prompt={"image": 0})

    def test_another_text_makes_other_vectors(self, reference: Any, model: Any) -> None:
        """Of any length that the Q-Former reads, beside each other."""
        image = drawn(3, 3, 28, 28)
        texts = [torch.arange(first, first + size) for first, size in ((50, 2), (9, 9), (50, 2))]
        found = self.embed(
            model, [{"pixel_values": image, "qformer_input_ids": text} for text in texts]
        )
        assert float((found[0] - found[1]).abs().max()) > 1e-3
        torch.testing.assert_close(found[0], found[2], atol=1e-6, rtol=0)
        for own, text in zip(found, texts, strict=True):
            with torch.inference_mode():
                wanted = reference.get_image_features(image[None], text[None]).pooler_output[0]
            torch.testing.assert_close(own, wanted, atol=1e-4, rtol=0)


class TestInstructBlipOfOpt(TestInstructBlip):
    """Every block sees the image."""

    former: ClassVar = {"num_hidden_layers": 2, "cross_attention_frequency": 1}
    text: ClassVar = {
        **{key: value for key, value in TEXT.items() if key != "num_key_value_heads"},
        "model_type": "opt", "ffn_dim": 80, "word_embed_proj_dim": 48,
    }  # fmt: skip

    def test_other_language_models_are_refused(self, tmp_path: Path) -> None:
        """Of an encoder and a decoder, such as Flan-T5."""
        from transformers import InstructBlipConfig

        config = self.hf_config().to_dict()
        text = {"model_type": "t5", "d_model": 48, "num_layers": 1, "vocab_size": 131}
        names = ["InstructBlipForConditionalGeneration"]
        given = {**config, "text_config": text, "architectures": names}
        InstructBlipConfig(**given).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="has no language model as a part of it"):
            self.load(tmp_path)
