"""The thinkers of Qwen2.5-Omni and Qwen3-Omni beside transformers on tiny checkpoints: images, videos and
recordings, each alone and all in one prompt."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import test_vision_language as language
import test_vision_qwen3_vl as qwen3
import torch
from safetensors.torch import load_file, save_file
from test_vision_language import TEXT, drawn
from test_vision_videos import SECONDS, Qwen
from torch import Tensor
from video_conformance import VALUES, VIDEO, Laid
from vision_conformance import IMAGE, packed

from headrace_core import plugins
from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.model import SupportsMultiModal
from headrace_core.multimodal import MediaInput

AUDIO, BINS, WINDOW = 122, 11, 4
FEATURES = "input_features"
START, AUDIO_START = 118, 116
"""Tokens in front of an item, which the library looks for."""


def recording(seed: int, frames: int) -> dict[str, Tensor]:
    return {FEATURES: drawn(20 + seed, frames, BINS)}


class Omni(Qwen):
    """A subclass says what recordings are, and how many vectors."""

    names_of_towers: ClassVar = ("audio_tower.", "visual.")
    seconds: ClassVar[tuple[float, float]]
    """Of two frames, of each video."""
    lengths: ClassVar[tuple[int, int]]
    counts: ClassVar[tuple[int, int]]
    """Frames and vectors of recordings."""
    processor: ClassVar[str]
    published: ClassVar[Sequence[str]]
    """Names of the whole, in which the thinker is."""
    marks: ClassVar[Mapping[str, Any]] = {
        "vision_start_token_id": START, "audio_start_token_id": AUDIO_START,
    }  # fmt: skip

    def video(self, seed: int, t: int, h: int, w: int) -> dict[str, Tensor]:
        made = super().video(seed, t, h, w)
        return {**made, SECONDS: torch.tensor([self.seconds[seed]])}

    def recordings(self) -> Sequence[dict[str, Tensor]]:
        return [recording(seed, length) for seed, length in enumerate(self.lengths)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        found = super().hf_inputs(images)
        if SECONDS in found:
            found["video_second_per_grid"] = found.pop(SECONDS)
        sounds = [item[FEATURES] for item in images if FEATURES in item]
        if sounds:
            found["input_features"] = torch.nn.utils.rnn.pad_sequence(sounds, batch_first=True)
            found["input_features"] = found["input_features"].transpose(1, 2)
            lengths = torch.tensor([[len(sound)] for sound in sounds])
            found["feature_attention_mask"] = (torch.arange(int(lengths.max())) < lengths).long()
        return found

    def laid(self, model: Any, items: Sequence[dict[str, Tensor]]) -> Laid:
        """Items in a text, each between a mark and another token."""
        tokens, media, rows, values = [5, 6], [], [], []
        for index, item in enumerate(items):
            modality = "audio" if FEATURES in item else "video" if VALUES in item else "image"
            with torch.inference_mode():
                (vectors,) = model.embed_media(modality, [item])
            tokens.append(AUDIO_START if modality == "audio" else START)
            count, offset = len(vectors), len(tokens)
            rows += range(offset, offset + count)
            media.append(MediaInput(modality, packed(item), str(index), count, offset))
            tokens += [{"image": IMAGE, "video": VIDEO, "audio": AUDIO}[modality]] * count
            tokens += [7 + index, 8 + index]
            values.append(vectors)
        return Laid([*tokens, 11, 12], media, rows, torch.cat(values))

    def prompt(self, counts: Sequence[int]) -> tuple[list[int], list[int]]:
        tokens, offsets = [5, 6], []
        for index, count in enumerate(counts):
            offsets.append(len(tokens) + 1)
            tokens += [START, *[IMAGE] * count, 7 + index]
        return [*tokens, 11, 12], offsets

    def test_it_takes_videos(self, model: Any) -> None:
        assert isinstance(model, SupportsMultiModal)
        assert set(model.modalities) == {"image", "video", "audio"}

    def test_recordings(self, reference: Any, model: Any) -> None:
        self.check(reference, model, self.recordings())

    def test_a_recording_has_as_many_vectors(self, model: Any) -> None:
        with torch.inference_mode():
            found = model.embed_media("audio", self.recordings())
        assert tuple(len(vectors) for vectors in found) == self.counts

    def test_all_in_one_prompt(self, reference: Any, model: Any) -> None:
        (image, other), (video, last), (sound, more) = (
            self.images(), self.videos(), self.recordings(),
        )  # fmt: skip
        self.check(reference, model, [sound, image, video, other, more, last])
        self.check(reference, model, [video, sound])

    def test_recordings_do_not_hear_each_other(self, model: Any) -> None:
        with torch.inference_mode():
            together = model.embed_media("audio", self.recordings())
            for index, sound in enumerate(self.recordings()):
                (alone,) = model.embed_media("audio", [sound])
                torch.testing.assert_close(alone, together[index], atol=1e-5, rtol=1e-5)

    def test_without_images_no_tower_is_loaded(self, reference: Any, folder: Path) -> None:
        """Text alone, where no processor is installed or all limits are 0."""
        model = self.load(folder, limit_mm_per_prompt={"image": 0, "video": 0, "audio": 0})
        assert not isinstance(model, SupportsMultiModal)
        tokens = [5, 6, 7, 8, 9]
        found = self.forward(model, tokens, [], [], [5])
        torch.testing.assert_close(
            found, self.logprobs(reference, tokens, []), atol=self.tolerance, rtol=0
        )

    def test_without_media_no_tower_is_loaded(
        self, reference: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each tower goes with its modalities; what is left is as it was."""
        installed, group = plugins.installed, "headrace.multimodal_processors"
        own = dict.fromkeys([self.processor])
        monkeypatch.setattr(
            plugins, "installed", lambda name: own if name == group else installed(name)
        )
        for limits, left, items in (
            ({"audio": 0}, {"image", "video"}, [self.images()[0], self.videos()[1]]),
            ({"image": 0, "video": 0}, {"audio"}, self.recordings()),
            ({"image": 0}, {"image", "video", "audio"}, [self.recordings()[1], self.videos()[0]]),
        ):
            model = self.load(folder, limit_mm_per_prompt=limits)
            assert set(model.modalities) == left
            assert hasattr(model, "audio_tower") == ("audio" in left)
            assert hasattr(model, "visual") == ("image" in left)
            self.check(reference, model, items)

    def test_the_published_names(self, reference: Any, folder: Path, tmp_path: Path) -> None:
        """The thinker's tensors and config under a name of their own, beside what speaks."""
        stored = load_file(folder / "model.safetensors")
        tensors = {f"thinker.{key}": tensor for key, tensor in stored.items()}
        tensors["talker.model.embed_tokens.weight"] = torch.zeros(3)
        tensors |= {"token2wav.x": torch.zeros(2), "code2wav.x": torch.zeros(2)}
        assert "thinker.visual.merger.ln_q.weight" in tensors
        assert "thinker.audio_tower.ln_post.weight" in tensors
        save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
        thinker = json.loads((folder / "config.json").read_text())
        for name in self.published:
            whole = {"architectures": [name], "model_type": "omni", "thinker_config": thinker}
            (tmp_path / "config.json").write_text(json.dumps(whole))
            items = [self.recordings()[0], self.images()[0]]
            self.check(reference, self.load(tmp_path), items)

    @pytest.mark.parametrize(
        ("part", "key"),
        [("audio_config", "n_window"), ("audio_config", "d_model"), ("vision_config", "num_heads")],
    )
    def test_odd_sizes_are_refused(self, reference: Any, folder: Path, part: str, key: str) -> None:
        """Before memory is asked for."""
        with pytest.raises(UnsupportedModel):
            self.load(folder, hf_overrides={part: {key: 10**9}})

    def test_videos_that_are_too_long_together_are_refused(self, model: Any) -> None:
        """Places behind the rotary table."""
        (video, _) = self.videos()
        laid = self.laid(model, [{**video, SECONDS: torch.tensor([40.0])}])
        with pytest.raises(RequestError, match=r"places in time for \d+ tokens: at most"):
            model.mrope_positions(len(laid.tokens), laid.media)

    def test_a_tower_of_another_size_is_refused(self, reference: Any, folder: Path) -> None:
        overrides = {"audio_config": {"output_dim": TEXT["hidden_size"] + 1}}
        with pytest.raises(UnsupportedModel, match=r"output_dim = 49.*hidden_size = 48"):
            self.load(folder, hf_overrides=overrides)


