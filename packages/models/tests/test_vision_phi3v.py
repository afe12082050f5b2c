"""Phi-3-vision beside a plain reading of it."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, TOWER, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.phi3v import PlainPhi3V

TABLE = "model.embed_tokens.weight"


class TestPhi3V(VisionConformance):
    def hf_class(self) -> Any:
        return PlainPhi3V

    def hf_config(self) -> Any:
        """LongRoPE as published, under its first name; a prompt within the first context."""
        factors = {"short_factor": [1.1, 1.2, 1.3, 1.4, 1.5, 1.6], "long_factor": [2.0] * 6}
        return {
            "architectures": ["Phi3VForCausalLM"], "model_type": "phi3_v", **TEXT,
            "hidden_act": "silu", "rms_norm_eps": 1e-5, "rope_theta": 10000.0,
            "rope_scaling": {"type": "su", **factors}, "max_position_embeddings": 256,
            "original_max_position_embeddings": 256, "sliding_window": 60,
            "img_processor": {
                **TOWER, "patch_size": 7, "image_dim_out": 36, "name": "clip_vision_model",
                "num_img_tokens": 4,
            },
            "embd_layer": {
                "embedding_cls": "image", "hd_transform_order": "sub_glb", "projection_cls": "mlp",
                "use_hd_transform": True, "with_learnable_separator": True,
            },
            "image_token": IMAGE, "tie_word_embeddings": False,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, 1 + rows * columns, 3, 28, 28),
                "image_grid": torch.tensor([rows, columns]),
            }
            for seed, (rows, columns) in enumerate([(2, 3), (1, 1)])
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def changed(self, folder: Path, target: Path, **change: Any) -> None:
        """Another config over the same tensors."""
        config = json.loads((folder / "config.json").read_text())
        for key, value in change.items():
            value = {**config[key], **value} if isinstance(value, dict) else value
            config[key] = value
        (target / "config.json").write_text(json.dumps(config))
        (target / "model.safetensors").symlink_to(folder / "model.safetensors")

    def test_the_whole_may_come_first(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        self.changed(folder, tmp_path, embd_layer={"hd_transform_order": "glb_sub"})
        own, other = (self.embed(made, self.images())[0] for made in (model, self.load(tmp_path)))
        torch.testing.assert_close(torch.cat((own[-6:], own[-7:-6], own[:-7])), other)

    @pytest.mark.parametrize("kept", [(True, True), (False, True)])
    def test_the_table_may_have_the_images_name(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path, kept: tuple[bool, bool]
    ) -> None:
        """Alone, or beside the decoder's."""
        tensors = load_file(folder / "model.safetensors")
        tensors["model.vision_embed_tokens.wte.weight"] = tensors[TABLE].clone()
        if not kept[0]:
            del tensors[TABLE]
        save_file(tensors, tmp_path / "model.safetensors")
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        found = self.forward(self.load(tmp_path), [5, 6, 7], [], [], [3])
        torch.testing.assert_close(found, self.forward(model, [5, 6, 7], [], [], [3]))

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"embd_layer": {"use_hd_transform": False}}, "use_hd_transform = False"),
            ({"embd_layer": {"projection_cls": "linear"}}, "projection_cls = 'linear'"),
            ({"embd_layer": {"hd_transform_order": "sub"}}, "hd_transform_order = 'sub'"),
            ({"img_processor": {"type_feature": "cls_patch"}}, "type_feature = 'cls_patch'"),
            ({"img_processor": {"image_dim_out": 1024}}, "image_dim_out = 1024"),
            ({"img_processor": {"image_size": 21}}, "3 rows of patches"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        self.changed(folder, tmp_path, **change)
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)
