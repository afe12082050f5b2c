"""GLM-4.1V, GLM-4.5V, GLM-4.6V and GLM-OCR beside transformers, with images and videos."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_vision_language as language
import test_vision_videos as videos
import torch
from test_vision_language import TEXT
from torch import Tensor
from video_conformance import Laid
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

ROPE = {
    "rope_type": "default", "mrope_section": [1, 1, 1], "rope_theta": 10000.0,
    "partial_rotary_factor": 0.5,
}  # fmt: skip
EXPERTS = {
    "n_routed_experts": 4, "num_experts_per_tok": 2, "n_shared_experts": 1, "first_k_dense_replace": 1,
    "moe_intermediate_size": 24, "n_group": 1, "topk_group": 1,
}  # fmt: skip


class Glm(language.QwenVL):
    name: ClassVar[str]
    vision: ClassVar[dict[str, Any]] = {
        "depth": 2, "hidden_size": 32, "out_hidden_size": 48, "num_heads": 2, "intermediate_size": 40,
        "image_size": 20, "patch_size": 4, "spatial_merge_size": 2, "temporal_patch_size": 2,
        "attention_bias": True,
    }  # fmt: skip

    def text(self) -> dict[str, Any]:
        return {**TEXT, "head_dim": 12, "rope_parameters": ROPE}

    def hf_class(self) -> Any:
        import transformers

        return getattr(transformers, f"{self.name}ForConditionalGeneration")

    def hf_config(self) -> Any:
        import transformers

        config = getattr(transformers, f"{self.name}Config")
        return config(
            vision_config=self.vision, text_config=self.text(), image_token_id=IMAGE,
            tie_word_embeddings=False,
        )  # fmt: skip


class GlmVideos(videos.Qwen, Glm):
    """A video's vectors stand where tokens of images do, each two frames in front of their time."""

    placeholders = (IMAGE, IMAGE)

    def times(self, video: dict[str, Tensor]) -> int:
        return int(video[videos.GRID][0])

    def expected(
        self, reference: Any, laid: Laid, items: Sequence[dict[str, Tensor]], **more: Any
    ) -> Tensor:
        """The library tells frames from images by kinds, and fills one sort of them in at a time: it is given
        the vectors of both."""
        ids, given = torch.tensor([laid.tokens]), self.hf_inputs(items)
        kinds = torch.zeros_like(ids)
        for one in laid.media:
            for first, number in one.vector_runs:
                start = one.offset + first
                kinds[0, start : start + number] = 2 if one.modality == "video" else 1
        with torch.inference_mode():
            vectors = reference.get_input_embeddings()(ids)
            for kind, modality in ((1, "image"), (2, "video")):
                if not (kinds == kind).any():
                    continue
                values, grid = (
                    ("pixel_values", "image_grid_thw")
                    if kind == 1
                    else (videos.VALUES, videos.GRID)
                )
                made = getattr(reference.model, f"get_{modality}_features")(
                    given[values], given[grid]
                )
                vectors[kinds == kind] = torch.cat(list(made.pooler_output))
            grids = {name: given.get(name) for name in ("image_grid_thw", videos.GRID)}
            places, _ = reference.model.get_rope_index(ids, kinds, **grids)
            logits = reference(inputs_embeds=vectors, position_ids=places).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


class TestGlm4v(GlmVideos):
    name = "Glm4v"

    def test_refused(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        for change, named in (
            ({"out_hidden_size": 40}, "out_hidden_size = 40: must be 48"),
            ({"num_heads": 16}, "heads of 2 numbers"),
            ({"rope_parameters": {"rope_type": "linear"}}, "rope_type = 'linear'"),
        ):
            vision = {**config["vision_config"], **change}
            (tmp_path / "config.json").write_text(json.dumps({**config, "vision_config": vision}))
            with pytest.raises(UnsupportedModel, match=named):
                self.load(tmp_path)


class TestGlm4vMoe(GlmVideos):
    name = "Glm4vMoe"

    def text(self) -> dict[str, Any]:
        return {**super().text(), **EXPERTS}


class TestGlm46V(TestGlm4vMoe):
    name = "Glm46V"

    def hf_config(self) -> Any:
        from transformers import Glm4vMoeTextConfig, Glm4vMoeVisionConfig, Glm46VConfig

        return Glm46VConfig(
            vision_config=Glm4vMoeVisionConfig(**self.vision), image_token_id=IMAGE,
            text_config=Glm4vMoeTextConfig(**self.text()),
        )  # fmt: skip


class TestGlmOcr(Glm):
    name = "GlmOcr"

    def save(self, reference: Any, folder: Path) -> None:
        """Files as published hold a head behind the last layer."""
        head = {"model.language_model.layers.16.eh_proj.weight": torch.zeros(2, 2)}
        reference.save_pretrained(folder, state_dict={**reference.state_dict(), **head})
