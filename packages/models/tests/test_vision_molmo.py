"""Molmo beside a plain reading of it: CLIP and Qwen2 of transformers, and between them what the published
code does (arXiv:2409.17146)."""

from __future__ import annotations

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
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

ANSWERS, MORE, PATCH, SIDE, SIZE = 100, 128, 7, 3, 36
LAYERS, BETWEEN = 10, 50
NAMES = {
    "self_attn.q_proj": "attention.wq", "self_attn.k_proj": "attention.wk",
    "self_attn.v_proj": "attention.wv",
    "self_attn.out_proj": "attention.wo", "layer_norm1": "attention_norm", "layer_norm2": "ffn_norm",
    "mlp.fc1": "feed_forward.w1", "mlp.fc2": "feed_forward.w2",
}  # fmt: skip
WHOLE, BACKBONE = "model.transformer", "model.vision_backbone"


class PlainMolmo(nn.Module):
    def __init__(self, config: Mapping[str, Any]) -> None:
        super().__init__()
        from transformers import CLIPVisionConfig, CLIPVisionModel, Qwen2Config, Qwen2ForCausalLM

        text = {**TEXT, "vocab_size": ANSWERS + MORE, "tie_word_embeddings": False}
        self.text: Any = Qwen2ForCausalLM(Qwen2Config(**text))
        self.clip: Any = CLIPVisionModel(
            CLIPVisionConfig(
                hidden_size=SIZE, intermediate_size=BETWEEN, num_hidden_layers=LAYERS,
                num_attention_heads=3, image_size=SIDE * PATCH, patch_size=PATCH,
            )
        )  # fmt: skip
        self.pad_embed = nn.Parameter(torch.zeros(2, 2 * SIZE))
        self.q, self.k, self.v = (nn.Linear(2 * SIZE, SIZE) for _ in range(3))
        self.o = nn.Linear(SIZE, SIZE)
        hidden, inner = TEXT["hidden_size"], TEXT["intermediate_size"]
        self.w1, self.w3 = (nn.Linear(SIZE, inner, bias=False) for _ in range(2))
        self.w2 = nn.Linear(inner, hidden, bias=False)
        self.config = config

    def features(self, image: Mapping[str, Tensor]) -> Tensor:
        """Vectors of all squares of an image's crops."""
        count = len(image["pixel_values"])
        pixels = image["pixel_values"].view(count, SIDE, SIDE, PATCH, PATCH, 3)
        pixels = pixels.permute(0, 5, 1, 3, 2, 4).reshape(count, 3, SIDE * PATCH, SIDE * PATCH)
        states = self.clip(pixels, output_hidden_states=True).hidden_states
        x = torch.cat((states[-2], states[-9]), dim=-1)[:, 1:]
        mask = image["image_masks"][..., None]
        x = x + self.pad_embed[0] * (mask == 0) + self.pad_embed[1] * ((mask < 1) & (mask != 0))
        x = x.view(count, SIDE, SIDE, -1)
        x = nn.functional.pad(x, (0, 0, 0, 1, 0, 1))
        found = []
        for crop in x:
            for row in range(0, SIDE + 1, 2):
                for column in range(0, SIDE + 1, 2):
                    square = crop[row : row + 2, column : column + 2].reshape(4, -1)
                    q = self.q(square.mean(0)).view(3, 1, -1)
                    k, v = (f(square).view(4, 3, -1).transpose(0, 1) for f in (self.k, self.v))
                    share = (q @ k.mT / (SIZE // 3) ** 0.5).softmax(-1)
                    found.append(self.o((share @ v).transpose(0, 1).reshape(-1)))
        y = torch.stack(found)
        made: Tensor = self.w2(nn.functional.silu(self.w1(y)) * self.w3(y))
        return made

    def forward(
        self,
        input_ids: Tensor,
        attention_mask: Tensor,
        images: Sequence[Mapping[str, Tensor]] = (),
    ) -> Any:
        x = self.text.get_input_embeddings()(input_ids).clone()
        if images:
            x[input_ids == IMAGE] += torch.cat([self.features(i)[i["places"]] for i in images])
        logits = self.text(inputs_embeds=x, attention_mask=attention_mask).logits.clone()
        logits[..., ANSWERS:] = -3e4
        return SimpleNamespace(logits=logits)

    def save_pretrained(self, folder: Path) -> None:
        """As published."""
        tensors = {**self._text(), **self._vision()}
        whole = {name: tensor.detach().clone() for name, tensor in tensors.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))

    def _text(self) -> dict[str, Tensor]:
        own = self.text.state_dict()
        table = own["model.embed_tokens.weight"]
        found = {
            f"{WHOLE}.wte.embedding": table[:ANSWERS],
            f"{WHOLE}.wte.new_embedding": table[ANSWERS:],
            f"{WHOLE}.ln_f.weight": own["model.norm.weight"],
            f"{WHOLE}.ff_out.weight": own["lm_head.weight"][:ANSWERS],
        }
        for index in range(TEXT["num_hidden_layers"]):
            mine, to = f"model.layers.{index}", f"{WHOLE}.blocks.{index}"
            for kind in ("weight", "bias"):
                qkv = [own[f"{mine}.self_attn.{part}_proj.{kind}"] for part in "qkv"]
                found[f"{to}.att_proj.{kind}"] = torch.cat(qkv)
            both = [own[f"{mine}.mlp.{part}_proj.weight"] for part in ("up", "gate")]
            found |= {
                f"{to}.ff_proj.weight": torch.cat(both),
                f"{to}.ff_out.weight": own[f"{mine}.mlp.down_proj.weight"],
                f"{to}.attn_out.weight": own[f"{mine}.self_attn.o_proj.weight"],
                f"{to}.attn_norm.weight": own[f"{mine}.input_layernorm.weight"],
                f"{to}.ff_norm.weight": own[f"{mine}.post_attention_layernorm.weight"],
            }
        return found

    def _vision(self) -> dict[str, Tensor]:
        tower, found = f"{BACKBONE}.image_vit", {f"{BACKBONE}.pad_embed": self.pad_embed}
        parts = {"image_pooling_2d.w": "qkvo", "image_projector.w": "123"}
        for to, names in parts.items():
            for part in names:
                module = getattr(self, part if part in "qkvo" else f"w{part}")
                for kind, tensor in module.state_dict().items():
                    found[f"{BACKBONE}.{to}{part}.{kind}"] = tensor
        for name, tensor in self.clip.state_dict().items():
            name = name.removeprefix("vision_model.")
            if name.startswith("encoder.layers."):
                for theirs, own in NAMES.items():
                    name = name.replace(theirs, own)
                found[name.replace("encoder.layers", f"{tower}.transformer.resblocks")] = tensor
        embeddings = self.clip.state_dict()
        embeddings = {name.removeprefix("vision_model."): t for name, t in embeddings.items()}
        kernel = embeddings["embeddings.patch_embedding.weight"]
        found |= {
            f"{tower}.patch_embedding.weight": kernel.permute(0, 2, 3, 1).flatten(1),
            f"{tower}.class_embedding": embeddings["embeddings.class_embedding"],
            f"{tower}.positional_embedding": embeddings["embeddings.position_embedding.weight"],
            f"{tower}.pre_ln.weight": embeddings["pre_layrnorm.weight"],
            f"{tower}.pre_ln.bias": embeddings["pre_layrnorm.bias"],
        }
        return found


class TestMolmo(VisionConformance):
    def hf_class(self) -> Any:
        return PlainMolmo

    def hf_config(self) -> Any:
        return {
            **TEXT, "architectures": ["MolmoForCausalLM"], "model_type": "molmo", "vocab_size": ANSWERS,
            "embedding_size": ANSWERS, "intermediate_size": 2 * TEXT["intermediate_size"],
            "layer_norm_eps": 1e-6, "layer_norm_type": "rms", "attention_layer_norm": False,
            "norm_after": False, "qkv_bias": True, "weight_tying": False, "tie_word_embeddings": False,
            "vision_backbone": {
                "image_default_input_size": [SIDE * PATCH] * 2, "image_patch_size": PATCH,
                "image_emb_dim": SIZE, "image_num_heads": 3, "image_mlp_dim": BETWEEN,
                "image_num_layers": LAYERS,
            },
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three crops and of two, not all of whose vectors are read, and not in their order."""
        found = []
        for number, places in ((3, [0, 1, 2, 3, 8, 4, 5, 10]), (2, [0, 1, 2, 3, 7, 5])):
            masks = torch.ones(number, SIDE**2)
            masks[0, 2:4], masks[-1] = torch.tensor([0.0, 0.5]), -1
            found.append(
                {
                    "pixel_values": drawn(number, number, SIDE**2, 3 * PATCH**2),
                    "image_masks": masks,
                    "places": torch.tensor(places),
                    "patch_token": torch.tensor([IMAGE]),
                }
            )
        return found

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_too_few_layers_are_refused(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_backbone"]["image_num_layers"] = 8
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="image_num_layers = 8"):
            self.load(tmp_path)
