"""Llama 3.1 Nemotron Nano VL and Nemotron Nano V2 VL beside plain readings of them: RADIO's tower is
transformers'."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.nemotron_vl import PlainNemotronVL, PlainNemotronVL2

SIDE, PATCH = 16, 4
SIZES: dict[str, Any] = {"hidden_size": 32, "num_hidden_layers": 2, "num_attention_heads": 2}


class NemotronVL(VisionConformance):
    """Three teachers have two names; the table of places becomes smaller."""

    args: ClassVar[dict[str, Any]] = {
        "model": "tiny", "cpe_max_size": 24, "cls_token_per_teacher": True, "register_multiple": 5,
        "teachers": [{"name": "clip"}, {"name": "dino"}, {"name": "clip"}],
    }  # fmt: skip
    first: ClassVar[tuple[int, int]] = (2, 3)
    """Vectors of teachers, and those behind them."""

    def hf_class(self) -> Any:
        def made(config: Any, plain: Any = PlainNemotronVL) -> Any:
            radio = {
                **SIZES, "mlp_ratio": 4.0, "patch_size": PATCH, "max_img_size": self.args["cpe_max_size"],
                "num_cls_tokens": self.first[0], "num_registers": self.first[1],
                "summary_idxs": [0],
            }  # fmt: skip
            return plain(config, radio)

        return made

    def hf_config(self) -> Any:
        return {
            "architectures": ["Llama_Nemotron_Nano_VL"], "model_type": "Llama_Nemotron_Nano_VL",
            "llm_config": {
                **TEXT, "model_type": "llama", "tie_word_embeddings": False, "hidden_act": "silu",
                "rms_norm_eps": 1e-6, "rope_theta": 10000.0, "head_dim": 12,
            },
            "vision_config": {
                **SIZES, "intermediate_size": 128, "patch_size": PATCH, "args": self.args,
                "version": "radio_v2.5-h", "feature_normalizer_config": None,
            },
            "force_image_size": SIDE, "patch_size": PATCH, "downsample_ratio": 0.5, "ps_version": "v2",
            "vit_hidden_size": 32, "projector_hidden_size": 40, "image_token": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three tiles and of one."""
        draw = torch.Generator().manual_seed(0)
        return [{"pixel_values": torch.rand(n, 3, SIDE, SIDE, generator=draw)} for n in (3, 1)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_other_pixels_are_another_image(self, model: Any) -> None:
        """A tile of an image changes its own vectors, and no others."""
        first = self.images()[0]["pixel_values"]
        changed = torch.cat((first[:1].flip(2), first[1:]))
        own, other = self.embed(model, [{"pixel_values": first}, {"pixel_values": changed}])
        differs = (own - other).abs().amax(dim=1) > 1e-4
        assert differs.tolist() == [True] * 4 + [False] * 8


class TestNemotronVL(NemotronVL):
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"ps_version": "v1"}, "ps_version = 'v1'"),
            ({"vit_hidden_size": 1280}, "vit_hidden_size = 1280"),
            ({"downsample_ratio": 0.3}, "downsample_ratio = 0.3"),
            ({"args": {"teachers": "clip"}}, "teachers = 'clip'"),
            ({"args": {"model_norm": True}}, "model_norm = True"),
            ({"vision_config": {"feature_normalizer_config": {}}}, "feature_normalizer_config"),
            ({"vision_config": {"hidden_size": None}}, "hidden_size"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["args"] |= change.pop("args", {})
        config["vision_config"] |= change.pop("vision_config", {})
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)


class TestNemotronVLWithOneVector(NemotronVL):
    """The table of places becomes larger."""

    args: ClassVar = {"model": "tiny", "cpe_max_size": 12, "cpe_num_registers": 4}
    first = (1, 4)


class NemotronVL2(NemotronVL):
    """In front of a recurrent decoder."""

    first = (2, 3)

    def hf_class(self) -> Any:
        made = super().hf_class()
        return lambda config: made(config, PlainNemotronVL2)

    def hf_config(self) -> Any:
        text = {
            "model_type": "nemotron_h", **TEXT, "num_hidden_layers": 3, "head_dim": 12,
            "layers_block_type": ["mamba", "attention", "mlp"], "mamba_num_heads": 4,
            "mamba_head_dim": 8, "ssm_state_size": 8, "n_groups": 2, "chunk_size": 8,
        }  # fmt: skip
        own = {"architectures": ["NemotronH_Nano_VL_V2"], "model_type": "NemotronH_Nano_VL_V2"}
        return {**super().hf_config(), **own, "llm_config": text}


class TestNemotronVL2(NemotronVL2):
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"ps_version": "v1"}, "ps_version = 'v1'"),
            ({"ps_version": None}, "ps_version"),
            ({"sound_config": {"model_type": "parakeet"}}, "sound_config"),
            ({"args": {"min_num_patches": 1024}}, "min_num_patches = 1024"),
            ({"args": {"max_num_patches": 13312}}, "max_num_patches = 13312"),
            (
                {"vision_config": {"separate_video_embedder": True}},
                "separate_video_embedder = True",
            ),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["args"] |= change.pop("args", {})
        config["vision_config"] |= change.pop("vision_config", {})
        (tmp_path / "config.json").write_text(json.dumps({**config, **change}))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=named):
            self.load(tmp_path)
        text = self.load(tmp_path, limit_mm_per_prompt={"image": 0, "video": 0})
        assert not hasattr(text, "tower")
