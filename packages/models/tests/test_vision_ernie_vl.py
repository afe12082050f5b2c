"""ERNIE 4.5 VL beside transformers, with images and videos: experts of two kinds."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_vision_videos as videos
import torch
from test_vision_language import TEXT, QwenVL
from torch import Tensor
from video_conformance import VIDEO, Laid
from vision_conformance import IMAGE, packed

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_core.multimodal import MediaInput

START, END = 122, 123
MARKS = {
    "image_token_id": IMAGE, "video_token_id": VIDEO, "image_start_token_id": START,
    "image_end_token_id": END, "video_start_token_id": 124, "video_end_token_id": 125,
}  # fmt: skip
VISION: dict[str, Any] = {
    "depth": 2, "hidden_size": 32, "num_heads": 2, "intermediate_size": 64, "patch_size": 4,
}  # fmt: skip


class Ernie(QwenVL):
    """Tokens around an image go to the images' experts, too."""

    numbers = 3 * 4 * 4
    sections: ClassVar[list[int]] = [2, 2, 2]

    def text(self) -> dict[str, Any]:
        rope = {"rope_type": "default", "rope_theta": 10000.0, "mrope_section": self.sections}
        return {
            **TEXT, "num_hidden_layers": 3, "moe_num_experts": 4, "moe_k": 2, "rope_parameters": rope,
            "moe_intermediate_size": [24, 16],
        }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import Ernie4_5_VLMoeForConditionalGeneration

        return Ernie4_5_VLMoeForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Ernie4_5_VLMoeConfig

        return Ernie4_5_VLMoeConfig(vision_config=VISION, text_config=self.text(), **MARKS)

    def prompt(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        tokens, offsets = [5, 6], []
        for index, count in enumerate(counts):
            offsets.append(len(tokens) + 1)
            tokens += [START, *[IMAGE] * count, END, 7 + index]
        return [*tokens, 11, 12], offsets

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        ids = torch.tensor([tokens])
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        if images:
            kinds = (ids == IMAGE).int() + 2 * (ids == VIDEO).int()
            given |= {**self.hf_inputs(images), "mm_token_type_ids": kinds}
            given["moe_mm_token_type_ids"] = torch.isin(
                ids, torch.tensor(list(MARKS.values()))
            ).int()
        with torch.inference_mode():
            logits = reference(**given).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)


class TestErnie4_5VL(Ernie):
    def test_vectors_without_a_tower(
        self, reference: Any, model: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """They go to the images' experts as well."""
        installed, group = plugins.installed, "headrace.multimodal_processors"
        own = {"Ernie4_5_VLMoeForConditionalGeneration": None}
        monkeypatch.setattr(
            plugins, "installed", lambda name: own if name == group else installed(name)
        )
        settings = {"limit_mm_per_prompt": {"image": 0}, "enable_mm_embeds": True}
        images = self.images()
        vectors = self.embed(model, images)
        bare = self.load(folder, **settings)
        monkeypatch.setattr(self, "embed", lambda *_: vectors)
        tokens, offsets = self.prompt([len(v) for v in vectors])
        found = self.forward(bare, tokens, offsets, images, [len(tokens)])
        expected = self.logprobs(reference, tokens, images)
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"temporal_merge_size": 3}, "temporal_merge_size = 3"),
            ({"num_heads": 16}, "heads of 2"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestVideos(videos.Qwen, Ernie):
    """Two frames are a vector and a place."""

    shapes = ((4, 4, 6), (2, 8, 2))
    numbers = 3 * 4 * 4
    around: ClassVar[tuple[tuple[int, int], ...]] = ((START, END), (124, 125))

    def laid(self, model: Any, items: Sequence[dict[str, Tensor]]) -> Laid:
        """Items between their marks."""
        tokens, media, rows, values = [5, 6], [], [], []
        for index, item in enumerate(items):
            is_video = videos.VALUES in item
            modality, (start, end) = ("video" if is_video else "image"), self.around[is_video]
            with torch.inference_mode():
                (vectors,) = model.embed_media(modality, [item])
            offset, size = len(tokens) + 1, len(vectors)
            media.append(MediaInput(modality, packed(item), str(index), size, offset, ((0, size),)))
            rows += range(offset, offset + size)
            values.append(vectors)
            tokens += [start, *[self.placeholders[is_video]] * size, end, 7 + index]
        return Laid([*tokens, 11, 12], media, rows, torch.cat(values))

    def expected(
        self, reference: Any, laid: Laid, items: Sequence[dict[str, Tensor]], **more: Any
    ) -> Tensor:
        return self.logprobs(reference, laid.tokens, items)


class TestFlatConfig(Ernie):
    """As published: the language model's settings stand beside the tower's."""

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        whole = json.loads((folder / "config.json").read_text())
        text = whole.pop("text_config")
        rope = text.pop("rope_parameters")
        text |= {"rope_theta": rope.pop("rope_theta"), "rope_scaling": {**rope, "type": "default"}}
        vision = {**whole["vision_config"], "mlp_ratio": 2}
        vision.pop("intermediate_size")
        whole |= {"im_patch_id": whole.pop("image_token_id"), "vision_config": vision}
        text |= {"moe_num_experts": [4, 4], "moe_layer_start_index": [1, 1]}
        text |= {"moe_layer_end_index": [2, 2], "model_type": "ernie4_5_moe_vl"}
        (folder / "config.json").write_text(json.dumps({**whole, **text}))
