"""DeepSeek-OCR beside transformers' Unlimited OCR, which has its towers and decoder, and looks back less far
only when it writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_models.layers.documents import sam

SAM = {"heads": 2, "window_size": 3, "global_attn_indexes": [1], "patch_size": 4,
       "downsample_channels": [20, 24]}  # fmt: skip
LANGUAGE: dict[str, Any] = {
    **TEXT, "num_key_value_heads": 4, "moe_intermediate_size": 24, "n_routed_experts": 4,
    "n_shared_experts": 1, "num_experts_per_tok": 2, "first_k_dense_replace": 1, "n_group": 1,
    "topk_group": 1, "topk_method": "greedy",
}  # fmt: skip
SIDE, TILE = 64, 48


class TestDeepseekOCR(VisionConformance):
    """Tables of places are for the page; tiles are smaller, and no multiple of windows."""

    def hf_class(self) -> Any:
        from transformers import UnlimitedOcrForConditionalGeneration

        return UnlimitedOcrForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import UnlimitedOcrConfig

        tower = {**SAM, "hidden_size": 32, "num_hidden_layers": 3, "num_attention_heads": 2,
                 "image_size": SIDE, "mlp_dim": 128, "output_channels": 16}  # fmt: skip
        encoder = {"hidden_size": 24, "intermediate_size": 96, "num_hidden_layers": 2,
                   "num_attention_heads": 2, "image_size": 42, "patch_size": 14}  # fmt: skip
        return UnlimitedOcrConfig(
            vision_config={"sam_config": tower, "encoder_config": encoder},
            text_config={**LANGUAGE, "mlp_layer_types": ["dense", "sparse"]}, image_token_id=IMAGE,
        )  # fmt: skip

    def save(self, reference: Any, folder: Path) -> None:
        """With the config as published; the library writes the published names."""
        super().save(reference, folder)
        clip = {"heads": 2, "image_size": 42, "layers": 2, "patch_size": 14, "width": 24}
        kinds = {
            "sam_vit_b": {**SAM, "layers": 3, "width": 32, "neck_channels": 16},
            "clip-l-14-224": clip,
        }
        whole = {
            "architectures": ["DeepseekOCRForCausalLM"], "model_type": "deepseek_vl_v2",
            "language_config": {
                **LANGUAGE, "architectures": ["DeepseekV2ForCausalLM"], "use_mla": False,
                "kv_lora_rank": None, "q_lora_rank": None, "v_head_dim": 0, "qk_nope_head_dim": 0,
                "qk_rope_head_dim": 0,
            },
            "projector_config": {"input_dim": 48, "n_embed": 48, "projector_type": "linear"},
            "tile_tag": "2D", "global_view_pos": "head",
            "vision_config": {"image_size": SIDE, "model_type": "vision", "width": kinds},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(whole))

    def images(self) -> Sequence[dict[str, Tensor]]:
        """A page in six tiles, three of a row, and one that is small."""
        grid = torch.tensor([3, 2])
        page = {"pixel_values": drawn(1, 1, 3, SIDE, SIDE), "patches_grid": grid}
        page["pixel_values_local"] = drawn(2, 6, 3, TILE, TILE)
        return [
            page, {"pixel_values": drawn(3, 1, 3, SIDE, SIDE), "patches_grid": torch.tensor([1, 1])}
        ]  # fmt: skip

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        tiles = [x["pixel_values_local"] for x in images if "pixel_values_local" in x]
        return {
            "pixel_values": torch.cat([image["pixel_values"] for image in images]),
            "pixel_values_local": torch.cat(tiles),
            "num_local_patches": [len(x.get("pixel_values_local", ())) for x in images],
            "patches_grid": [image["patches_grid"].tolist() for image in images],
        }

    def test_in_stretches_of_rows(self, model: Any, monkeypatch: pytest.MonkeyPatch) -> None:
        """As images are computed whose tables would be too large."""
        whole = self.embed(model, self.images())
        monkeypatch.setattr(sam, "_MOST_BIASES", 5000)
        for own, other in zip(whole, self.embed(model, self.images()), strict=True):
            torch.testing.assert_close(own, other, atol=1e-3, rtol=1e-3)

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"tile_tag": "1D"}, "tile_tag = '1D'"),
            ({"projector_config": {"projector_type": "mlp_gelu"}}, "projector_type = 'mlp_gelu'"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, **change))
