"""Qwen-VL beside a plain reading of it: Qwen2 of transformers, and in front of it what the published code
does (arXiv:2308.12966)."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vision_language import TEXT as SMALL
from test_vision_language import drawn
from torch import Tensor, nn
from torch.nn import functional
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_models.families.vision_language.qwen_vl_1 import stretched

WIDTH, HEADS, LAYERS, PATCH, SIDE, QUERIES, RATIO = 36, 3, 2, 7, 4, 9, 1.5
TEXT = {**SMALL, "hidden_size": 128, "num_key_value_heads": 4}
VISION = "transformer.visual"
NAMES = {
    "self_attn.o_proj": "attn.c_proj", "mlp.gate_proj": "mlp.w2", "mlp.up_proj": "mlp.w1",
    "mlp.down_proj": "mlp.c_proj", "input_layernorm": "ln_1", "post_attention_layernorm": "ln_2",
}  # fmt: skip


def as_wide(table: Tensor, side: int) -> Tensor:
    own = int(len(table) ** 0.5)
    square = table.unflatten(0, (own, own)).permute(2, 0, 1)[None]
    made = functional.interpolate(square, size=(side, side), mode="bicubic", align_corners=False)
    return made[0].permute(1, 2, 0).flatten(0, 1)


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        between = int(WIDTH * RATIO)
        self.ln_1, self.ln_2 = (nn.LayerNorm(WIDTH, eps=1e-6) for _ in range(2))
        self.attn = nn.ModuleDict(
            {"in_proj": nn.Linear(WIDTH, 3 * WIDTH), "out_proj": nn.Linear(WIDTH, WIDTH)}
        )
        self.mlp = nn.ModuleDict(
            {"c_fc": nn.Linear(WIDTH, between), "c_proj": nn.Linear(between, WIDTH)}
        )

    def forward(self, x: Tensor) -> Tensor:
        every = self.attn["in_proj"](self.ln_1(x)).unflatten(-1, (HEADS, -1))
        q, k, v = (part.transpose(1, 2) for part in every.split(WIDTH // HEADS, dim=-1))
        share = (q @ k.mT / (WIDTH // HEADS) ** 0.5).softmax(-1)
        x = x + self.attn["out_proj"]((share @ v).transpose(1, 2).flatten(2))
        whole: Tensor = x + self.mlp["c_proj"](functional.gelu(self.mlp["c_fc"](self.ln_2(x))))
        return whole


class PlainPool(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        size = TEXT["hidden_size"]
        self.pos_embed = nn.Parameter(torch.zeros(QUERIES, size))
        self.query = nn.Parameter(torch.zeros(QUERIES, size))
        self.kv_proj = nn.Linear(WIDTH, size, bias=False)
        self.attn = nn.MultiheadAttention(size, size // 128, batch_first=True)
        self.ln_q, self.ln_kv = (nn.LayerNorm(size, eps=1e-6) for _ in range(2))

    def forward(self, x: Tensor) -> Tensor:
        x = self.ln_kv(self.kv_proj(x))
        query = (self.ln_q(self.query) + self.pos_embed).expand(len(x), -1, -1)
        seen: Tensor = self.attn(query, x + as_wide(self.pos_embed, SIDE), x)[0]
        return seen


class PlainTower(nn.Module):
    """Its modules have the published names."""

    def __init__(self) -> None:
        super().__init__()
        size = TEXT["hidden_size"]
        self.conv1 = nn.Conv2d(3, WIDTH, PATCH, PATCH, bias=False)
        self.positional_embedding = nn.Parameter(torch.zeros(256, WIDTH))
        self.ln_pre, self.ln_post = (nn.LayerNorm(n, eps=1e-6) for n in (WIDTH, size))
        blocks: Any = nn.ModuleList(PlainBlock() for _ in range(LAYERS))
        self.transformer = nn.ModuleDict({"resblocks": blocks})
        self.attn_pool = PlainPool()
        self.proj = nn.Parameter(torch.zeros(size, size))

    def forward(self, images: Tensor) -> Tensor:
        x = self.conv1(images).flatten(2).mT + as_wide(self.positional_embedding, SIDE)
        x = self.ln_pre(x)
        for block in self.transformer["resblocks"]:  # type: ignore[operator]
            x = block(x)
        found: Tensor = self.ln_post(self.attn_pool(x)) @ self.proj
        return found


class PlainQwenVL(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import Qwen2Config, Qwen2ForCausalLM

        own = {**TEXT, "tie_word_embeddings": False, "rms_norm_eps": 1e-6}
        self.text: Any = Qwen2ForCausalLM(Qwen2Config(**own))
        self.visual, self.config = PlainTower(), config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, images: Tensor | None = None
    ) -> Any:
        x = self.text.get_input_embeddings()(input_ids).clone()
        if images is not None:
            x[input_ids == IMAGE] = self.visual(images).flatten(0, 1)
        logits = self.text(inputs_embeds=x, attention_mask=attention_mask).logits
        return SimpleNamespace(logits=logits)

    def save_pretrained(self, folder: Path) -> None:
        """As published."""
        own = self.text.state_dict()
        found = {
            "transformer.wte.weight": own["model.embed_tokens.weight"],
            "transformer.ln_f.weight": own["model.norm.weight"],
            "lm_head.weight": own["lm_head.weight"],
            **{f"{VISION}.{name}": tensor for name, tensor in self.visual.state_dict().items()},
        }
        for index in range(TEXT["num_hidden_layers"]):
            mine, to = f"model.layers.{index}", f"transformer.h.{index}"
            for kind in ("weight", "bias"):
                qkv = [own[f"{mine}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{to}.attn.c_attn.{kind}"] = torch.cat(qkv)
            found |= {f"{to}.{b}.weight": own[f"{mine}.{a}.weight"] for a, b in NAMES.items()}
        whole = {name: tensor.detach().clone() for name, tensor in found.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))


class TestQwenVL(VisionConformance):
    def hf_class(self) -> Any:
        return PlainQwenVL

    def hf_config(self) -> Any:
        return {
            "architectures": ["QwenVLForConditionalGeneration"], "model_type": "qwen",
            "vocab_size": TEXT["vocab_size"], "hidden_size": TEXT["hidden_size"],
            "intermediate_size": 2 * TEXT["intermediate_size"], "tie_word_embeddings": False,
            "num_hidden_layers": TEXT["num_hidden_layers"], "no_bias": True,
            "num_attention_heads": TEXT["num_attention_heads"], "kv_channels": 32, "rotary_pct": 1.0,
            "rotary_emb_base": 10000, "layer_norm_epsilon": 1e-6, "seq_length": 128,
            "max_position_embeddings": 128,
            "visual": {
                "heads": HEADS, "image_size": SIDE * PATCH, "image_start_id": 121, "layers": LAYERS,
                "mlp_ratio": RATIO, "output_dim": TEXT["hidden_size"], "patch_size": PATCH, "width": WIDTH,
                "n_queries": QUERIES,
            },
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, SIDE * PATCH, SIDE * PATCH)} for seed in (1, 2)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": torch.stack([image["pixel_values"] for image in images])}

    def test_vectors(self, reference: Any, model: Any) -> None:
        with torch.inference_mode():
            expected = reference.visual(self.hf_inputs(self.images())["images"])
        for own, wanted in zip(self.embed(model, self.images()), expected, strict=True):
            torch.testing.assert_close(own, wanted, atol=1e-4, rtol=1e-5)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [({"n_queries": 8}, "n_queries = 8"), ({"output_dim": 64}, "hidden_size is 128")],
    )
    def test_towers_that_do_not_fit_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path, changed: dict[str, int], message: str
    ) -> None:
        self.with_config(folder, tmp_path, visual=changed)
        with pytest.raises(UnsupportedModel, match=message):
            self.load(tmp_path)

    def test_as_published(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """The files name the class of text, and ``--hf-overrides`` this one."""
        self.with_config(folder, tmp_path, architectures=["QWenLMHeadModel"])
        model = self.load(
            tmp_path, hf_overrides={"architectures": ["QwenVLForConditionalGeneration"]}
        )
        assert "image" in model.modalities


@pytest.mark.parametrize("side", [4, 16, 32])
def test_places_are_stretched(side: int) -> None:
    """From 16 x 16 to the published 32 x 32, too."""
    table = drawn(3, 256, 5)
    torch.testing.assert_close(stretched(table, side), as_wide(table, side), atol=1e-6, rtol=0)
