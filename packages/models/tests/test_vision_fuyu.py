"""Fuyu beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance


class TestFuyu(VisionConformance):
    """The class takes images of one number of patches in a batch, so they are one behind the other."""

    def hf_class(self) -> Any:
        from transformers import FuyuForCausalLM

        return FuyuForCausalLM

    def hf_config(self) -> Any:
        from transformers import FuyuConfig

        text = {**TEXT, "model_type": "persimmon", "num_key_value_heads": 4, "hidden_act": "relu2",
                "qk_layernorm": True, "partial_rotary_factor": 0.5}  # fmt: skip
        return FuyuConfig(text_config=text, patch_size=6, image_token_id=IMAGE)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(number, number, 108)} for number in (6, 9)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])[None]}

    def test_a_config_that_is_not_nested(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        """As published."""
        whole = json.loads((folder / "config.json").read_text())
        text = whole.pop("text_config")
        rope = text.pop("rope_parameters")
        own = {
            "rope_theta": rope["rope_theta"],
            "partial_rotary_factor": rope["partial_rotary_factor"],
        }
        (tmp_path / "config.json").write_text(json.dumps({**text, **whole, **own}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        images, model = self.images(), self.load(tmp_path)
        tokens, offsets = self.prompt([6, 9])
        ours = self.forward(model, tokens, offsets, images, [len(tokens)])
        torch.testing.assert_close(
            ours, self.logprobs(reference, tokens, images), atol=1e-4, rtol=0
        )

    @pytest.mark.parametrize("old", [True, False])
    def test_both_layouts_of_names(
        self, reference: Any, folder: Path, tmp_path: Path, old: bool
    ) -> None:
        """The published files have those from before transformers 4.52."""
        stored = load_file(folder / "model.safetensors")
        found = {}
        for name, tensor in stored.items():
            plain = name.removeprefix("model.").replace("language_model.model.", "language_model.")
            if "lm_head" in name:
                found["language_model.lm_head.weight" if old else "lm_head.weight"] = tensor
            elif plain.startswith("language_model."):
                own = plain.removeprefix("language_model.")
                found[f"language_model.model.{own}" if old else f"model.language_model.{own}"] = (
                    tensor
                )
            else:
                found[plain if old else f"model.{plain}"] = tensor
        save_file(found, tmp_path / "model.safetensors", metadata={"format": "pt"})
        (tmp_path / "config.json").write_text((folder / "config.json").read_text())
        images, model = self.images(), self.load(tmp_path)
        tokens, offsets = self.prompt([6, 9])
        ours = self.forward(model, tokens, offsets, images, [len(tokens)])
        torch.testing.assert_close(
            ours, self.logprobs(reference, tokens, images), atol=1e-4, rtol=0
        )
