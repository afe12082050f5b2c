"""Ultravox beside a plain reading of what its authors published, as transformers has no class for it: its
projector, windows of more than 30 s, and language models and towers that other checkpoints have."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
from audio_conformance import HeardAlone
from safetensors.torch import save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from transformers import AutoConfig, WhisperConfig

from headrace_core.errors import UnsupportedModel
from headrace_testing.model.plain.ultravox import PlainUltravox, projector, tower

WINDOW, GROUP, BINS = 48, 3, 10
AUDIO: dict[str, Any] = {
    "vocab_size": 60, "num_mel_bins": BINS, "d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20, "decoder_layers": 1, "decoder_attention_heads": 2, "decoder_ffn_dim": 20,
    "max_source_positions": WINDOW // 2, "pad_token_id": 0, "bos_token_id": 1, "eos_token_id": 2,
    "decoder_start_token_id": 1,
}  # fmt: skip
WHOLE: dict[str, Any] = {
    "architectures": ["UltravoxModel"], "model_type": "ultravox", "hidden_size": 20, "stack_factor": GROUP,
    "audio_latency_block_size": None,
}  # fmt: skip


class Heard(HeardAlone):
    """Of less than a window, and of two of which the second is short."""

    names_of_towers: ClassVar = ("audio_tower.", "multi_modal_projector.")
    settings: ClassVar[tuple[str, bool]]
    """Kind of the language model; whether the second norm is the last thing."""

    def hf_class(self) -> Any:
        return self.made

    def made(self, settings: tuple[str, bool]) -> PlainUltravox:
        kind, ends = settings
        text = AutoConfig.for_model(kind, **TEXT, head_dim=12)
        return PlainUltravox(WhisperConfig(**AUDIO), text, GROUP, ends)

    def hf_config(self) -> Any:
        return self.settings

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(n, n, BINS)} for n in (29, WINDOW + 15)]

    def features(self, reference: Any, image: dict[str, Tensor]) -> Tensor:
        found: Tensor = reference.heard(image["input_features"])
        return found

    def test_vectors_of_windows(self, model: Any) -> None:
        assert tuple(len(vectors) for vectors in self.embed(model, self.images())) == (5, 8 + 3)


class TestUltravox(Heard):
    """As version 0.5: the language model is where its makers have it."""

    settings: ClassVar = ("llama", False)

    def save(self, reference: Any, folder: Path) -> None:
        companion = folder / "language"
        reference.language_model.save_pretrained(companion)
        save_file(tower(reference) | projector(reference), folder / "model.safetensors")
        audio = {**AUDIO, "model_type": "whisper"}
        whole = {
            **WHOLE, "projector_ln_mid": True, "audio_model_id": None, "audio_config": audio,
            "text_model_id": str(companion),
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")

    def test_memory_is_reckoned_with_both(self, reference: Any, folder: Path) -> None:
        from headrace_core.config import LoadConfig, ModelConfig
        from headrace_core.platform import CpuPlatform
        from headrace_models.resolve import resolve

        info = resolve(ModelConfig(model=str(folder)), LoadConfig(), CpuPlatform())
        decoder = reference.whisper.model.decoder.parameters()
        unused = sum(tensor.numel() for tensor in decoder)
        stored = {id(tensor): tensor.numel() for tensor in reference.parameters()}
        assert info.weight_bytes == 4 * (sum(stored.values()) - unused)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"audio_latency_block_size": 100}, "audio_latency_block_size = 100"),
            ({"num_projector_layers": 2}, "num_projector_layers = 2"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8")) | change
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            self.load(tmp_path)


class TestUltravoxBefore(Heard):
    """As version 0.4: the tower is Whisper's, too, and the last norm is behind the second product."""

    settings: ClassVar = ("qwen3", True)

    def save(self, reference: Any, folder: Path) -> None:
        reference.language_model.save_pretrained(folder / "language")
        reference.whisper.save_pretrained(folder / "whisper")
        save_file(projector(reference), folder / "model.safetensors")
        named = {"text_model_id": "language", "audio_model_id": "whisper"}
        whole = {**WHOLE, **{key: str(folder / name) for key, name in named.items()}}
        (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")


class TestUltravoxWhole(Heard):
    """All in one folder."""

    settings: ClassVar = ("llama", False)

    def save(self, reference: Any, folder: Path) -> None:
        own = {f"language_model.{k}": v for k, v in reference.language_model.state_dict().items()}
        tensors = tower(reference) | projector(reference) | own
        save_file({k: v.clone() for k, v in tensors.items()}, folder / "model.safetensors")
        text = reference.language_model.config.to_dict()
        whole = {
            **WHOLE, "projector_ln_mid": True, "audio_config": {**AUDIO, "model_type": "whisper"},
            "text_config": text, "text_model_id": "nobody/has-this",
        }  # fmt: skip
        (folder / "config.json").write_text(json.dumps(whole), encoding="utf-8")
