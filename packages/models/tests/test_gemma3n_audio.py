"""Gemma 3n with recordings beside transformers on a tiny checkpoint; its tower of images, which needs timm,
is a stand-in that no token reaches."""

from __future__ import annotations

import importlib
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any, ClassVar

import pytest
import torch
import transformers
from audio_conformance import Heard
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE

from headrace_core.errors import UnsupportedModel

BINS, PLACES = 10, 6
FIRST_IMAGE, FIRST_SOUND = 112, 120
AUDIO: dict[str, Any] = {
    "vocab_size": 11, "vocab_offset": FIRST_SOUND, "input_feat_size": BINS, "hidden_size": 16,
    "conf_attention_chunk_size": 4, "conf_attention_context_left": 4, "conf_attention_context_right": 1,
    "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2, "conf_attention_logit_cap": 2.0,
    "sscp_conv_channel_size": [6, 4], "gradient_clipping": 5.0,
}  # fmt: skip
VISION = {"vocab_size": 8, "vocab_offset": FIRST_IMAGE, "hidden_size": 12}
GEMMA: dict[str, Any] = {
    **TEXT, "vocab_size_per_layer_input": FIRST_IMAGE, "hidden_size_per_layer_input": 8, "head_dim": 12,
    "num_hidden_layers": 3, "num_kv_shared_layers": 1, "laurel_rank": 4, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "activation_sparsity_pattern": None,
}  # fmt: skip


class _AutoModel:
    @staticmethod
    def from_config(config: Any) -> Any:
        if type(config).__name__ == "Gemma3nVisionConfig":
            return torch.nn.Linear(2, 2)
        return transformers.AutoModel.from_config(config)


class TestGemma3nAudio(Heard):
    """Of 9 and of 20 states before every fourth is taken: blocks of four that are not whole."""

    names_of_towers: ClassVar = ("model.audio_tower.", "model.embed_audio.", "model.embed_vision.")

    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def stand_in() -> Iterator[None]:
        module = importlib.import_module("transformers.models.gemma3n.modeling_gemma3n")
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(module, "AutoModel", _AutoModel)
            yield

    def hf_class(self) -> Any:
        return transformers.Gemma3nForConditionalGeneration

    def hf_config(self) -> Any:
        return transformers.Gemma3nConfig(
            audio_config=AUDIO, vision_config=VISION, text_config=GEMMA, audio_token_id=IMAGE,
            image_token_id=FIRST_IMAGE + 1, audio_soft_tokens_per_image=PLACES,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(frames, frames, BINS)} for frames in (33, 79)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """Which :meth:`logprobs` computes one by one."""
        return {"input_features": images, "input_features_mask": torch.ones(1, 1, dtype=torch.bool)}

    def logprobs(self, reference: Any, tokens: list[int], images: Any) -> Tensor:
        inner = type(reference.model).get_audio_features

        def alone(clips: Any, *_: Any, **__: Any) -> Any:
            """A clip by itself, where the library hears what fills up shorter ones."""
            found, masks = [], []
            for clip in clips:
                frames = clip["input_features"][None]
                heard = torch.zeros(frames.shape[:2], dtype=torch.bool)
                vectors = inner(reference.model, frames, heard).pooler_output[0]
                more = PLACES - len(vectors)
                found.append(torch.nn.functional.pad(vectors, (0, 0, 0, more)))
                masks.append(torch.arange(PLACES) >= len(vectors))
            return SimpleNamespace(
                pooler_output=torch.stack(found), audio_mel_mask=torch.stack(masks)
            )

        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(reference.model, "get_audio_features", alone, raising=False)
            return super().logprobs(reference, tokens, images)

    def test_places_of_a_clip(self, model: Any) -> None:
        """Those behind the recording all have the vector of the last token."""
        short, long = self.embed(model, self.images())
        assert len(short) == len(long) == PLACES
        torch.testing.assert_close(short[3:], short[-1:].expand(3, -1))
        torch.testing.assert_close(long[-1], short[-1])
        assert float((short[2] - short[3]).abs().max()) > 1e-3

    def test_tokens_of_other_modalities(self, reference: Any, model: Any) -> None:
        """Such as those that end an image or a recording: from tables of the towers."""
        tokens = [5, FIRST_IMAGE, 6, FIRST_IMAGE + 7, FIRST_SOUND + 1, 7, FIRST_SOUND + 10, 9]
        found = self.forward(model, tokens, [], [], [3, len(tokens) - 3])
        expected = self.logprobs(reference, tokens, [])
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    @pytest.mark.parametrize(
        ("change", "words"),
        [
            ({"sscp_conv_stride_size": [[2, 2], [1, 2]]}, "sscp_conv_stride_size"),
            ({"vocab_offset": 119}, "must hold the last token"),
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
