"""MiniCPM-o 2.6 beside a plain reading of it: what it hears, and that it sees as MiniCPM-V 2.6 does."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import Heard
from safetensors.torch import load_file, save_file
from test_vision_language import drawn
from test_vision_minicpmv import MiniCPMV
from torch import Tensor

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.minicpmo import PlainMiniCPMO

POSITIONS, BINS = 60, 10
AUDIO: dict[str, Any] = {
    "num_mel_bins": BINS, "d_model": 16, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 64, "max_source_positions": POSITIONS,
}  # fmt: skip


class MiniCPMO(MiniCPMV):
    """A version that is a text, and tensors of what speaks."""

    version = 2.6
    more: ClassVar = {
        "architectures": ["MiniCPMO"], "model_type": "minicpmo", "version": "2.6", "audio_config": AUDIO,
        "audio_pool_step": 2, "audio_chunk_length": 1.0, "tts_config": {"hidden_size": 8},
    }  # fmt: skip

    def hf_class(self) -> Any:
        return PlainMiniCPMO

    def save(self, reference: Any, folder: Path) -> None:
        super().save(reference, folder)
        tensors = load_file(folder / "model.safetensors")
        save_file(
            {**tensors, "tts.model.norm.weight": torch.zeros(3)}, folder / "model.safetensors"
        )


@pytest.fixture
def _with_processor(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if a package with the class's processor were installed."""
    installed, group = plugins.installed, "headrace.multimodal_processors"
    own = dict.fromkeys(["MiniCPMO"])
    monkeypatch.setattr(
        plugins, "installed", lambda name: own if name == group else installed(name)
    )


class TestMiniCPMOSees(MiniCPMO):
    @pytest.mark.usefixtures("_with_processor")
    def test_it_is_silent_about_recordings_that_it_does_not_take(
        self, reference: Any, folder: Path
    ) -> None:
        model = self.load(folder, limit_mm_per_prompt={"audio": 0})
        assert tuple(model.modalities) == ("image", "video")
        for own, found in zip(
            self.embed(self.load(folder), self.images()), self.embed(model, self.images()), strict=True
        ):  # fmt: skip
            torch.testing.assert_close(found, own)

    def test_it_takes_videos(self, model: Any) -> None:
        """And recordings."""
        assert tuple(model.modalities) == ("image", "video", "audio")

    def test_without_media_no_tower_is_loaded(
        self, reference: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """All modalities are three here."""
        model = self.load(folder, limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0})
        assert not hasattr(model, "embed_media")

    @pytest.mark.usefixtures("_with_processor")
    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        """That of recordings is."""
        model = self.load(folder, limit_mm_per_prompt={"image": 0, "video": 0})
        assert tuple(model.modalities) == ("audio",)


class TestMiniCPMOHears(Heard):
    """Recordings of more than a second, and of more than a piece."""

    takes: ClassVar = ("image", "video", "audio")

    def hf_class(self) -> Any:
        return PlainMiniCPMO

    def hf_config(self) -> Any:
        return MiniCPMO().hf_config()

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(n, n, BINS)} for n in (115, 2 * POSITIONS + 31)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return {"images": images}

    def test_vectors_are_as_many_as_the_processor_says(self, model: Any) -> None:
        assert [len(own) for own in self.embed(model, self.images())] == [29, 30 + 8]

    def test_a_second_does_not_hear_the_next(self, model: Any) -> None:
        """But the next one hears it: 50 states, of which the last sees two frames ahead."""
        [first, _] = self.images()
        changed = first["input_features"].clone()
        changed[104:] += 1
        own, other = self.embed(model, [first, {"input_features": changed}])
        torch.testing.assert_close(own[:25], other[:25])
        assert float((own[26:] - other[26:]).abs().max()) > 1e-3

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"version": "4.5"}, "MiniCPMO"),
            ({"init_audio": False}, "init_audio = False"),
            ({"audio_config": {"encoder_ffn_dim": 60}}, "encoder_ffn_dim = 60"),
            ({"audio_pool_step": 0}, "audio_pool_step = 0"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], named: str
    ) -> None:
        with pytest.raises(UnsupportedModel, match=named):
            self.load(self.with_config(folder, tmp_path, **change))
