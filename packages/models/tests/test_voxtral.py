"""Voxtral beside transformers on a tiny checkpoint: recordings of one piece and of several."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import Heard
from test_vision_language import TEXT
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

STATES, BINS = 24, 11
ENCODER = {
    "num_mel_bins": BINS, "hidden_size": 12, "intermediate_size": 48, "num_hidden_layers": 2,
    "num_attention_heads": 2, "max_source_positions": STATES,
}  # fmt: skip


def recording(pieces: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(pieces)
    return {"input_features": torch.randn((2 * STATES * pieces, BINS), generator=generator)}


class TestVoxtral(Heard):
    """Recordings, which stand for the suite's images."""

    names_of_towers: ClassVar = ("audio_tower.", "multi_modal_projector.")

    def hf_class(self) -> Any:
        from transformers import VoxtralForConditionalGeneration

        return VoxtralForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import VoxtralConfig

        text = {**TEXT, "model_type": "llama", "head_dim": 12}
        return VoxtralConfig(audio_config=ENCODER, text_config=text, audio_token_id=IMAGE)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [recording(1), recording(2)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        pieces = [p for image in images for p in image["input_features"].split(2 * STATES)]
        return {"input_features": torch.stack(pieces).transpose(1, 2)}

    def test_a_piece_is_a_vector_for_four_states(self, model: Any) -> None:
        shapes = [tuple(v.shape) for v in self.embed(model, self.images())]
        assert shapes == [(STATES // 4, TEXT["hidden_size"]), (STATES // 2, TEXT["hidden_size"])]

    def test_states_that_make_no_whole_groups_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["audio_config"]["max_source_positions"] = STATES + 2
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=r"26 states of 12 numbers.*groups of 48"):
            self.load(tmp_path)
