"""Chameleon beside transformers."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_chameleon_text import TOWER
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel

CODES = 12
PIECES = {
    f"IMGIMG{''.join(chr(ord('A') + int(digit)) for digit in str(code))}Z": 100 + (code * 5) % CODES
    for code in range(CODES)
}


class TestChameleon(VisionConformance):
    tower_adapters: ClassVar = False
    tower: ClassVar[dict[str, Any]] = {"attn_resolutions": [4]}

    def hf_class(self) -> Any:
        from transformers import ChameleonForConditionalGeneration

        return ChameleonForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import ChameleonConfig

        vq = {**TOWER, "num_embeddings": CODES, "channel_multiplier": [1, 2, 2], **self.tower}
        return ChameleonConfig(
            **TEXT, vq_config=vq, vocabulary_map={"<image>": IMAGE, **PIECES},
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"pixel_values": drawn(seed, 3, 16, 16)} for seed in range(2)]

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        given = self.hf_inputs(images) if images else {}
        ids = torch.tensor([tokens])
        with torch.inference_mode():
            logits = reference(input_ids=ids, attention_mask=torch.ones_like(ids), **given).logits[
                0
            ]
        return torch.log_softmax(logits.clamp(min=-3e4), dim=-1)

    def test_codes_without_tokens_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vocabulary_map"].popitem()
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="11 of the 12 codes"):
            self.load(tmp_path)


class TestChameleonWithoutAttention(TestChameleon):
    tower: ClassVar = {"attn_type": "none", "num_res_blocks": 2}
