"""MiniCPM-V 2.6, whose class transformers does not have: its tower and its language model are transformers'
(Idefics 2's tower has the same places), its resampler is written here with torch's attention, by the paper
(arXiv:2408.01800) and the published files' names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vision_language import TEXT, drawn
from torch import Tensor, nn
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

SIZE, PATCH, QUERIES = 256, 4, 5
VISION: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 28, "patch_size": PATCH,
}  # fmt: skip


def waves(size: int, positions: Tensor) -> Tensor:
    """[len(positions), size]: sines, then cosines."""
    each = 1.0 / 10000 ** (torch.arange(size // 2) / (size / 2))
    angles = torch.outer(positions.float(), each)
    return torch.cat((angles.sin(), angles.cos()), dim=1)


class Resampler(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.query = nn.Parameter(torch.zeros(QUERIES, SIZE))
        self.kv_proj = nn.Linear(VISION["hidden_size"], SIZE, bias=False)
        self.attn = nn.MultiheadAttention(SIZE, SIZE // 128)
        self.ln_q, self.ln_kv, self.ln_post = (nn.LayerNorm(SIZE, eps=1e-6) for _ in range(3))
        self.proj = nn.Parameter(torch.zeros(SIZE, SIZE))

    def forward(self, states: Tensor, rows: int, columns: int) -> Tensor:
        x = self.ln_kv(self.kv_proj(states))
        across = waves(SIZE // 2, torch.arange(columns)).repeat(rows, 1)
        down = waves(SIZE // 2, torch.arange(rows)).repeat_interleave(columns, dim=0)
        placed = torch.cat((across, down), dim=1)
        seen, _ = self.attn(self.ln_q(self.query), x + placed, x)
        made: Tensor = self.ln_post(seen) @ self.proj
        return made


class Published(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        from transformers import Qwen2ForCausalLM
        from transformers.models.idefics2.configuration_idefics2 import Idefics2VisionConfig
        from transformers.models.idefics2.modeling_idefics2 import Idefics2VisionTransformer

        self.llm = Qwen2ForCausalLM(config)
        self.vpm = Idefics2VisionTransformer(
            Idefics2VisionConfig(**VISION, hidden_act="gelu_pytorch_tanh")
        )
        self.resampler = Resampler()

    def embed(self, image: dict[str, Tensor]) -> Tensor:
        """Slice by slice."""
        found, flat = [], image["pixel_values"]
        for rows, columns in image["tgt_sizes"].tolist():
            patches = flat[: rows * columns].view(rows, columns, 3, PATCH, PATCH)
            flat = flat[rows * columns :]
            pixels = patches.permute(2, 0, 3, 1, 4).reshape(1, 3, rows * PATCH, columns * PATCH)
            mask = torch.ones(1, rows, columns, dtype=torch.bool)
            states = self.vpm(pixels, patch_attention_mask=mask).last_hidden_state[0]
            found.append(self.resampler(states, rows, columns))
        return torch.cat(found)

    def forward(self, input_ids: Tensor, attention_mask: Tensor, images: Any = None) -> Any:
        embeds = self.llm.get_input_embeddings()(input_ids).clone()
        if images:
            embeds[input_ids == IMAGE] = torch.cat([self.embed(image) for image in images])
        logits = self.llm(inputs_embeds=embeds, attention_mask=attention_mask).logits
        return SimpleNamespace(logits=logits)


class TestMiniCPMV(VisionConformance):
    def hf_class(self) -> Any:
        return Published

    def hf_config(self) -> Any:
        from transformers import Qwen2Config

        return Qwen2Config(**{**TEXT, "hidden_size": SIZE, "tie_word_embeddings": False})

    def save(self, reference: Any, folder: Path) -> None:
        tensors = {name: tensor.contiguous() for name, tensor in reference.state_dict().items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        own = reference.llm.config.to_dict()
        whole = {
            "architectures": ["MiniCPMV"], "model_type": "minicpmv", "version": 2.6,
            "vision_config": {**VISION, "model_type": "siglip"}, "query_num": QUERIES,
            "drop_vision_last_layer": False, "slice_config": {"max_slice_nums": 9},
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps({**own, **whole}))

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three slices and of one, of several shapes."""
        grids = [[(3, 7), (6, 4), (6, 4)], [(5, 5)]]
        return [
            {
                "pixel_values": drawn(len(own), sum(r * c for r, c in own), 3 * PATCH**2),
                "tgt_sizes": torch.tensor(own),
            }
            for own in grids
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A slice of an image changes its own vectors, and no others."""
        first = self.images()[0]
        pixels = torch.cat((first["pixel_values"][:21].flip(1), first["pixel_values"][21:]))
        own, other = self.embed(model, [first, {**first, "pixel_values": pixels}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        assert differs.tolist() == [True] * QUERIES + [False] * 2 * QUERIES

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"version": 2.5}, "MiniCPMV"),
            ({"hidden_size": 192, "num_attention_heads": 4}, "hidden_size = 192"),
            ({"query_num": 0}, "query_num = 0"),
        ],
    )  # fmt: skip
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)

    def test_a_tower_without_its_last_layer(
        self, reference: Any, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        """Which is what configs mean that do not say."""
        config = json.loads((folder / "config.json").read_text())
        config.pop("drop_vision_last_layer")
        config["vision_config"]["num_hidden_layers"] += 1
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        for own, found in zip(
            self.embed(model, self.images()), self.embed(self.load(tmp_path), self.images()), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(found, own)
