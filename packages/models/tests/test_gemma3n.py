"""Gemma 3n with images and recordings beside transformers on a tiny checkpoint. Its tower of images, which
needs timm there, is a plain reading of that library's."""

from __future__ import annotations

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

from headrace_core import plugins
from headrace_core.errors import UnsupportedModel
from headrace_models.families.omni import gemma3n
from headrace_models.layers.convolutional import mobilenet_v5
from headrace_models.layers.convolutional.mobilenet_v5 import Edge, Inverted, Query, Table
from headrace_testing.model.plain.mobilenet_v5 import gemma3n_sees, tame

BINS, PLACES = 10, 6
PIXELS = "pixel_values"
FIRST_IMAGE, FIRST_SOUND = 112, 120
SEEN = FIRST_IMAGE + 1
"""Placeholder of an image."""
AUDIO: dict[str, Any] = {
    "vocab_size": 11, "vocab_offset": FIRST_SOUND, "input_feat_size": BINS, "hidden_size": 16,
    "conf_attention_chunk_size": 4, "conf_attention_context_left": 4, "conf_attention_context_right": 1,
    "conf_num_attention_heads": 2, "conf_num_hidden_layers": 2, "conf_attention_logit_cap": 2.0,
    "sscp_conv_channel_size": [6, 4], "gradient_clipping": 5.0,
}  # fmt: skip
VISION: dict[str, Any] = {
    "vocab_size": 8, "vocab_offset": FIRST_IMAGE, "hidden_size": 12, "architecture": "tiny",
}  # fmt: skip
TABLE = Table(
    8,
    (
        (Edge(8, 2), Edge(8)),
        (Inverted(16, 3, 6, 5, 2), Inverted(16, 5)),
        (Inverted(24, 5, 6, 5, 2), Query(3, 8, 2), Inverted(24, expansion=1)),
        (Inverted(32, 5, 6, 5, 2), Query(2, 8), Inverted(32, expansion=2)),
    ),
)
SIDE = 2
GEMMA: dict[str, Any] = {
    **TEXT, "vocab_size_per_layer_input": FIRST_IMAGE, "hidden_size_per_layer_input": 8, "head_dim": 12,
    "num_hidden_layers": 3, "num_kv_shared_layers": 1, "laurel_rank": 4, "sliding_window": 9,
    "layer_types": ["sliding_attention", "full_attention", "full_attention"],
    "activation_sparsity_pattern": None,
}  # fmt: skip


class TestGemma3n(Heard):
    """Of 9 and of 20 states before every fourth is taken: blocks of four that are not whole."""

    takes: ClassVar = ("image", "audio")
    names_of_towers: ClassVar = (
        "model.audio_tower.", "model.embed_audio.", "model.vision_tower.", "model.embed_vision.",
    )  # fmt: skip

    @pytest.fixture(scope="class", autouse=True)
    @staticmethod
    def stand_in() -> Iterator[None]:
        sees = gemma3n_sees(TABLE, VISION["hidden_size"], SIDE)
        with sees, pytest.MonkeyPatch.context() as patch:
            patch.setattr(mobilenet_v5, "TABLES", {**mobilenet_v5.TABLES, "tiny": TABLE})
            patch.setattr(gemma3n, "TABLES", mobilenet_v5.TABLES)
            yield

    def hf_class(self) -> Any:
        return transformers.Gemma3nForConditionalGeneration

    def hf_config(self) -> Any:
        return transformers.Gemma3nConfig(
            audio_config=AUDIO, vision_config=VISION, text_config=GEMMA, audio_token_id=IMAGE,
            image_token_id=SEEN, audio_soft_tokens_per_image=PLACES,
            vision_soft_tokens_per_image=SIDE**2,
        )  # fmt: skip

    def save(self, reference: Any, folder: Path) -> None:
        """The tower's numbers are tame."""
        tame(reference.model.vision_tower)
        super().save(reference, folder)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(frames, frames, BINS)} for frames in (33, 79)]

    def embed(self, model: Any, images: Sequence[dict[str, Tensor]]) -> list[Tensor]:
        kinds = ["image" if PIXELS in item else "audio" for item in images]
        with torch.inference_mode():
            return [
                model.embed_media(kind, [item])[0] for kind, item in zip(kinds, images, strict=True)
            ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        """Recordings are those that :meth:`logprobs` computes one by one."""
        pixels = [item[PIXELS] for item in images if PIXELS in item]
        sounds = [item for item in images if PIXELS not in item]
        found: dict[str, Any] = {PIXELS: torch.stack(pixels)} if pixels else {}
        if sounds:
            mask = torch.ones(1, 1, dtype=torch.bool)
            found |= {"input_features": sounds, "input_features_mask": mask}
        return found

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

    def test_images_beside_recordings(self, reference: Any, model: Any) -> None:
        sound, other = self.images()
        first, second = ({PIXELS: drawn(40 + i, 3, 96, 96).sigmoid()} for i in range(2))
        items = [first, sound, second, other]
        tokens, offsets = [5, 6], []
        for index, item in enumerate(items):
            offsets.append(len(tokens))
            place = [SEEN] * SIDE**2 if PIXELS in item else [IMAGE] * PLACES
            tokens += [*place, 7 + index]
        found = self.forward(model, tokens, offsets, items, [4, len(tokens) - 4])
        expected = self.logprobs(reference, tokens, items)
        # The tower's vectors are equal to 2e-5; the decoder makes ten times as much of it.
        torch.testing.assert_close(found, expected, atol=5e-4, rtol=0)

    def test_vectors_of_images(self, reference: Any, model: Any) -> None:
        pixels = drawn(40, 3, 96, 96).sigmoid()
        (found,) = self.embed(model, [{PIXELS: pixels}])
        with torch.inference_mode():
            expected = reference.model.get_image_features(pixels[None]).pooler_output[0]
        torch.testing.assert_close(found, expected, atol=5e-5, rtol=0)

    def test_each_tower_goes_with_its_modality(
        self, reference: Any, folder: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        installed, own = plugins.installed, dict.fromkeys(["Gemma3nForConditionalGeneration"])
        group = "headrace.multimodal_processors"
        monkeypatch.setattr(
            plugins, "installed", lambda name: own if name == group else installed(name)
        )
        tokens = [5, 6, *[IMAGE] * PLACES, 8]
        expected = self.logprobs(reference, tokens, self.images()[:1])
        model = self.load(folder, limit_mm_per_prompt={"image": 0})
        assert list(model.modalities) == ["audio"]
        found = self.forward(model, tokens, [2], self.images()[:1], [len(tokens)])
        torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)
        assert list(self.load(folder, limit_mm_per_prompt={"audio": 0}).modalities) == ["image"]

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
            ({"architecture": "resnet50"}, "architecture = 'resnet50'"),
        ],
    )
    def test_refused(
        self, reference: Any, folder: Path, tmp_path: Path, change: dict[str, Any], words: str
    ) -> None:
        config = json.loads((folder / "config.json").read_text(encoding="utf-8"))
        config["vision_config" if "architecture" in change else "audio_config"] |= change
        (tmp_path / "config.json").write_text(json.dumps(config), encoding="utf-8")
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match=words):
            self.load(tmp_path)
