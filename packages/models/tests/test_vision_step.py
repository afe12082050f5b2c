"""Step3-VL 10B and Step 3 beside plain readings, on transformers' tower and decoders."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.step import PlainStep3VL, PlainStepVL


class Step(VisionConformance):
    def images(self) -> Sequence[dict[str, Tensor]]:
        """With two crops, which are smaller, and alone."""
        return [
            {"pixel_values": drawn(1, 3, 16, 16), "tiles": drawn(2, 2, 3, 12, 12)},
            {"pixel_values": drawn(3, 3, 16, 16)},
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}


class TestStepVL(Step):
    def hf_class(self) -> Any:
        return PlainStepVL

    def hf_config(self) -> Any:
        vision = {
            "width": 24,
            "layers": 2,
            "heads": 2,
            "mlp_ratio": 2.0,
            "image_size": 16,
            "patch_size": 2,
        }
        return {
            "architectures": ["StepVLForConditionalGeneration"], "model_type": "step_robotics",
            "vision_config": vision, "image_token": IMAGE, "image_token_id": IMAGE,
            "text_config": {**TEXT, "model_type": "qwen3", "head_dim": 12, "hidden_act": "silu"},
        }  # fmt: skip

    @pytest.mark.parametrize("key", ["use_cls_token", "use_ln_post"])
    def test_refused(self, key: str, reference: Any, folder: Path, tmp_path: Path) -> None:
        with pytest.raises(UnsupportedModel, match=key):
            self.load(self.with_config(folder, tmp_path, vision_config={key: True}))


class TestStep3VL(Step):
    """A dense layer and a mixture."""

    renormalises = False

    def hf_class(self) -> Any:
        return PlainStep3VL

    def hf_config(self) -> Any:
        vision = {
            "model_type": "step3_vision_encoder", "hidden_size": 24, "intermediate_size": 40,
            "output_hidden_size": 20, "num_hidden_layers": 2, "num_attention_heads": 2,
            "image_size": 16, "patch_size": 2,
        }  # fmt: skip
        text = {
            "model_type": "step3_text", "vocab_size": TEXT["vocab_size"], "hidden_size": 48,
            "intermediate_size": 64, "num_hidden_layers": 3, "num_attention_heads": 4,
            "num_attention_groups": 1, "head_dim": 12, "share_q_dim": 20, "max_position_embedding": 256,
            "rms_norm_eps": 1e-5, "rope_theta": 500000, "moe_num_experts": 4, "moe_top_k": 2,
            "moe_intermediate_size": 32, "share_expert_dim": 28, "moe_layers_enum": "1,2",
            "norm_expert_weight": self.renormalises,
        }  # fmt: skip
        return {
            "architectures": ["Step3VLForConditionalGeneration"], "model_type": "step3_vl",
            "vision_config": vision, "text_config": text, "understand_projector_stride": 2,
            "projector_bias": True, "image_token": IMAGE, "image_token_id": IMAGE,
        }  # fmt: skip

    def test_refused(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        for number, (change, words) in enumerate(
            [
                ({"num_attention_groups": 2}, "num_attention_groups"),
                ({"moe_layers_enum": "1,x"}, "moe_layers_enum = '1,x'"),
            ]
        ):
            into = tmp_path / str(number)
            into.mkdir()
            with pytest.raises(UnsupportedModel, match=words):
                self.load(self.with_config(folder, into, text_config=change))

    def test_layers_may_be_a_list(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        other = self.load(
            self.with_config(folder, tmp_path, text_config={"moe_layers_enum": [1, 2]})
        )
        own = self.load(folder)
        tokens = [5, 6, 7]
        first, second = (self.forward(model, tokens, [], [], [3]) for model in (own, other))
        assert torch.equal(first, second)


class TestStep3VLRenormalised(TestStep3VL):
    renormalises = True
