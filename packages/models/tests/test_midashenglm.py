"""MiDashengLM beside a plain reading of the published model, in front of transformers' Qwen2."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import Heard
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.midashenglm import PlainMiDashengLM

BINS, STEP = 10, 4
ENCODER: dict[str, Any] = {
    "model_type": "midashenglm_dasheng_encoder", "embed_dim": 24, "depth": 2, "num_heads": 3,
    "mlp_ratio": 2.0, "n_mels": BINS, "patch_size": [BINS, STEP], "patch_stride": [BINS, STEP],
    "target_length": 12 * STEP, "init_values": None,
}  # fmt: skip


class TestMiDashengLM(Heard):
    """A recording of two runs, the last of whose states nothing hears, and one of less than a run."""

    encoder: ClassVar[dict[str, Any]] = ENCODER
    numbers: ClassVar[tuple[tuple[int, int], ...]] = ((20 * STEP, 19), (11 * STEP + 2, 11))
    """Frames, and states that are heard."""

    def hf_class(self) -> Any:
        return PlainMiDashengLM

    def hf_config(self) -> Any:
        text = {
            **TEXT,
            "model_type": "qwen2_5_omni_text",
            "hidden_act": "silu",
            "rms_norm_eps": 1e-6,
        }
        return {
            "architectures": ["MiDashengLMModel"], "model_type": "midashenglm", "subsample_factor": 5,
            "audio_encoder_config": self.encoder, "text_config": text, "image_token": IMAGE,
            "audio_token_id": IMAGE,
        }  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [
            {"input_features": drawn(frames, frames, BINS), "num_heard": torch.tensor([heard])}
            for frames, heard in self.numbers
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_vectors(self, model: Any) -> None:
        assert [len(vectors) for vectors in self.embed(model, self.images())] == [4, 2]

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"patch_size": [5, STEP]}, r"patch_size = \[5, 4\]"),
            ({"patch_stride": 4}, "patch_stride = 4"),
            ({"target_length": 3}, "target_length"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, audio_encoder_config=change))


class TestMiDashengLMScaled(TestMiDashengLM):
    """Results are scaled; a state alone in the second run, which is heard; one run that is full."""

    encoder: ClassVar = {**ENCODER, "init_values": 0.1}
    numbers: ClassVar = ((13 * STEP, 13), (12 * STEP + 3, 12))

    def test_vectors(self, model: Any) -> None:
        assert [len(vectors) for vectors in self.embed(model, self.images())] == [2, 2]


def test_what_hears_nothing_hears_itself(tmp_path: Path) -> None:
    """The published code has no number for it."""
    tests = TestMiDashengLM()
    torch.manual_seed(0)
    reference = PlainMiDashengLM(tests.hf_config()).eval()
    reference.save_pretrained(tmp_path)
    model = tests.load(tmp_path)
    frames = drawn(1, 25 * STEP, BINS)
    for heard in (24, 25):
        (own,) = tests.embed(
            model, [{"input_features": frames, "num_heard": torch.tensor([heard])}]
        )
        assert torch.isfinite(own).all()
