"""Molmo 2 beside transformers: crops of images that see each other across text, and frames of videos."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from test_vision_language import TEXT, drawn
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance

from headrace_core.errors import UnsupportedModel
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_testing.model.decoders import PagedDriver
from headrace_testing.model.published_molmo2 import of_images, published_molmo2

ANSWERS, MORE, PATCH, SIDE, SIZE = 100, 28, 7, 4, 24
SHARED = {"hidden_size": SIZE, "num_attention_heads": 2, "num_key_value_heads": 2, "head_dim": 12}
VISION: dict[str, Any] = {
    **SHARED, "intermediate_size": 36, "num_hidden_layers": 4, "image_size": [SIDE * PATCH] * 2,
    "patch_size": PATCH,
}  # fmt: skip


def picture(seed: int, crops: int, squares: Sequence[Sequence[int]]) -> dict[str, Tensor]:
    return {
        "pixel_values": drawn(seed, crops, SIDE**2, 3 * PATCH**2),
        "squares": torch.tensor(squares),
        "patch_token": torch.tensor([IMAGE]),
    }


class TestMolmo2(VisionConformance):
    sees_whole = True
    text: ClassVar[dict[str, Any]] = {}
    layers: ClassVar[list[int]] = [2, -4]

    def hf_class(self) -> Any:
        return published_molmo2()

    def hf_config(self) -> Any:
        from transformers import Molmo2Config

        text = {
            **TEXT, "vocab_size": ANSWERS, "additional_vocab_size": MORE, "head_dim": 12,
            "rms_norm_eps": 1e-5, **self.text,
        }  # fmt: skip
        adapter = {
            **SHARED, "vision_feature_layer": self.layers, "intermediate_size": 40,
            "text_hidden_size": TEXT["hidden_size"],
        }  # fmt: skip
        return Molmo2Config(
            text_config=text, vision_config=VISION, adapter_config=adapter, image_patch_id=IMAGE
        )

    def images(self) -> Sequence[dict[str, Tensor]]:
        """Of three crops and of two; some squares go over an edge, and not all patches are read."""
        return [
            picture(
                3,
                3,
                [[0, 1, 4, 5], [-1, 2, -1, 6], [16, 17, 20, 21], [47, -1, -1, -1], [3, 7, 40, 41]],
            ),
            picture(2, 2, [[0, 1, 4, 5], [8, 9, 12, 13], [31, 30, 29, 28]]),
        ]

    def hf_inputs(self, images: Sequence[dict[str, Tensor]]) -> dict[str, Any]:
        return dict(of_images(images))

    def forward(self, *arguments: Any) -> Tensor:
        """Tokens that are never answers have no logits there."""
        found = super().forward(*arguments)
        assert float(found[:, ANSWERS:].max()) < -1e4
        return found[:, :ANSWERS]

    def last_keys(self, spans: Sequence[tuple[int, int]], first: int, number: int) -> Tensor:
        """That of the last image, for all."""
        last = torch.arange(first, first + number, dtype=torch.int32)
        for begin, end in spans:
            own = torch.arange(first, first + number)
            last[(own >= begin) & (own < end)] = spans[-1][1] - 1
        return last

    def borders(self, offsets: Sequence[int]) -> Sequence[int]:
        return offsets[:1]

    def test_images_see_each_other(self, model: Any) -> None:
        """And the text between them none that is behind it."""
        images = self.images()
        tokens, offsets = self.prompt([len(v) for v in self.embed(model, images)])
        changed = [images[0], {**images[1], "pixel_values": images[1]["pixel_values"].flip(0, -1)}]
        first, second = (
            self.forward(model, tokens, offsets, given, [len(tokens)])
            for given in (images, changed)
        )
        moved = (first - second).abs().amax(dim=1) > 1e-6
        end = offsets[0] + len(self.images()[0]["squares"])
        assert moved[offsets[0] : end].all()
        assert not moved[: offsets[0]].any()

    def test_frames_of_videos(self, reference: Any, model: Any) -> None:
        """Nine patches a square, with times between the frames."""
        number = SIDE**2
        squares = [[0, 1, 2, 4, 5, 6, 8, 9, 10], [3, 7, 11, -1, -1, -1, -1, -1, -1]]
        every = torch.tensor(
            [[p if p < 0 else p + f * number for p in own] for f in range(3) for own in squares]
        )
        film = {
            "pixel_values_videos": drawn(7, 3, number, 3 * PATCH**2),
            "squares": every,
            "patch_token": torch.tensor([IMAGE]),
        }
        tokens = [5, 6, IMAGE, IMAGE, 7, 8, IMAGE, IMAGE, 9, IMAGE, IMAGE, 11, 12]
        ids = torch.tensor([tokens])
        at = (ids[0] == IMAGE).nonzero().flatten()
        driver, last = PagedDriver(model), torch.arange(len(tokens), dtype=torch.int32)
        last[at] = at[-1].int()
        batch = driver.prepared(replace(driver.batch({"a": tokens}), last_keys=last))
        with torch.inference_mode():
            (vectors,) = model.embed_media("video", [film])
            batch = replace(batch, extra={INPUT_EMBEDS: InputEmbeds(at, vectors)})
            found = model.compute_logits(model.forward(batch))[:, :ANSWERS]
            expected = reference(
                input_ids=ids,
                attention_mask=torch.ones_like(ids),
                mm_token_type_ids=(ids == IMAGE).int(),
                pixel_values_videos=film["pixel_values_videos"],
                video_token_pooling=every,
                video_grids=torch.tensor([[3, 1, 2]]),
            ).logits[0]
        torch.testing.assert_close(
            found.log_softmax(-1), expected.log_softmax(-1), atol=self.tolerance, rtol=0
        )

    def test_published_names_of_settings(
        self, reference: Any, folder: Path, tmp_path: Path
    ) -> None:
        """The tower under ``vit_config``, with more blocks than there are weights for."""
        config = json.loads((folder / "config.json").read_text())
        vision, adapter = config.pop("vision_config"), config["adapter_config"]
        vision["image_default_input_size"] = vision.pop("image_size")
        vision["image_patch_size"] = vision.pop("patch_size")
        adapter["vit_layers"] = [layer % 4 for layer in self.layers]
        del adapter["vision_feature_layer"]
        config["vit_config"] = vision
        (tmp_path / "config.json").write_text(json.dumps(config))
        (tmp_path / "model.safetensors").symlink_to(folder / "model.safetensors")
        own, other = (self.embed(self.load(path), self.images()) for path in (folder, tmp_path))
        torch.testing.assert_close(own, other, atol=0, rtol=0)

    @pytest.mark.parametrize(
        ("part", "changed", "words"),
        [
            ("adapter_config", {"vision_feature_layer": [4]}, r"vit_layers = \[4\]"),
            ("adapter_config", {"pooling_attention_mask": False}, "pooling_attention_mask"),
            ("vision_config", {"num_key_value_heads": 1}, "num_key_value_heads"),
            ("text_config", {"rope_scaling_layers": [9]}, r"rope_scaling_layers = \[9\]"),
            ("text_config", {"qk_norm_type": "none"}, "qk_norm_type"),
            ("text_config", {"additional_vocab_size": 0}, "those that mark images"),
        ],
    )
    def test_what_is_refused(
        self,
        part: str,
        changed: dict[str, Any],
        words: str,
        reference: Any,
        folder: Path,
        tmp_path: Path,
    ) -> None:
        with pytest.raises(UnsupportedModel, match=words):
            self.load(self.with_config(folder, tmp_path, **{part: changed}))


class TestMolmo2OfOlmo(TestMolmo2):
    """Norms behind layers and over all heads; angles are stretched in one layer of two."""

    text: ClassVar[dict[str, Any]] = {
        "qk_norm_type": "olmo", "norm_after": True, "rope_scaling_layers": [1],
        "rope_parameters": {"rope_type": "yarn", "rope_theta": 10_000.0, "factor": 4.0,
                            "original_max_position_embeddings": 32},
    }  # fmt: skip
    layers: ClassVar[list[int]] = [3, 1]
