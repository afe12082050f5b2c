"""Kimi K2.5 beside transformers, and Kimi-VL, which has its parts under other names, beside the same."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_text_parts import DEEPSEEK
from test_vision_language import TEXT, drawn
from torch import Tensor
from video_conformance import VALUES, VIDEO, VideoConformance
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.native_size.stretched import stretched

PATCH = 4
VISION: dict[str, Any] = {
    "hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 40,
    "pos_emb_height": 5, "pos_emb_width": 5, "patch_size": PATCH,
}  # fmt: skip
REMOTE = {
    "hidden_size": "vt_hidden_size", "num_hidden_layers": "vt_num_hidden_layers",
    "num_attention_heads": "vt_num_attention_heads", "intermediate_size": "vt_intermediate_size",
    "pos_emb_height": "init_pos_emb_height", "pos_emb_width": "init_pos_emb_width",
}  # fmt: skip
"""Settings as transformers spells them -> in published configs of Kimi K2.5."""


class Kimi(VisionConformance):
    def hf_class(self) -> Any:
        from transformers import Kimi_K25ForConditionalGeneration

        return Kimi_K25ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Kimi_K25Config

        text = {**TEXT, **DEEPSEEK, "moe_intermediate_size": 24, "num_experts_per_tok": 2}
        return Kimi_K25Config(
            vision_config=VISION, text_config=text, projection_hidden_size=32,
            projection_layer_norm_eps=self.eps, image_token_id=IMAGE, tie_word_embeddings=False,
        )  # fmt: skip

    eps: ClassVar[float] = 1e-5

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, rows * columns, 3 * PATCH**2),
                "image_grid_hws": torch.tensor([rows, columns]),
            }
            for seed, (rows, columns) in enumerate([(4, 6), (8, 2)])
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        patches = torch.cat([image["pixel_values"] for image in images])
        grids = [[1, *image["image_grid_hws"].tolist()] for image in images]
        return {
            "pixel_values": patches.view(-1, 3, PATCH, PATCH),
            "image_grid_thw": torch.tensor(grids),
        }


class TestKimiK25AsTransformersWrites(Kimi):
    eps = 1e-3


class Published(Kimi):
    architecture: ClassVar[str]
    projector: ClassVar[tuple[tuple[str, str], ...]] = ()

    def config(self, whole: dict[str, Any]) -> dict[str, Any]:
        """``config.json`` as published, from transformers'."""
        raise NotImplementedError

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file({self.name(k): v for k, v in tensors.items()}, folder / "model.safetensors")
        whole = json.loads((folder / "config.json").read_text())
        whole = {**self.config(whole), "architectures": [self.architecture]}
        (folder / "config.json").write_text(json.dumps(whole))

    def name(self, name: str) -> str:
        """A tensor's name as published: the library writes three otherwise than it reads them."""
        for written, published in (
            ("language_model.model.blocks.", "language_model.model.layers."),
            ("vision_tower.encoder.patch_embed.", "vision_tower.patch_embed."),
            ("model.mm_projector.", "mm_projector."),
            *self.projector,
        ):
            if name.startswith(written):
                name = published + name.removeprefix(written)
        return name