class TestQwen2_5Omni(Omni, language.TestQwen2_5VL):
    """Recordings of whole pieces, and of an odd number of states, of which the last is in no pair. Two frames
    are ten places and more."""

    shapes: ClassVar = ((2, 8, 6), (3, 12, 2))
    seconds: ClassVar = (0.4, 0.9)
    lengths: ClassVar = (4 * WINDOW, 5 * WINDOW + 1)
    counts: ClassVar = (4, 5)
    processor: ClassVar = "Qwen2_5OmniForConditionalGeneration"
    published: ClassVar = ("Qwen2_5OmniModel", "Qwen2_5OmniForConditionalGeneration")

    def hf_class(self) -> Any:
        from transformers import Qwen2_5OmniThinkerForConditionalGeneration

        return Qwen2_5OmniThinkerForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen2_5OmniThinkerConfig

        theirs = super().hf_config().to_dict()
        audio = {
            "num_mel_bins": BINS, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40, "max_source_positions": 30, "n_window": WINDOW,
            "output_dim": TEXT["hidden_size"],
        }  # fmt: skip
        rope = {"rope_type": "default", "mrope_section": [1, 2, 3], "rope_theta": 10_000.0}
        vision = {**theirs["vision_config"], "model_type": "qwen2_5_omni_vision_encoder"}
        return Qwen2_5OmniThinkerConfig(
            audio_config=audio, vision_config=vision, text_config={**TEXT, "rope_parameters": rope},
            image_token_index=IMAGE, video_token_index=VIDEO, audio_token_index=AUDIO, **self.marks,
        )  # fmt: skip


