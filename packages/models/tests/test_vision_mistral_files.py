"""Models that see, in Mistral's own files, beside transformers' classes of the same weights."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from test_vision_pixtral import TOWER, PixtralConformance
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel, WeightsError
from headrace_testing.model.published_mistral import save_published


class MistralFiles(PixtralConformance):
    """Mistral's encoder has SiLU in its layers."""

    tower_adapters: ClassVar = False
    tower: ClassVar[dict[str, Any]] = {**TOWER, "hidden_act": "silu"}
    encoder: ClassVar[dict[str, Any]] = {}
    """What ``vision_encoder`` says beside its sizes."""

    def save(self, reference: Any, folder: Path) -> None:
        save_published(reference, folder, image_token=IMAGE, **self.encoder)

    def with_params(self, folder: Path, into: Path, **changed: Any) -> Path:
        params = json.loads((folder / "params.json").read_text())
        params["vision_encoder"].update(changed)
        (into / "params.json").write_text(json.dumps(params))
        (into / "consolidated.safetensors").symlink_to(folder / "consolidated.safetensors")
        return into

    @pytest.mark.parametrize(
        ("changed", "named"),
        [
            ({"mm_projector_id": "mlp"}, "mm_projector_id = 'mlp': must be 'patch_merge'"),
            ({"mm_projector_id": "", "spatial_merge_size": 2}, "spatial_merge_size = 2: must be 1"),
            ({"patch_size": "4"}, "patch_size = '4'"),
            ({"num_attention_heads": 3}, "heads|num_attention_heads = 3"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, changed: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_params(folder, tmp_path, **changed))


class TestPixtralOfMistral(MistralFiles):
    """As Pixtral 12B: a vector for each patch."""

    def hf_class(self) -> Any:
        from transformers import LlavaForConditionalGeneration

        return LlavaForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import LlavaConfig

        return LlavaConfig(
            vision_config=self.tower, text_config={**TEXT, "model_type": "mistral", "head_dim": 12},
            image_token_index=IMAGE, vision_feature_layer=-1, vision_feature_select_strategy="full",
        )  # fmt: skip

    def test_a_tensor_that_is_missing_is_named(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        tensors = load_file(folder / "consolidated.safetensors")
        tensors.pop("vision_language_adapter.w_in.bias")
        save_file(tensors, tmp_path / "consolidated.safetensors")
        (tmp_path / "params.json").write_text((folder / "params.json").read_text())
        with pytest.raises(WeightsError, match=r"linear_1\.bias"):
            self.load(tmp_path)


class TestMistralSmallOfMistral(MistralFiles):
    """As Mistral Small 3.1: a norm, and two by two patches are a vector."""

    encoder: ClassVar = {
        "adapter_bias": False, "mm_projector_id": "patch_merge", "spatial_merge_size": 2,
        "add_pre_mm_projector_layer_norm": True,
    }  # fmt: skip

    def hf_class(self) -> Any:
        from transformers import Mistral3ForConditionalGeneration

        return Mistral3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Mistral3Config

        return Mistral3Config(
            vision_config=self.tower, image_token_index=IMAGE, spatial_merge_size=2,
            tie_word_embeddings=False,
            text_config={**TEXT, "model_type": "mistral", "head_dim": 12, "rms_norm_eps": 1e-5},
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {"pixel_values": drawn(seed, 3, *size)} for seed, size in enumerate(((16, 24), (24, 8)))
        ]

    def test_a_norm_that_params_do_not_say_is_too_much(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        other = self.with_params(folder, tmp_path, add_pre_mm_projector_layer_norm=False)
        with pytest.raises(WeightsError, match="norm"):
            self.load(other)
