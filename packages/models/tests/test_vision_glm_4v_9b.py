"""GLM-4V 9B beside a plain reading of it: GLM of transformers, and in front of it what the published code
does (arXiv:2311.03079 and 2406.12793)."""

from __future__ import annotations

import itertools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file
from test_vision_language import TEXT, drawn
from torch import Tensor, nn
from torch.nn import functional
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

SIZE, BETWEEN, HEADS, LAYERS, PATCH, SIDE, FACTOR = 36, 50, 3, 2, 7, 4, 8
HEAD_DIM = 20
WHOLE, VISION = "transformer.encoder", "transformer.vision"


class PlainBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.input_layernorm, self.post_attention_layernorm = (
            nn.LayerNorm(SIZE, eps=1e-6) for _ in range(2)
        )
        self.attention = nn.ModuleDict(
            {"query_key_value": nn.Linear(SIZE, 3 * SIZE), "dense": nn.Linear(SIZE, SIZE)}
        )
        self.mlp = nn.ModuleDict({"fc1": nn.Linear(SIZE, BETWEEN), "fc2": nn.Linear(BETWEEN, SIZE)})

    def forward(self, x: Tensor) -> Tensor:
        parts = self.attention["query_key_value"](x).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in parts)
        share = (q @ k.mT / (SIZE // HEADS) ** 0.5).softmax(-1)
        seen = self.attention["dense"]((share @ v).transpose(1, 2).flatten(2))
        x = x + self.input_layernorm(seen)
        made = self.mlp["fc2"](functional.gelu(self.mlp["fc1"](x)))
        whole: Tensor = x + self.post_attention_layernorm(made)
        return whole


class PlainTower(nn.Module):
    """Its modules have the published names."""

    def __init__(self) -> None:
        super().__init__()
        hidden, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
        embedding = nn.Module()
        embedding.proj = nn.Conv2d(3, SIZE, PATCH, PATCH)
        embedding.cls_embedding = nn.Parameter(torch.zeros(1, SIZE))
        embedding.position_embedding = nn.Embedding(SIDE**2 + 1, SIZE)
        self.patch_embedding: Any = embedding
        blocks: Any = nn.ModuleDict({"layers": nn.ModuleList(PlainBlock() for _ in range(LAYERS))})
        self.transformer = blocks
        self.conv = nn.Conv2d(SIZE, hidden, 2, 2)
        sizes = {
            "linear_proj": (hidden, hidden), "dense_h_to_4h": (hidden, inner), "gate_proj": (hidden, inner),
            "dense_4h_to_h": (inner, hidden),
        }  # fmt: skip
        glu: dict[str, nn.Module] = {n: nn.Linear(*s, bias=False) for n, s in sizes.items()}
        self.linear_proj = nn.ModuleDict({**glu, "norm1": nn.LayerNorm(hidden)})
        self.boi, self.eoi = (nn.Parameter(torch.zeros(1, 1, hidden)) for _ in range(2))

    def forward(self, images: Tensor) -> Tensor:
        count, embedding, glu = len(images), self.patch_embedding, self.linear_proj
        x = embedding.proj(images).flatten(2).mT
        x = torch.cat((embedding.cls_embedding.expand(count, 1, -1), x), dim=1)
        x = x + embedding.position_embedding.weight
        for block in self.transformer["layers"]:
            x = block(x)
        x = self.conv(x[:, 1:].mT.unflatten(-1, (SIDE, SIDE))).flatten(2).mT
        x = functional.gelu(glu["norm1"](glu["linear_proj"](x)))
        x = glu["dense_4h_to_h"](functional.silu(glu["gate_proj"](x)) * glu["dense_h_to_4h"](x))
        begin, end = (one.expand(count, -1, -1) for one in (self.boi, self.eoi))
        return torch.cat((begin, x, end), dim=1) / FACTOR


class PlainGlm4V(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import GlmConfig, GlmForCausalLM

        rope = {"rope_type": "default", "rope_theta": 500.0, "partial_rotary_factor": 0.5}
        own = {"head_dim": HEAD_DIM, "attention_bias": True, "tie_word_embeddings": False,
               "rms_norm_eps": 1e-5, "rope_parameters": rope}  # fmt: skip
        self.text: Any = GlmForCausalLM(GlmConfig(**{**TEXT, **own}))
        self.vision, self.config = PlainTower(), config

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, images: Tensor | None = None
    ) -> Any:
        x = self.text.get_input_embeddings()(input_ids).clone()
        places: list[int] = []
        if images is not None:
            x[input_ids == IMAGE] = self.vision(images).flatten(0, 1)
        for token, run in itertools.groupby(input_ids[0].tolist()):
            number, at = len(list(run)), places[-1] + 1 if places else 0
            if token == IMAGE:
                places += [at, *[at + 1] * (number - 2), at + 2]
            else:
                places += range(at, at + number)
        logits = self.text(inputs_embeds=x, position_ids=torch.tensor([places])).logits
        return SimpleNamespace(logits=logits)

    def save_pretrained(self, folder: Path) -> None:
        """As published."""
        own = self.text.state_dict()
        found = {
            "transformer.embedding.word_embeddings.weight": own["model.embed_tokens.weight"],
            f"{WHOLE}.final_layernorm.weight": own["model.norm.weight"],
            "transformer.output_layer.weight": own["lm_head.weight"],
            **{f"{VISION}.{name}": tensor for name, tensor in self.vision.state_dict().items()},
        }
        for index in range(TEXT["num_hidden_layers"]):
            mine, to = f"model.layers.{index}", f"{WHOLE}.layers.{index}"
            for kind in ("weight", "bias"):
                qkv = [own[f"{mine}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{to}.self_attention.query_key_value.{kind}"] = torch.cat(qkv)
            found |= {
                f"{to}.self_attention.dense.weight": own[f"{mine}.self_attn.o_proj.weight"],
                f"{to}.mlp.dense_h_to_4h.weight": own[f"{mine}.mlp.gate_up_proj.weight"],
                f"{to}.mlp.dense_4h_to_h.weight": own[f"{mine}.mlp.down_proj.weight"],
            }
            for norm in ("input_layernorm", "post_attention_layernorm"):
                found[f"{to}.{norm}.weight"] = own[f"{mine}.{norm}.weight"]
        whole = {name: tensor.detach().clone() for name, tensor in found.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))


class TestGlm4V(VisionConformance):
    def hf_class(self) -> Any:
        return PlainGlm4V

    def hf_config(self) -> Any:
        return {
            "architectures": ["GLM4VForCausalLM"], "model_type": "chatglm", "tie_word_embeddings": False,
            "padded_vocab_size": TEXT["vocab_size"], "hidden_size": TEXT["hidden_size"],
            "ffn_hidden_size": TEXT["intermediate_size"], "num_layers": TEXT["num_hidden_layers"],
            "num_attention_heads": TEXT["num_attention_heads"], "kv_channels": HEAD_DIM,
            "multi_query_attention": True, "multi_query_group_num": TEXT["num_key_value_heads"],
            "layernorm_epsilon": 1e-5, "rmsnorm": True, "seq_length": 128, "rope_ratio": 0.05,
            "add_qkv_bias": True, "add_bias_linear": False, "boi_token_id": 121, "eoi_token_id": 122,
            "vision_config": {
                "hidden_size": SIZE, "intermediate_size": BETWEEN, "num_hidden_layers": LAYERS,
                "num_heads": HEADS, "image_size": SIDE * PATCH, "patch_size": PATCH,
                "num_positions": SIDE**2 + 1, "layer_norm_eps": 1e-6, "hidden_act": "gelu",
                "scaling_factor": FACTOR, "in_channels": 3, "dropout_prob": 0.0,
            },
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, SIDE * PATCH, SIDE * PATCH)} for seed in (1, 2)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": torch.stack([image["pixel_values"] for image in images])}

    def test_vectors(self, reference: Any, model: Any) -> None:
        with torch.inference_mode():
            expected = reference.vision(self.hf_inputs(self.images())["images"])
        for own, wanted in zip(self.embed(model, self.images()), expected, strict=True):
            torch.testing.assert_close(own, wanted, atol=1e-5, rtol=0)

    @pytest.mark.parametrize(
        ("changed", "message"),
        [({"image_size": 35}, "num_positions = 17"), ({"in_channels": 4}, "in_channels = 4")],
    )
    def test_towers_that_do_not_fit_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path, changed: dict[str, int], message: str
    ) -> None:
        self.with_config(folder, tmp_path, vision_config=changed)
        with pytest.raises(UnsupportedModel, match=message):
            self.load(tmp_path)

    def test_as_published(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """The files name the class of text, and ``--hf-overrides`` this one."""
        self.with_config(folder, tmp_path, architectures=["ChatGLMModel"])
        model = self.load(tmp_path, hf_overrides={"architectures": ["GLM4VForCausalLM"]})
        for own, other in zip(
            self.embed(model, self.images()),
            self.embed(self.load(folder), self.images()),
            strict=True,
        ):
            assert torch.equal(own, other)
