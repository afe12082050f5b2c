"""Keye-VL and Keye-VL 1.5 beside a plain reading: the tower is PaddleOCR-VL's in transformers, the decoder
Qwen 3's with another rotation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, ClassVar

import torch
from test_vision_language import TEXT, QwenVL, drawn
from test_vision_videos import SECONDS
from torch import Tensor
from video_conformance import VALUES, VideoConformance
from vision_conformance import IMAGE

from headrace_testing.model.plain.keye import PlainKeye

PATCH = 4
VISION: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 20, "patch_size": PATCH, "spatial_merge_size": 2,
}  # fmt: skip


class Keye(QwenVL):
    numbers = 3 * PATCH * PATCH
    joined: ClassVar[bool]
    name: ClassVar[str]

    def hf_class(self) -> Any:
        return lambda config: PlainKeye(config, {**TEXT, "head_dim": 12}, joined=self.joined)

    def hf_config(self) -> Any:
        rope = {"type": "default", "mrope_section": [2, 2, 2]}
        return {
            "architectures": [f"{self.name}ForConditionalGeneration"], "model_type": self.name,
            "vision_config": VISION, "image_token_id": IMAGE, "image_token": IMAGE, **TEXT,
            "head_dim": 12, "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "rope_scaling": rope, "attention_bias": False, "tie_word_embeddings": False,
        }  # fmt: skip

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        return {"images": images}


class TestKeye(Keye):
    joined, name = False, "Keye"


class TestKeyeVL1_5(Keye):
    joined, name = True, "KeyeVL1_5"


class TestVideosOfKeyeVL1_5(VideoConformance, Keye):
    """A frame is as an image."""

    joined, name, architecture = True, "KeyeVL1_5", "KeyeVL1_5ForConditionalGeneration"
    placeholders = (IMAGE, IMAGE)

    def videos(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                VALUES: drawn(10 + seed, t * h * w, self.numbers),
                "video_grid_thw": torch.tensor([t, h, w]),
            }
            for seed, (t, h, w) in enumerate([(3, 4, 6), (2, 8, 2)])
        ]

    def times(self, video: dict[str, Tensor]) -> int:
        return int(video["video_grid_thw"][0])

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        found = []
        for item in images:
            if VALUES in item:
                count, height, width = item["video_grid_thw"].tolist()
                grid = torch.tensor([1, height, width])
                found += [
                    {"pixel_values": frame, "image_grid_thw": grid}
                    for frame in item[VALUES].chunk(count)
                ]
            else:
                found.append(item)
        return {"images": found}


class TestVideosOfKeye(VideoConformance, Keye):
    """All of a video's patches see each other in the tower; its frames stand apart by seconds."""

    joined, name, architecture = False, "Keye", "KeyeForConditionalGeneration"
    placeholders = (IMAGE, IMAGE)
    seconds: ClassVar = (0.5, 1.7)

    def videos(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                VALUES: drawn(10 + seed, t * h * w, self.numbers),
                "video_grid_thw": torch.tensor([t, h, w]),
                SECONDS: torch.tensor([self.seconds[seed]]),
            }
            for seed, (t, h, w) in enumerate([(3, 4, 6), (2, 8, 2)])
        ]

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        return {
            "images": [
                {
                    "pixel_values": item[VALUES], "image_grid_thw": item["video_grid_thw"],
                    SECONDS: item[SECONDS],
                }
                if VALUES in item
                else item
                for item in images
            ]
        }  # fmt: skip

    def test_frames_see_each_other(self, model: Any) -> None:
        video = self.videos()[0]
        changed = {**video, VALUES: video[VALUES].clone()}
        changed[VALUES][-1] += 1
        with torch.inference_mode():
            own, other = (model.embed_media("video", [item])[0] for item in (video, changed))
        assert float((own[0] - other[0]).abs().max()) > 1e-4
