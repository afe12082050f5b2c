"""Gemma 4 beside transformers: pictures of any grid, layers' own inputs, pictures whose tokens see each
other in layers with a window."""

from __future__ import annotations

import itertools
import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from audio_conformance import Heard
from test_vision_language import TEXT, drawn
from torch import Tensor
from video_conformance import VALUES, VIDEO, Laid, VideoConformance
from vision_conformance import IMAGE, last_keys

from headrace_core.errors import UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_testing.model.decoders import PagedDriver

VISION: dict[str, Any] = {
    "hidden_size": 36, "intermediate_size": 50, "num_hidden_layers": 2, "num_attention_heads": 3,
    "num_key_value_heads": 3, "head_dim": 16, "patch_size": 4, "pooling_kernel_size": 2,
    "position_embedding_size": 16,
}  # fmt: skip


def pictures(seed: int, *grids: tuple[int, int]) -> tuple[Tensor, Tensor]:
    """Patches of pictures, from 0 to 1, and their grids."""
    count = sum(rows * columns for rows, columns in grids)
    return drawn(seed, count, 48).sigmoid(), torch.tensor(grids)


def padded(patches: Tensor, grids: Tensor) -> tuple[Tensor, Tensor]:
    """As the library has them: all of one number of patches, with the places of each."""
    most, values, places = 36, [], []
    for (rows, columns), own in zip(
        grids.tolist(), torch.split(patches, grids.prod(1).tolist()), strict=True
    ):
        y, x = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        at = torch.stack((x, y), dim=-1).view(-1, 2)
        more = most - len(own)
        values.append(torch.nn.functional.pad(own, (0, 0, 0, more)))
        places.append(torch.nn.functional.pad(at, (0, 0, 0, more), value=-1))
    return torch.stack(values), torch.stack(places)


def bound_all(reference: Any) -> None:
    for name, bound in reference.named_buffers():
        if name.endswith(("_min", "_max")):
            bound.fill_(-1.5 if name.endswith("_min") else 1.25)


class Gemma4(VideoConformance):
    tolerance: ClassVar = 2e-4  # its factor of embeddings enlarges rounding, too
    vision: ClassVar[dict[str, Any]] = {}
    text: ClassVar[dict[str, Any]] = {"hidden_size_per_layer_input": 6, "num_kv_shared_layers": 2}

    def hf_class(self) -> Any:
        from transformers import Gemma4ForConditionalGeneration

        return Gemma4ForConditionalGeneration

    def hf_config(self) -> Any:
        from transformers import Gemma4Config

        text = {
            **TEXT, "num_hidden_layers": 4, "head_dim": 12, "global_head_dim": 16, "sliding_window": 24,
            "vocab_size_per_layer_input": 131,
            "layer_types": ["sliding_attention", "full_attention"] * 2, **self.text,
        }  # fmt: skip
        return Gemma4Config(
            vision_config={**VISION, **self.vision}, text_config=text, audio_config=None,
            image_token_id=IMAGE, video_token_id=VIDEO, audio_token_id=122, boi_token_id=123,
            eoi_token_id=124,
        )  # fmt: skip

    def images(self) -> Sequence[dict[str, Tensor]]:
        made = [pictures(1, (4, 6)), pictures(2, (6, 2))]
        return [{"pixel_values": patches, "grids": grids} for patches, grids in made]

    def videos(self) -> Sequence[dict[str, Tensor]]:
        made = [pictures(3, (4, 2), (4, 2)), pictures(4, (2, 4))]
        return [{VALUES: patches, "grids": grids} for patches, grids in made]

    def times(self, video: dict[str, Tensor]) -> int:
        return len(video["grids"])

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        stills = [padded(own["pixel_values"], own["grids"]) for own in images if VALUES not in own]
        films = [padded(own[VALUES], own["grids"]) for own in images if VALUES in own]
        if stills:
            values, at = (torch.cat(part) for part in zip(*stills, strict=True))
            found |= {"pixel_values": values, "image_position_ids": at}
        if films:
            values, at = (torch.cat(part) for part in zip(*films, strict=True))
            counts = torch.tensor([len(own[0]) for own in films])
            found |= {VALUES: values, "video_position_ids": at, "num_frames_per_video": counts}
        return found