class TestVideosOfKimiK25(VideoConformance, Kimi):
    """Of stretches of four frames, of two and of one, each behind its time."""

    placeholders = (IMAGE, VIDEO)

    def hf_class(self) -> Any:
        """The library's with its towers asked about one stretch after another: it expects that all have as
        many frames, and as many vectors as patches of all of these."""
        kind = super().hf_class()

        def made(config: Any) -> Any:
            whole = kind(config)
            own = whole.model

            def features(pixels: Tensor, grids: Tensor, **_: Any) -> Any:
                parts = torch.split(pixels, grids.prod(dim=1).tolist())
                towers = [
                    own.vision_tower(part, grid_thw=grid[None])
                    for part, grid in zip(parts, grids, strict=True)
                ]
                found = [own.mm_projector(one.pooler_output).squeeze(1) for one in towers]
                return SimpleNamespace(pooler_output=found)

            own.get_video_features = features
            return whole

        return made

    architecture = "KimiK25ForConditionalGeneration"

    def hf_config(self) -> Any:
        config = super().hf_config()
        config.video_token_id = VIDEO
        return config

    def videos(self) -> Sequence[dict[str, Tensor]]:
        shapes = ([(4, 4, 6), (2, 4, 6)], [(4, 2, 4), (1, 2, 4)])
        return [
            {
                VALUES: drawn(seed, sum(map(math.prod, grids)), 3 * PATCH**2),
                "video_grid_thw": torch.tensor(grids),
            }
            for seed, grids in enumerate(shapes)
        ]

    def times(self, video: dict[str, Tensor]) -> int:
        return len(video["video_grid_thw"])

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        pictures = [item for item in images if VALUES not in item]
        found = super().hf_inputs(pictures) if pictures else {}
        clips = [item for item in images if VALUES in item]
        if clips:
            patches = torch.cat([item[VALUES] for item in clips])
            found[VALUES] = patches.view(-1, 3, PATCH, PATCH)
            found["video_grid_thw"] = torch.cat([item["video_grid_thw"] for item in clips])
        return found

    def test_frames_stand_in_time(self, model: Any) -> None:
        """The same frame twice is another video than once."""
        patches = drawn(7, 8, 3 * PATCH**2)
        twice, once = (
            model.embed_media(
                "video", [{VALUES: x, "video_grid_thw": torch.tensor([[len(x) // 8, 2, 4]])}]
            )[0]
            for x in (torch.cat([patches, patches]), patches)
        )
        assert float((twice - once).abs().max()) > 1e-3


class TestKimiK25(Published):
    architecture = "KimiK25ForConditionalGeneration"

    def config(self, whole: dict[str, Any]) -> dict[str, Any]:
        vision = {REMOTE.get(key, key): value for key, value in whole["vision_config"].items()}
        text = {**whole["text_config"], "model_type": "kimi_k2"}
        return {
            "model_type": "kimi_k25", "text_config": text, "media_placeholder_token_id": IMAGE,
            "vision_config": {**vision, "projector_ln_eps": self.eps, "mm_hidden_size": 32},
        }  # fmt: skip


class TestKimiVL(Published):
    architecture = "KimiVLForConditionalGeneration"
    projector = (
        ("mm_projector.proj.0.", "multi_modal_projector.linear_1."),
        ("mm_projector.proj.2.", "multi_modal_projector.linear_2."),
        ("mm_projector.pre_norm.", "multi_modal_projector.pre_norm."),
    )

    def config(self, whole: dict[str, Any]) -> dict[str, Any]:
        vision = {
            f"init_{key}" if key.startswith("pos") else key: value
            for key, value in whole["vision_config"].items()
        }
        return {
            "model_type": "kimi_vl", "text_config": whole["text_config"],
            "vision_config": {**vision, "model_type": "moonvit"}, "media_placeholder_token_id": IMAGE,
        }  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"merge_kernel_size": [2, 1]}, r"merge_kernel_size = \[2, 1\]"),
            ({"num_attention_heads": 16}, "heads of 2 numbers"),
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


@pytest.mark.parametrize("mode", ["bicubic", "bilinear"])
@pytest.mark.parametrize("size", [(3, 9), (7, 2), (5, 6)])
def test_positions_are_stretched_as_torch_does(size: tuple[int, int], mode: str) -> None:
    table = drawn(1, 5, 6, 4)
    planes = table.permute(2, 0, 1)[None]
    expected = torch.nn.functional.interpolate(planes, size=size, mode=mode)[0]
    found = stretched(table, *size, cubic=mode == "bicubic")
    torch.testing.assert_close(found, expected.permute(1, 2, 0))
