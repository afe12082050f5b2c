"""Qwen3-ASR beside transformers on tiny checkpoints: in its spelling, and as first published."""

from __future__ import annotations

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import HeardAlone
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

BINS, WINDOW = 11, 50
"""The library fixes a piece at 100 frames."""
ENCODER: dict[str, Any] = {
    "num_mel_bins": BINS, "d_model": 12, "encoder_layers": 2, "encoder_attention_heads": 2,
    "encoder_ffn_dim": 20, "downsample_hidden_size": 6, "output_dim": TEXT["hidden_size"],
    "n_window": WINDOW, "n_window_infer": 4 * WINDOW, "max_position_embeddings": 13,
    "model_type": "qwen3_asr_encoder",
}  # fmt: skip
FRAMES, COUNTS = (63, 430), (8, 56)


class TestQwen3ASR(HeardAlone):
    """Of less than a piece, and of several windows."""

    names_of_towers: ClassVar = ("audio_tower.", "multi_modal_projector.")

    def hf_class(self) -> Any:
        from transformers import Qwen3ASRForConditionalGeneration

        return Qwen3ASRForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen3ASRConfig

        text = {**TEXT, "model_type": "qwen3", "head_dim": 12, "tie_word_embeddings": True}
        return Qwen3ASRConfig(audio_config=ENCODER, text_config=text, audio_token_id=IMAGE)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(frames, frames, BINS)} for frames in FRAMES]

    def features(self, reference: Any, image: dict[str, Tensor]) -> Tensor:
        """The library wants whole pieces."""
        frames = image["input_features"]
        more = -len(frames) % (2 * WINDOW)
        padded = torch.nn.functional.pad(frames, (0, 0, 0, more)).t()[None]
        mask = (torch.arange(len(frames) + more) < len(frames)).long()[None]
        found: Tensor = reference.get_audio_features(padded, mask).pooler_output
        return found

    def test_vectors_of_pieces(self, model: Any) -> None:
        assert tuple(len(vectors) for vectors in self.embed(model, self.images())) == COUNTS

    def test_the_first_published_names(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """Everything is in a thinker, and the projections are the tower's."""
        names = {
            "model.audio_tower.": "thinker.audio_tower.",
            "model.multi_modal_projector.linear_1.": "thinker.audio_tower.proj1.",
            "model.multi_modal_projector.linear_2.": "thinker.audio_tower.proj2.",
            "model.language_model.": "thinker.model.",
        }
        tensors = {}
        for name, tensor in load_file(folder / "model.safetensors").items():
            [begin] = [old for old in names if name.startswith(old)]
            tensors[names[begin] + name.removeprefix(begin)] = tensor
        head = tensors["thinker.model.embed_tokens.weight"].clone()
        save_file({**tensors, "thinker.lm_head.weight": head}, tmp_path / "model.safetensors")
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        audio = {**config["audio_config"], "model_type": "qwen3_asr_audio_encoder"}
        text = {
            **config["text_config"], "model_type": "qwen3_asr_text", "rope_theta": 10_000.0,
            "rope_scaling": {
                "rope_type": "default", "mrope_interleaved": True, "mrope_section": [2, 2, 2],
            },
        }  # fmt: skip
        del text["rope_parameters"]
        thinker = {"audio_config": audio, "text_config": text, "audio_token_id": IMAGE}
        whole = {"architectures": config["architectures"], "model_type": "qwen3_asr"}
        place = tmp_path / "config.json"
        place.write_text(json.dumps({**whole, "thinker_config": thinker}), encoding="utf-8")
        model = self.load(tmp_path)
        tokens, offsets = self.prompt(COUNTS)
        found = self.forward(model, tokens, offsets, self.images(), [len(tokens)])
        expected = self.logprobs(reference, tokens, self.images())
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)
        thinker["classify_num"] = 7
        place.write_text(json.dumps({**whole, "thinker_config": thinker}), encoding="utf-8")
        with pytest.raises(UnsupportedModel, match="forced aligners"):
            self.load(tmp_path)

    def test_a_tower_of_another_size_is_refused(self, reference: Any, folder: Path) -> None:
        with pytest.raises(UnsupportedModel, match=r"output_dim = 49.*hidden_size = 48"):
            self.load(folder, hf_overrides={"audio_config": {"output_dim": 49}})
