"""GLM-ASR, Audio Flamingo 3 and Music Flamingo beside transformers on tiny checkpoints: recordings of one
piece and of several."""

from __future__ import annotations

import json
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

FRAMES, BINS = 48, 11
ENCODER = {
    "num_mel_bins": BINS, "hidden_size": 16, "intermediate_size": 64, "num_hidden_layers": 2,
    "num_attention_heads": 2,
}  # fmt: skip


def recording(pieces: int, num_frames: int) -> dict[str, Tensor]:
    return {
        "input_features": drawn(pieces, pieces, FRAMES, BINS),
        "num_frames": torch.tensor([num_frames]),
    }


class Sound(Heard):
    """Recordings, which stand for the suite's images."""

    counts: ClassVar[tuple[int, int]]
    """Vectors of them."""

    names_of_towers: ClassVar = ("audio_tower.", "multi_modal_projector.")

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [recording(1, 29), recording(2, FRAMES + 17)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        lengths = []
        for image in images:
            left, pieces = int(image["num_frames"]), len(image["input_features"])
            lengths += [min(FRAMES, left - FRAMES * index) for index in range(pieces)]
        mask = torch.arange(FRAMES)[None] < torch.tensor(lengths)[:, None]
        features = torch.cat([image["input_features"] for image in images]).transpose(1, 2)
        return {"input_features": features, "input_features_mask": mask.long()}

    def test_silence_behind_a_recording_has_no_vectors(self, model: Any) -> None:
        assert tuple(len(vectors) for vectors in self.embed(model, self.images())) == self.counts


class TestGlmAsr(Sound):
    """Four states are a vector."""

    counts: ClassVar = (15 // 4, 33 // 4)

    def hf_class(self) -> Any:
        from transformers import GlmAsrForConditionalGeneration

        return GlmAsrForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import GlmAsrConfig

        text = {**TEXT, "model_type": "llama", "head_dim": 12}
        return GlmAsrConfig(
            audio_config={**ENCODER, "model_type": "glmasr_encoder"}, text_config=text,
            audio_token_id=IMAGE, tie_word_embeddings=False,
        )  # fmt: skip

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"intermediate_size": 63}, "multiple of hidden_size = 16"),
            ({"num_key_value_heads": 1}, "num_key_value_heads = 1"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["audio_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            self.load(tmp_path)


class TestAudioFlamingo3(Sound):
    """Two states are a vector, an odd one of a piece is none."""

    counts: ClassVar = (15 // 2, 24 // 2 + 9 // 2)

    def hf_class(self) -> Any:
        from transformers import AudioFlamingo3ForConditionalGeneration

        return AudioFlamingo3ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import AudioFlamingo3Config

        audio = {
            **ENCODER, "model_type": "audioflamingo3_encoder", "max_source_positions": FRAMES // 2,
        }  # fmt: skip
        text = {**TEXT, "model_type": "qwen2"}
        return AudioFlamingo3Config(audio_config=audio, text_config=text, audio_token_id=IMAGE)

    def test_frames_of_silence_change_nothing(self, model: Any) -> None:
        """But for those that the last convolution looks at."""
        first = recording(1, 29)
        noisy = {**first, "input_features": first["input_features"].clone()}
        noisy["input_features"][:, 31:] += 1
        own, other = self.embed(model, [first, noisy])
        torch.testing.assert_close(own, other)


class TestMusicFlamingo(TestAudioFlamingo3):
    """States know their time: a recording's second piece is not its first."""

    def hf_class(self) -> Any:
        from transformers import MusicFlamingoForConditionalGeneration

        return MusicFlamingoForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import MusicFlamingoConfig

        audio = {
            **ENCODER, "model_type": "audioflamingo3_encoder", "max_source_positions": FRAMES // 2,
        }  # fmt: skip
        return MusicFlamingoConfig(
            audio_config=audio, text_config={**TEXT, "model_type": "qwen2"}, audio_token_id=IMAGE,
            rope_parameters={"rope_type": "default", "rope_theta": 50, "partial_rotary_factor": 0.4},
        )  # fmt: skip

    def test_pieces_know_their_place(self, model: Any) -> None:
        one = recording(1, FRAMES)
        twice = {
            "input_features": one["input_features"].expand(2, -1, -1),
            "num_frames": torch.tensor([2 * FRAMES]),
        }
        (found,) = self.embed(model, [twice])
        first, second = found.chunk(2)
        assert float((first - second).abs().max()) > 1e-3

    def test_odd_parts_are_refused(self, reference: Any, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match="9 of 16 numbers must be even and at most half"):
            self.load(folder, hf_overrides={"rope_parameters": {"partial_rotary_factor": 0.6}})
