"""Ovis beside transformers, and as it is published beside the same model under other names."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
from safetensors.torch import save_file
from test_vision_language import TEXT, drawn
from torch import Tensor, nn
from video_conformance import VALUES, VideoConformance
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.media import PlainMedia

MARKS = (121, 122, 123, 124, 125)
TOWER: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "image_size": 21, "patch_size": 7,
}  # fmt: skip
WORDS = 40


class Images:
    """One tile, and four with a small picture; two patches of a side are a word, 4 words a tile."""

    side: ClassVar[int] = 21
    """Three patches, which are filled up."""

    def images(self) -> Sequence[dict[str, Tensor]]:
        word = [-1] * 4
        one = [0, *word, 1, 4]
        four = [0, *word, 1, *word, 2, *word, 3, *word, 2, *word, 4]
        return [
            {
                "pixel_values": drawn(number, number, 3, self.side, self.side),
                "marks": torch.tensor(marks),
            }
            for number, marks in ((1, one), (5, four))
        ]


class TestOvis2(Images, VisionConformance):
    side: ClassVar = 28  # transformers does not fill up
    settings: ClassVar[dict[str, Any]] = {}

    def hf_class(self) -> Any:
        from transformers import Ovis2ForConditionalGeneration

        return Ovis2ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Ovis2Config

        return Ovis2Config(
            vision_config={
                **TOWER, "image_size": 28, "vocab_size": WORDS, "hidden_stride": 2, "qkv_bias": True,
                **self.settings,
            },
            text_config={**TEXT, "model_type": "qwen2"}, vocab_size=TEXT["vocab_size"],
            hidden_size=TEXT["hidden_size"], image_token_id=IMAGE, visual_indicator_token_ids=list(MARKS),
            tie_word_embeddings=False,
        )  # fmt: skip

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"pixel_values": torch.cat([image["pixel_values"] for image in images])}

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        """Places of marks have tokens of their own there."""
        marked = list(tokens)
        places = iter(i for i, token in enumerate(tokens) if token == IMAGE)
        for image in images:
            for mark in image["marks"].tolist():
                at = next(places)
                marked[at] = IMAGE if mark < 0 else MARKS[mark]
        return super().logprobs(reference, marked, images)


class TestOvis2OfWholeWords(TestOvis2):
    """Each place is one word, not a mean of several."""

    settings: ClassVar = {"tokenize_function": "st_argmax"}

    def test_words_by_chance_are_refused(
        self, folder: Path, reference: Any, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["tokenize_function"] = "gumbel_argmax"
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="gumbel_argmax"):
            self.load(tmp_path)


class PlainOvis(nn.Module):
    """As the published code has it: the states before the tower's last norm, a head, a table.

    Args:
        config: ``config.json``.
    """

    def __init__(self, config: dict[str, Any]) -> None:
        super().__init__()
        import transformers
        from transformers.models.ovis2.modeling_ovis2 import Ovis2VisionConfig, Ovis2VisionModel

        text = config["llm_config"]
        kind = {"qwen2": "Qwen2", "gemma2": "Gemma2"}[text["model_type"]]
        own = getattr(transformers, f"{kind}Config")(**{**text, "attn_implementation": "eager"})
        self.llm: Any = getattr(transformers, f"{kind}ForCausalLM")(own)
        self.config = config
        tower = {**config["visual_tokenizer_config"]["backbone_config"]}
        self.is_siglip = tower.pop("model_type") == "siglip_vision_model"
        if self.is_siglip:
            siglip = transformers.SiglipVisionConfig(**tower)
            self.backbone: Any = transformers.SiglipVisionModel(siglip)
        else:
            whole = Ovis2VisionConfig(**tower, vocab_size=WORDS)
            self.backbone = Ovis2VisionModel(whole).transformer
        self.linear = nn.Linear(4 * tower["hidden_size"], WORDS - 5, bias=False)
        self.norm = nn.LayerNorm(WORDS - 5)
        self.vte = nn.Embedding(WORDS, text["hidden_size"])

    def states(self, pixels: Tensor) -> Tensor:
        """Before the last norm."""
        if self.is_siglip:
            found: Tensor = self.backbone(pixels, output_hidden_states=True).hidden_states[-1]
            return found
        x: Tensor = self.backbone.embeddings(pixels)
        return self.backbone.encoder(inputs_embeds=x).last_hidden_state  # type: ignore[no-any-return]

    def features(self, image: dict[str, Tensor]) -> Tensor:
        x = self.states(image["pixel_values"]).unflatten(1, (3, 3))
        x = nn.functional.pad(x, (0, 0, 0, 1, 0, 1))
        rows = [
            torch.cat([x[:, r + i, c + j] for i in (0, 1) for j in (0, 1)], dim=-1)
            for r in (0, 2)
            for c in (0, 2)
        ]
        shares = self.norm(self.linear(torch.stack(rows, dim=1))).softmax(-1)
        words = (shares @ self.vte.weight[:-5]).flatten(0, 1)
        found = []
        for mark in image["marks"].tolist():
            if mark < 0:
                found.append(words[0])
                words = words[1:]
            else:
                found.append(self.vte.weight[WORDS - 5 + mark])
        return torch.stack(found)

    def forward(
        self, input_ids: Tensor, attention_mask: Tensor, images: Sequence[dict[str, Tensor]] = ()
    ) -> Any:
        x = self.llm.get_input_embeddings()(input_ids).clone()
        if images:
            scale = x.shape[-1] ** 0.5 if self.llm.config.model_type == "gemma2" else 1.0
            x[input_ids == IMAGE] = torch.cat([self.features(i) for i in images]) * scale
        return SimpleNamespace(
            logits=self.llm(inputs_embeds=x, attention_mask=attention_mask).logits
        )

    def save_pretrained(self, folder: Path) -> None:
        found = {f"llm.{name}": tensor for name, tensor in self.llm.state_dict().items()}
        found["visual_tokenizer.head.0.weight"] = self.linear.weight
        found["visual_tokenizer.head.1.weight"] = self.norm.weight
        found["visual_tokenizer.head.1.bias"] = self.norm.bias
        found["vte.weight"] = self.vte.weight
        own, to = self.backbone.state_dict(), "visual_tokenizer.backbone"
        if self.is_siglip:
            for name, tensor in own.items():
                name = name if name.startswith("vision_model.") else f"vision_model.{name}"
                found[f"{to}.{name}"] = tensor
        else:
            found |= published_aimv2(own, to)
        whole = {name: tensor.detach().clone() for name, tensor in found.items()}
        save_file(whole, folder / "model.safetensors", metadata={"format": "pt"})
        (folder / "config.json").write_text(json.dumps(self.config))


def published_aimv2(own: dict[str, Tensor], to: str) -> dict[str, Tensor]:
    """AIMv2's tensors of transformers, as its publishers' own code names them."""
    patchifier = f"{to}.preprocessor.patchifier"
    found = {
        f"{patchifier}.proj.weight": own["embeddings.patch_embedding.weight"],
        f"{patchifier}.proj.bias": own["embeddings.patch_embedding.bias"],
        f"{patchifier}.norm.weight": own["embeddings.rms_norm.weight"],
        f"{to}.preprocessor.pos_embed": own["embeddings.position_embedding.weight"][None],
        f"{to}.trunk.post_trunk_norm.weight": own["rms_norm.weight"],
    }
    for index in range(TOWER["num_hidden_layers"]):
        mine, theirs = f"encoder.layers.{index}", f"{to}.trunk.blocks.{index}"
        qkv = [own[f"{mine}.attention.{part}_proj.weight"] for part in "qkv"]
        found[f"{theirs}.attn.qkv.weight"] = torch.cat(qkv)
        for name, other in {
            "attention.out_proj": "attn.proj", "rms_norm1": "norm_1", "rms_norm2": "norm_2",
            "ffn.gate_proj": "mlp.fc1", "ffn.up_proj": "mlp.fc3", "ffn.down_proj": "mlp.fc2",
        }.items():  # fmt: skip
            found[f"{theirs}.{other}.weight"] = own[f"{mine}.{name}.weight"]
    return found


class TestOvis(Images, VisionConformance):
    text: ClassVar[dict[str, Any]] = {
        **TEXT, "model_type": "qwen2", "hidden_act": "silu", "tie_word_embeddings": False,
    }  # fmt: skip
    backbone: ClassVar[dict[str, Any]] = {**TOWER, "model_type": "aimv2", "qkv_bias": False}

    def hf_class(self) -> Any:
        return PlainOvis

    def hf_config(self) -> Any:
        kind = self.backbone["model_type"].partition("_")[0]
        return {
            "architectures": ["Ovis"], "model_type": "ovis", "hidden_size": TEXT["hidden_size"],
            "llm_config": self.text,
            "visual_tokenizer_config": {
                "model_type": f"{kind}_visual_tokenizer", "backbone_config": self.backbone,
                "vocab_size": WORDS, "hidden_stride": 2, "tokenize_function": "softmax", "tau": 1.0,
                "drop_cls_token": False, "use_indicators": False, "depths": None, "backbone_kwargs": {},
            },
        }  # fmt: skip

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_other_towers_are_refused(self, folder: Path, reference: Any, tmp_path: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["visual_tokenizer_config"]["backbone_config"]["model_type"] = "clip_vision_model"
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="clip_vision_model"):
            self.load(tmp_path)


class TestOvis16(TestOvis):
    """SigLIP in front of Gemma 2, whose factor enlarges rounding, too."""

    tolerance: ClassVar = 2e-4

    text: ClassVar = {
        **TEXT, "model_type": "gemma2", "head_dim": 12, "query_pre_attn_scalar": 12, "sliding_window": 64,
        "final_logit_softcapping": 30.0, "attn_logit_softcapping": 50.0,
        "hidden_activation": "gelu_pytorch_tanh",
        "layer_types": ["sliding_attention", "full_attention"],
        "tie_word_embeddings": True,
    }  # fmt: skip
    backbone: ClassVar = {**TOWER, "model_type": "siglip_vision_model"}


NAVIT: dict[str, Any] = {
    "hidden_size": 32, "intermediate_size": 40, "num_hidden_layers": 2, "num_attention_heads": 2,
    "image_size": 20, "patch_size": 4,
}  # fmt: skip


class PlainOvis25(PlainMedia):
    """Ovis 2.5 by a plain reading: PaddleOCR-VL's tower in transformers is the same but for the norm behind
    it, and for how positions are stretched."""

    def __init__(self, config: dict[str, Any]) -> None:
        from transformers import Qwen3Config, Qwen3ForCausalLM
        from transformers.models.paddleocr_vl.configuration_paddleocr_vl import (
            PaddleOCRVisionConfig,
        )
        from transformers.models.paddleocr_vl.modeling_paddleocr_vl import PaddleOCRVisionModel

        parts: Any = nn.Module()
        parts.visual_tokenizer = nn.Module()
        vit = PaddleOCRVisionModel(PaddleOCRVisionConfig(**NAVIT, spatial_merge_size=2))
        vit.vision_model.embeddings.interpolation_mode = "bicubic"
        vit.vision_model.post_layernorm.forward = lambda x: x
        parts.visual_tokenizer.vit = vit
        size, words = NAVIT["hidden_size"], WORDS - 4
        parts.visual_tokenizer.head = nn.Sequential(
            nn.Linear(4 * size, words, bias=False), nn.LayerNorm(words)
        )
        parts.vte = nn.Embedding(WORDS, TEXT["hidden_size"])

        def squares(frame: Tensor, height: int, width: int) -> Tensor:
            """Words of a frame: the library has its patches row by row."""
            grid = torch.tensor([[1, height, width]])
            rows = frame.view(height // 2, width // 2, 2, 2, -1).transpose(1, 2).flatten(0, 3)
            states = vit(rows.view(1, -1, 3, 4, 4), grid_thw=grid).last_hidden_state
            cut = states.view(height // 2, 2, width // 2, 2, size).transpose(1, 2)
            shares: Tensor = parts.visual_tokenizer.head(cut.reshape(-1, 4 * size)).softmax(-1)
            return shares @ parts.vte.weight[:words]

        def embed(item: Any) -> Tensor:
            is_video = VALUES in item
            grid = item["video_grid_thw" if is_video else "image_grid_thw"].tolist()
            frames = item[VALUES if is_video else "pixel_values"].chunk(grid[0])
            begin = words + 2 * is_video
            made = [squares(frame, *grid[1:]) for frame in frames]
            ends = parts.vte.weight[begin : begin + 2]
            return torch.cat([ends[:1], *made, ends[1:]])

        text = Qwen3ForCausalLM(Qwen3Config(**config["llm_config"]))
        super().__init__(config, text, ("", parts), embed, "llm.")


class TestOvis25(VideoConformance):
    architecture, placeholders = "Ovis2_5", (IMAGE, IMAGE)

    def hf_class(self) -> Any:
        return PlainOvis25

    def hf_config(self) -> Any:
        text = {
            **TEXT, "model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": False,
            "hidden_act": "silu", "rms_norm_eps": 1e-6, "rope_theta": 10000.0,
            "attention_bias": False,
        }  # fmt: skip
        tower = {**NAVIT, "model_type": "siglip2_navit", "fullatt_block_indexes": None}
        return {
            "architectures": ["Ovis2_5"], "model_type": "ovis2_5", "hidden_size": TEXT["hidden_size"],
            "llm_config": text, "vit_config": tower, "visual_vocab_size": WORDS, "image_token": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {
                "pixel_values": drawn(seed, h * w, 48),
                "image_grid_thw": torch.tensor([1, h, w]),
            }
            for seed, (h, w) in enumerate([(4, 6), (8, 2)])
        ]

    def videos(self) -> Sequence[dict[str, Tensor]]:
        return [
            {VALUES: drawn(seed, t * h * w, 48), "video_grid_thw": torch.tensor([t, h, w])}
            for seed, (t, h, w) in enumerate([(3, 4, 2), (1, 2, 6)])
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    @pytest.mark.parametrize(
        ("key", "value"),
        [("fullatt_block_indexes", "7|15"), ("num_patches", 256), ("use_rope", False)],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, key: str, value: object
    ) -> None:
        self.with_config(folder, tmp_path, vit_config={key: value})
        with pytest.raises(UnsupportedModel, match=f"{key} = {value!r}".replace("|", r"\|")):
            self.load(tmp_path)
