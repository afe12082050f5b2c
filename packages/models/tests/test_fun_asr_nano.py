"""Fun-ASR-Nano beside transformers on a tiny checkpoint."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import HeardAlone
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

BINS, STACKED = 4, 3
ENCODER: dict[str, Any] = {
    "model_type": "fun_asr_nano_encoder", "num_mel_bins": BINS, "num_stacked_frames": STACKED,
    "hidden_size": 16, "num_attention_heads": 2, "intermediate_size": 20, "num_hidden_layers": 5,
    "num_timestamp_prediction_layers": 2, "fsmn_kernel_size": 4, "max_position_embeddings": 20,
}  # fmt: skip
ADAPTOR: dict[str, Any] = {
    "hidden_size": 48, "num_attention_heads": 4, "intermediate_size": 12, "num_hidden_layers": 2,
    "projector_hidden_size": 24,
}  # fmt: skip


class TestFunAsrNano(HeardAlone):
    """The first block gets 12 numbers and makes 16 of them; the third and the last end in a norm."""

    names_of_towers: ClassVar = ("audio_tower.", "multi_modal_projector.")

    def hf_class(self) -> Any:
        from transformers import FunAsrNanoForConditionalGeneration

        return FunAsrNanoForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import FunAsrNanoConfig

        text = {**TEXT, "model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True}
        return FunAsrNanoConfig(
            audio_config=ENCODER, adaptor_config=ADAPTOR, text_config=text, audio_token_id=IMAGE
        )

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(n, n, BINS * STACKED)} for n in (7, 19)]

    def features(self, reference: Any, image: dict[str, Tensor]) -> Tensor:
        frames = image["input_features"][None]
        mask = torch.ones(frames.shape[:2], dtype=torch.long)
        found: Tensor = reference.get_audio_features(frames, mask).pooler_output
        return found

    def test_an_adaptor_of_another_size_is_refused(self, reference: Any, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"adaptor_config\.hidden_size = 44"):
            self.load(folder, hf_overrides={"adaptor_config": {"hidden_size": 44}})
