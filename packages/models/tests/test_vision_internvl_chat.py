"""InternVL as published beside transformers' class: the same weights under the names of the published
files."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_relaid_families as relaid
import torch
from safetensors.torch import load_file, save_file
from test_vision_internvl import TOWER, InternVLConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.published_internvl import publish

_DECODER = "language_model."


class Published(InternVLConformance):
    tower: ClassVar = {**TOWER, "use_mean_pooling": True}

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        publish(folder)


class TestInternVLChat(Published):
    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"ps_version": "v3"}, "ps_version = 'v3'"),
            ({"select_layer": -9}, "select_layer = -9"),
            ({"downsample_ratio": 0.3}, "downsample_ratio = 0.3"),
            ({"force_image_size": 32}, "force_image_size = 32"),
            ({"use_llm_lora": 16}, "use_llm_lora = 16"),
            ({"qkv_bias": 1}, "qkv_bias = 1"),
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

    def test_first_checkpoints_have_vectors_by_column(
        self, model: Any, folder: Path, tmp_path: Path
    ) -> None:
        """``ps_version`` v1, and configs without one."""
        config = json.loads((folder / "config.json").read_text())
        del config["ps_version"]
        (tmp_path / "config.json").write_text(json.dumps(config))
        shutil.copy(folder / "model.safetensors", tmp_path)
        tile = self.images()[1]
        (first,), (own,) = self.embed(self.load(tmp_path), [tile]), self.embed(model, [tile])
        expected = own.view(2, 2, -1).transpose(0, 1).flatten(0, 1)
        torch.testing.assert_close(first, expected, atol=0, rtol=0)

    def test_text_is_served_where_the_tower_is_another(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["model_type"] = "intern_vit_300b"
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        model = self.load(tmp_path)
        assert not hasattr(model, "embed_media")


class Renamed(Published):
    """The same tower in a class of another name."""

    name: ClassVar[str]

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        file = folder / "config.json"
        own = {"architectures": [self.name], "model_type": "remote"}
        file.write_text(json.dumps({**json.loads(file.read_text()), **own}))


class TestSkyworkR1V(Renamed):
    name = "SkyworkR1VChatModel"


class TestH2OVL(Renamed):
    name = "H2OVLChatModel"
    text = "mistral"


class WideProjector(torch.nn.Module):
    """A plain reading of NVLM-D's projector, under the names of transformers' class."""

    def __init__(self, before: int, between: int, after: int) -> None:
        super().__init__()
        self.layer_norm = torch.nn.LayerNorm(before)
        self.linear_1 = torch.nn.Linear(before, between, bias=False)
        self.linear_2 = torch.nn.Linear(between, after, bias=False)

    def forward(self, units: torch.Tensor) -> torch.Tensor:
        x = torch.nn.functional.gelu(self.linear_1(self.layer_norm(units)))
        found: torch.Tensor = self.linear_2(x)
        return found


class TestNVLMD(Renamed):
    name = "NVLM_D_Model"
    tower: ClassVar = {
        **TOWER,
        "use_mean_pooling": True,
        "use_qk_norm": True,
        "norm_type": "rms_norm",
    }

    def hf_class(self) -> Any:
        def made(config: Any) -> Any:
            model = super(TestNVLMD, self).hf_class()(config)
            text = config.text_config
            model.model.multi_modal_projector = WideProjector(
                4 * config.vision_config.hidden_size, text.intermediate_size, text.hidden_size
            )
            return model

        return made


class TestInternVLChatOf6B(Published):
    """RMS norms, norms of queries and keys, an inner layer: the settings that configs may leave out."""

    tower: ClassVar = {
        **TOWER, "norm_type": "rms_norm", "use_qk_norm": True, "attention_bias": False,
        "use_mean_pooling": True,
    }  # fmt: skip
    text = "qwen3"
    settings: ClassVar = {"vision_feature_layer": -2}

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        config = json.loads((folder / "config.json").read_text())
        for key in ("norm_type", "qkv_bias", "qk_normalization"):
            del config["vision_config"][key]
        (folder / "config.json").write_text(json.dumps(config))


class TestInternVLChatOfLlama(Published):
    """Sixteen patches are a vector."""

    text = "llama"
    settings: ClassVar = {"downsample_ratio": 0.25}


class TestInternVLChatOfPhi3(Published):
    text = "phi3"


class TestInternVLChatOfQwen3Moe(Published):
    text = "qwen3_moe"


class TestInternVLChatOfGptOss(Published):
    text = "gpt_oss"


class TestInternVLChatOfInternLM2(Published):
    """Whose decoder has names of its own."""

    text = "llama"

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        decoder = relaid.TestInternLM2()
        tensors = load_file(folder / "model.safetensors")
        own = {name: tensors.pop(name) for name in [*tensors] if name.startswith(_DECODER)}
        own = decoder.tensors_of({name.removeprefix(_DECODER): t for name, t in own.items()})
        tensors |= {f"{_DECODER}{name}": tensor.contiguous() for name, tensor in own.items()}
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})
        config = json.loads((folder / "config.json").read_text())
        inner = {**decoder.config_of(config["llm_config"]), "model_type": "internlm2"}
        (folder / "config.json").write_text(json.dumps({**config, "llm_config": inner}))
