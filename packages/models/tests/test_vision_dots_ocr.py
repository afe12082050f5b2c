"""dots.ocr beside a plain reading of it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_language import TEXT, QwenVL
from torch import Tensor, nn
from torch.nn import functional
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.media import PlainMedia

PATCH, SIZE, HEADS, EPS = 4, 32, 2, 1e-5
VISION: dict[str, Any] = {
    "embed_dim": SIZE, "hidden_size": 48, "intermediate_size": 40, "num_hidden_layers": 2,
    "num_attention_heads": HEADS, "patch_size": PATCH, "rms_norm_eps": EPS, "post_norm": True,
}  # fmt: skip


class Gated(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        inner = VISION["intermediate_size"]
        self.fc1, self.fc3 = (nn.Linear(SIZE, inner, bias=False) for _ in range(2))
        self.fc2 = nn.Linear(inner, SIZE, bias=False)

    def forward(self, x: Tensor) -> Tensor:
        made: Tensor = self.fc2(functional.silu(self.fc1(x)) * self.fc3(x))
        return made


class PlainTower(nn.Module):
    """Layer by layer, as the published code has it."""

    def __init__(self) -> None:
        super().__init__()
        embed = nn.Module()
        embed.patchifier = nn.Module()
        embed.patchifier.proj = nn.Conv2d(3, SIZE, PATCH, PATCH)
        embed.patchifier.norm = nn.RMSNorm(SIZE, eps=EPS)
        self.patch_embed = embed
        self.blocks = nn.ModuleList()
        for _ in range(VISION["num_hidden_layers"]):
            block = nn.Module()
            block.attn = nn.Module()
            block.attn.qkv = nn.Linear(SIZE, 3 * SIZE, bias=False)
            block.attn.proj = nn.Linear(SIZE, SIZE, bias=False)
            block.norm1, block.norm2 = (nn.RMSNorm(SIZE, eps=EPS) for _ in range(2))
            block.mlp = Gated()
            self.blocks.append(block)
        self.post_trunk_norm = nn.RMSNorm(SIZE, eps=EPS)
        self.merger = nn.Module()
        self.merger.ln_q = nn.LayerNorm(SIZE, eps=1e-6)
        self.merger.mlp = nn.Sequential(
            nn.Linear(4 * SIZE, 4 * SIZE), nn.GELU(), nn.Linear(4 * SIZE, 48)
        )

    def forward(self, patches: Tensor, height: int, width: int) -> Tensor:
        embed: Any = self.patch_embed.patchifier
        x = embed.norm(embed.proj(patches.view(-1, 3, PATCH, PATCH)).flatten(1))
        angles = angles_of(height, width)
        for block in self.blocks:
            x = x + attend(block.attn, block.norm1(x), angles)
            x = x + block.mlp(block.norm2(x))
        merger: Any = self.merger
        units = merger.ln_q(self.post_trunk_norm(x)).view(-1, 4 * SIZE)
        made: Tensor = merger.mlp(units)
        return made


def angles_of(height: int, width: int) -> Tensor:
    """[patches, half of a head]: by row, then by column; squares of four patches follow each other."""
    quarter = SIZE // HEADS // 4
    turning = 10000.0 ** -(torch.arange(quarter) / quarter)
    grid = [
        (2 * row + down, 2 * column + right)
        for row in range(height // 2)
        for column in range(width // 2)
        for down in range(2)
        for right in range(2)
    ]
    places = torch.tensor(grid).float()
    return torch.cat([places[:, :1] * turning, places[:, 1:] * turning], dim=1)


def attend(attn: Any, x: Tensor, angles: Tensor) -> Tensor:
    query, key, value = attn.qkv(x).view(len(x), 3, HEADS, -1).permute(1, 2, 0, 3)
    found = functional.scaled_dot_product_attention(
        turned(query, angles)[None], turned(key, angles)[None], value[None]
    )
    made: Tensor = attn.proj(found[0].transpose(0, 1).reshape(len(x), -1))
    return made


def turned(x: Tensor, angles: Tensor) -> Tensor:
    """x [heads, T, D]: a number and the one half a head behind it turn together."""
    first, second = x.chunk(2, dim=-1)
    cos, sin = angles.cos(), angles.sin()
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)


class TestDotsOCR(QwenVL):
    numbers = 3 * PATCH * PATCH

    def hf_class(self) -> Any:
        return plain

    def hf_config(self) -> Any:
        return {
            "architectures": ["DotsOCRForCausalLM"], "model_type": "dots_ocr", "image_token": IMAGE,
            "image_token_id": IMAGE, "vision_config": VISION, **TEXT, "hidden_act": "silu",
            "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "tie_word_embeddings": False,
        }  # fmt: skip

    def hf_inputs(self, images: Any) -> dict[str, Any]:
        return {"images": images}

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"hidden_size": 40}, "hidden_size = 40: must be 48"),
            ({"temporal_patch_size": 2}, "temporal_patch_size = 2: must be 1"),
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


def plain(config: dict[str, Any]) -> PlainMedia:
    from transformers import Qwen2Config, Qwen2ForCausalLM

    text = Qwen2ForCausalLM(Qwen2Config(**TEXT, tie_word_embeddings=False))
    tower = PlainTower()

    def embed(image: Any) -> Tensor:
        _, height, width = image["image_grid_thw"].tolist()
        made: Tensor = tower(image["pixel_values"], height, width)
        return made

    return PlainMedia(config, text, ("vision_tower", tower), embed)
