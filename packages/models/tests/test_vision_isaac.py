"""Isaac beside a plain reading of the published model on transformers' SigLIP 2 and Qwen 3."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_testing.model.plain.isaac import PlainIsaac

VISION: dict[str, Any] = {
    "model_type": "pixel_shuffle_siglip2", "hidden_size": 24, "intermediate_size": 40,
    "num_hidden_layers": 2, "num_attention_heads": 2, "patch_size": 4, "num_patches": 16,
    "pixel_shuffle_scale_factor": 2,
}  # fmt: skip


class TestIsaac(VisionConformance):
    """Of a config in one level, as first published."""

    def hf_class(self) -> Any:
        return PlainIsaac

    def hf_config(self) -> Any:
        return {
            **TEXT, "architectures": ["IsaacForConditionalGeneration"], "model_type": "isaac",
            "head_dim": 16, "hidden_act": "silu", "rope_theta": 10000.0, "vision_config": VISION,
            "image_token": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, rows * columns, 48),
                "image_grid_thw": torch.tensor([1, rows, columns]),
            }
            for seed, (rows, columns) in enumerate([(6, 4), (2, 8)])
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_places_behind_a_wide_image(self, reference: Any, model: Any) -> None:
        """Text goes on with the next step in time, though columns count further."""
        images = [self.images()[1]]
        tokens, offsets = self.prompt([4])
        expected = reference.places(torch.tensor([tokens]), images)
        assert expected[:, -1].tolist() == [5] * 3
        found = self.forward(model, tokens, offsets, images, [len(tokens)])
        torch.testing.assert_close(
            found, self.logprobs(reference, tokens, images), atol=self.tolerance, rtol=0
        )

    def test_in_two_levels(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """Settings and names as later checkpoints have them."""
        config = json.loads((folder / "config.json").read_text())
        text = {
            k: v
            for k, v in config.items()
            if k in TEXT or k in ("head_dim", "hidden_act", "rope_theta")
        }
        whole = {
            k: config[k] for k in ("architectures", "model_type", "vision_config", "image_token")
        }
        whole["text_config"] = {**text, "model_type": "qwen3"}
        (tmp_path / "config.json").write_text(json.dumps(whole))
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            for own, later in (
                ("model.vision_embedding.0.", "model.vision_embedding.vision_tower."),
                ("model.vision_embedding.1.", "model.vision_embedding.multimodal_projector.0."),
                ("model.vision_embedding.3.", "model.vision_embedding.multimodal_projector.2."),
                ("model.layers.", "model.text_model.layers."),
                ("model.norm.", "model.text_model.norm."),
                ("model.embed_tokens.", "model.text_model.embed_tokens."),
            ):
                name = name.replace(own, later)
            tensors[name] = tensor
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        images = self.images()
        tokens, offsets = self.prompt([6, 4])
        own, later = (
            self.forward(self.load(path), tokens, offsets, images, [len(tokens)])
            for path in (folder, tmp_path)
        )
        assert torch.equal(own, later)
