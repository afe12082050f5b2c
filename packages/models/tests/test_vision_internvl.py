"""InternVL by transformers beside transformers."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

TOWER: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 50, "num_hidden_layers": 3, "num_attention_heads": 2,
    "image_size": [16, 16], "patch_size": [4, 4], "attention_bias": True,
}  # fmt: skip


class InternVLConformance(VisionConformance):
    tower: ClassVar[dict[str, Any]] = TOWER
    text = "qwen2"
    settings: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        from transformers import InternVLForConditionalGeneration

        return InternVLForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import InternVLConfig

        return InternVLConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": self.text},
            image_token_id=IMAGE, tie_word_embeddings=False, **self.settings,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three tiles and of one."""
        return [{"pixel_values": drawn(count, count, 3, 16, 16)} for count in (3, 1)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])}

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A tile of an image changes its own vectors, and no others."""
        first = self.images()[0]["pixel_values"]
        changed = torch.cat((first[:1].flip(2), first[1:]))
        own, other = self.embed(model, [{"pixel_values": first}, {"pixel_values": changed}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        per = len(own) // len(first)
        assert differs[:per].all()
        assert not differs[per:].any()


class TestInternVL(InternVLConformance):
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"vision_feature_select_strategy": "full"}, "select_strategy = 'full'"),
            ({"vision_feature_layer": [1, 2]}, r"vision_feature_layer = \[1, 2\]"),
            ({"vision_feature_layer": -9}, "vision_feature_layer = -9"),
            ({"downsample_ratio": 0.3}, "downsample_ratio = 0.3"),
            ({"image_size": [16, 32]}, r"image_size = \[16, 32\]"),
            ({"use_absolute_position_embeddings": False}, "use_absolute_position_embeddings = False"),
            ({"norm_type": "batch_norm"}, "norm_type = 'batch_norm'"),
        ],
    )  # fmt: skip
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        inner = {key: value for key, value in change.items() if key in config["vision_config"]}
        config["vision_config"] |= inner
        outer = {key: value for key, value in change.items() if key not in inner}
        (tmp_path / "config.json").write_text(json.dumps({**config, **outer}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestInternVLNorms(InternVLConformance):
    """RMS norms, norms of queries and keys, a norm behind the last block (InternViT 6B)."""

    tower: ClassVar = {
        **TOWER, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False,
        "use_mean_pooling": False, "hidden_act": "gelu_pytorch_tanh",
    }  # fmt: skip
    text = "qwen3"


class TestInternVLInner(InternVLConformance):
    """States of an inner layer; sixteen patches are a vector."""

    tower: ClassVar = {**TOWER, "use_mean_pooling": False, "use_mask_token": True}
    text = "llama"
    settings: ClassVar = {
        "vision_feature_layer": -2, "downsample_ratio": 0.25, "projector_hidden_act": "relu",
    }  # fmt: skip


class TestInternS1(InternVLConformance):
    """The same model under other names, of which the library's draft and the published files have two."""

    text = "qwen3"
    blocks: ClassVar[str] = "layer"

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        file = folder / "config.json"
        config = json.loads(file.read_text())
        config |= {"architectures": ["InternS1ForConditionalGeneration"], "model_type": "interns1"}
        config["vision_config"] |= {"model_type": "interns1_vision", "drop_path_rate": 0.1}
        file.write_text(json.dumps(config))
        renamed = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            name = re.sub(r"^language_model\.model\.", "model.language_model.", name)
            name = re.sub(r"^language_model\.lm_head", "lm_head", name)
            name = re.sub(r"^(vision_tower|multi_modal_projector)", r"model.\1", name)
            renamed[name.replace("encoder.layer.", f"encoder.{self.blocks}.")] = tensor
        save_file(renamed, folder / "model.safetensors", metadata={"format": "pt"})

    def test_videos_come_too(self, model: Any) -> None:
        frames = self.images()[0]["pixel_values"]
        with torch.inference_mode():
            (own,) = model.embed_media("video", [{"pixel_values_videos": frames}])
        (other,) = self.embed(model, [{"pixel_values": frames}])
        torch.testing.assert_close(own, other)


class TestInternS1Draft(TestInternS1):
    blocks: ClassVar[str] = "layers"