class TestGemma4(Gemma4):
    def test_heads_that_do_not_turn_are_refused(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        config = json.loads((folder / "config.json").read_text())
        config["vision_config"]["head_dim"] = 18
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        with pytest.raises(UnsupportedModel, match="heads of 18 numbers"):
            self.load(tmp_path)


class TestGemma4OfLargeModels(Gemma4):
    """Standardised and bounded; no inputs of layers' own."""

    sees_whole: ClassVar = True
    vision: ClassVar = {"standardize": True, "use_clipped_linears": True}
    text: ClassVar = {
        "hidden_size_per_layer_input": 0,
        "use_bidirectional_attention": "vision",
        "attention_k_eq_v": True,
        "num_global_key_value_heads": 1,
    }

    def save(self, reference: Any, folder: Path) -> None:
        """With bounds that some numbers are beyond."""
        bound_all(reference)
        super().save(reference, folder)

    def in_pieces(self, model: Any, laid: Laid, pieces: Sequence[int]) -> Tensor:
        """Cut between pictures only."""
        spans = [
            (own.offset + first, own.offset + first + number)
            for own in laid.media
            for first, number in own.runs
        ]
        driver, found, count = PagedDriver(model), [], len(laid.tokens)
        borders = [0, 1, *(begin for begin, _ in spans), count - 1, count]
        for done, end in itertools.pairwise(borders):
            batch = driver.batch({"a": laid.tokens[done:end]})
            batch = driver.prepared(replace(batch, last_keys=last_keys(spans, done, end - done)))
            mine = [i for i, row in enumerate(laid.rows) if done <= row < end]
            extra: dict[str, Any] = {}
            if mine:
                at = torch.tensor([laid.rows[i] - done for i in mine])
                extra[INPUT_EMBEDS] = InputEmbeds(at, laid.values[mine])
            with torch.inference_mode():
                hidden = model.forward(replace(batch, extra=extra))
                found.append(model.compute_logits(hidden).float())
        return torch.log_softmax(torch.cat(found), dim=-1)


AUDIO: dict[str, Any] = {
    "hidden_size": 16, "num_hidden_layers": 2, "num_attention_heads": 2, "attention_chunk_size": 4,
    "attention_context_left": 5, "attention_logit_cap": 2.0, "subsampling_conv_channels": [8, 6],
    "gradient_clipping": 5.0, "output_proj_dims": 20,
}  # fmt: skip


class TestGemma4Hears(Heard):
    """Recordings of whole chunks and of more, with bounds that some numbers are beyond; pictures beside
    them."""

    tolerance: ClassVar = 2e-4
    takes: ClassVar = ("image", "video", "audio")
    gemma: ClassVar = Gemma4()

    def hf_class(self) -> Any:
        return self.gemma.hf_class()

    def hf_config(self) -> Any:
        from transformers import Gemma4AudioConfig

        config = self.gemma.hf_config()
        config.audio_config = Gemma4AudioConfig(**AUDIO)
        config.audio_token_id, config.image_token_id = IMAGE, 122
        return config

    def save(self, reference: Any, folder: Path) -> None:
        bound_all(reference)
        super().save(reference, folder)

    def images(self) -> Sequence[dict[str, Tensor]]:
        return [{"input_features": drawn(frames, frames, 8)} for frames in (33, 64)]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        features = [item["input_features"] for item in images]
        longest = max(map(len, features))
        frames = [torch.nn.functional.pad(x, (0, 0, 0, longest - len(x))) for x in features]
        masks = [torch.arange(longest) < len(x) for x in features]
        return {"input_features": torch.stack(frames), "input_features_mask": torch.stack(masks)}
