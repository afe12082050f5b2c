"""PaliGemma beside transformers: prompts whose tokens all see each other."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance, last_keys

from headrace_core.errors import UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_testing.model.decoders import PagedDriver


class PaliGemma(VisionConformance):
    text: ClassVar[dict[str, Any]] = {"model_type": "gemma"}

    def hf_class(self) -> Any:
        from transformers import PaliGemmaForConditionalGeneration

        return PaliGemmaForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import PaliGemmaConfig

        vision = {**TOWER, "model_type": "siglip_vision_model", "projection_dim": 48}
        return PaliGemmaConfig(
            vision_config=vision, text_config={**TEXT, "head_dim": 12, **self.text},
            image_token_index=IMAGE, projection_dim=48, hidden_size=48,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, 28, 28)} for seed in range(2)]

    def logprobs(self, reference: Any, tokens: list[int], images: Any, answered: int = 0) -> Tensor:
        """``answered``: so many of the last tokens are the answer's, which see what is before them."""
        ids = torch.tensor([tokens])
        kinds = torch.zeros_like(ids)
        kinds[0, len(tokens) - answered :] = 1
        with torch.inference_mode():
            logits = reference(
                input_ids=ids, attention_mask=torch.ones_like(ids), token_type_ids=kinds,
                **self.hf_inputs(images),
            ).logits[0]  # fmt: skip
        return torch.log_softmax(logits.float(), dim=-1)

    @pytest.mark.parametrize("pieces", [(), (1, 1), (2,)])
    def test_a_prompt_and_its_answer(
        self, reference: Any, model: Any, pieces: Sequence[int]
    ) -> None:
        images, answer = self.images(), [40, 41, 42][: sum(pieces)]
        vectors = self.embed(model, images)
        prompt = [IMAGE] * sum(map(len, vectors)) + [2, 30, 31, 9]
        driver, found, done = PagedDriver(model), [], 0
        for size in (len(prompt), *pieces):
            batch = driver.batch({"a": [*prompt, *answer][done : done + size]})
            extra = {}
            if not done:
                values = torch.cat(vectors)
                extra[INPUT_EMBEDS] = InputEmbeds(torch.arange(len(values)), values)
            last = last_keys([(0, len(prompt))], done, size)
            batch = driver.prepared(replace(batch, last_keys=last, extra=extra))
            with torch.inference_mode():
                found.append(model.compute_logits(model.forward(batch)).float())
            done += size
        expected = self.logprobs(reference, [*prompt, *answer], images, answered=len(answer))
        own = torch.log_softmax(torch.cat(found), dim=-1)
        torch.testing.assert_close(own, expected, atol=self.tolerance, rtol=0)

    # A prompt is one span, and there is none without an image.
    test_text_alone = test_two_images_in_a_prompt = test_pieces_that_end_within_an_image = None  # type: ignore[assignment]

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        """It is refused."""
        with pytest.raises(
            UnsupportedModel,
            match="begin with an image, and it can bring none",
        ):
            self.load(folder, limit_mm_per_prompt={"image": 0})


class TestPaliGemma(PaliGemma):
    # Log-probabilities reach -34 here: transformers' own are 2e-4 from what it computes in float64.
    tolerance = 5e-4


class TestPaliGemma2(PaliGemma):
    text: ClassVar = {
        "model_type": "gemma2", "query_pre_attn_scalar": 12, "sliding_window": 64,
        "attn_logit_softcapping": 5.0, "final_logit_softcapping": 8.0,
    }  # fmt: skip