class TestQwen3Omni(Omni, qwen3.Qwen3VL):
    """Recordings of more than a piece, whose last piece the library fills up as far in a batch as alone. In
    two pieces all states see each other."""

    shapes: ClassVar = ((2, 4, 6), (3, 8, 2))
    seconds: ClassVar = (1.0, 2.0)
    lengths: ClassVar = (130, 215)
    counts: ClassVar = (17, 28)
    processor: ClassVar = "Qwen3OmniMoeForConditionalGeneration"
    published: ClassVar = ("Qwen3OmniMoeForConditionalGeneration",)

    def hf_class(self) -> Any:
        from transformers import Qwen3OmniMoeThinkerForConditionalGeneration

        return Qwen3OmniMoeThinkerForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Qwen3OmniMoeThinkerConfig

        audio = {
            "num_mel_bins": BINS, "d_model": 24, "encoder_layers": 2, "encoder_attention_heads": 2,
            "encoder_ffn_dim": 40, "n_window": 50, "n_window_infer": 200, "downsample_hidden_size": 6,
            "output_dim": TEXT["hidden_size"],
        }  # fmt: skip
        text = {
            **self.text(), "max_position_embeddings": 256, "num_experts": 4, "num_experts_per_tok": 2,
            "moe_intermediate_size": 24,
        }  # fmt: skip
        return Qwen3OmniMoeThinkerConfig(
            audio_config=audio, vision_config=self.vision_config(), text_config=text,
            image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=AUDIO,
            position_id_per_seconds=13, **self.marks,
        )  # fmt: skip

    def test_a_recording_of_less_than_a_piece(self, reference: Any, model: Any) -> None:
        self.check(reference, model, [recording(3, 45), self.images()[0]])
