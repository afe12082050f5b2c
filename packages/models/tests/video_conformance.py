"""Models that take videos beside transformers' on tiny checkpoints: a video alone, with images, in pieces."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import pytest
import torch
from torch import Tensor
from vision_conformance import IMAGE, VisionConformance, packed

from headrace_core import plugins
from headrace_core.model import (
    INPUT_EMBEDS,
    MROPE_POSITIONS,
    InputEmbeds,
    SupportsMRoPE,
    SupportsMultiModal,
)
from headrace_core.multimodal import MediaInput
from headrace_testing.model.decoders import PagedDriver
from headrace_testing.sampling import turns

VIDEO = 121
"""Placeholder."""
VALUES = "pixel_values_videos"


class Laid(NamedTuple):
    """A prompt, its items, and their vectors' rows."""

    tokens: list[int]
    media: list[MediaInput]
    rows: list[int]
    values: Tensor


@turns(3)
class VideoConformance(VisionConformance):
    """A subclass says besides: two videos as the model takes them. Its ``hf_inputs`` takes both kinds, in the
    order of a prompt."""

    placeholders: tuple[int, int] = (IMAGE, VIDEO)
    architecture: str = ""
    """Name of the saved class; "": that of transformers'."""

    def videos(self) -> Sequence[dict[str, Tensor]]:
        raise NotImplementedError

    def times(self, video: dict[str, Tensor]) -> int:
        """Runs that a video's tokens are cut into by text."""
        return 1

    def laid(self, model: Any, items: Sequence[dict[str, Tensor]]) -> Laid:
        """Items in a text."""
        tokens, media, rows, values = [5, 6], [], [], []
        for index, item in enumerate(items):
            modality = "video" if VALUES in item else "image"
            with torch.inference_mode():
                (vectors,) = model.embed_media(modality, [item])
            number = self.placeholders[modality == "video"]
            times = self.times(item) if modality == "video" else 1
            per, offset, runs = len(vectors) // times, len(tokens), []
            for time in range(times):
                if time:
                    tokens += [20 + time, 13]
                runs.append((len(tokens) - offset, per))
                rows += range(len(tokens), len(tokens) + per)
                tokens += [number] * per
            size = len(tokens) - offset
            media.append(MediaInput(modality, packed(item), str(index), size, offset, tuple(runs)))
            values.append(vectors)
            tokens.append(7 + index)
        return Laid([*tokens, 11, 12], media, rows, torch.cat(values))

    def in_pieces(self, model: Any, laid: Laid, pieces: Sequence[int]) -> Tensor:
        """Log-probabilities of a prompt that is computed in pieces."""
        driver, found, done = PagedDriver(model), [], 0
        axes = None
        if isinstance(model, SupportsMRoPE):
            axes = model.mrope_positions(len(laid.tokens), laid.media)
        for size in pieces:
            extra: dict[str, Any] = {}
            mine = [i for i, row in enumerate(laid.rows) if done <= row < done + size]
            if mine:
                at = torch.tensor([laid.rows[i] - done for i in mine])
                extra[INPUT_EMBEDS] = InputEmbeds(at, laid.values[mine])
            if axes is not None:
                extra[MROPE_POSITIONS] = axes[:, done : done + size]
            batch = driver.batch({"a": laid.tokens[done : done + size]})
            with torch.inference_mode():
                hidden = model.forward(replace(batch, extra=extra))
                found.append(model.compute_logits(hidden).float())
            done += size
        assert done == len(laid.tokens)
        return torch.log_softmax(torch.cat(found), dim=-1)

    def expected(
        self, reference: Any, laid: Laid, items: Sequence[dict[str, Tensor]], **more: Any
    ) -> Tensor:
        """Log-probabilities of the library's model."""
        ids = torch.tensor([laid.tokens])
        image, video = self.placeholders
        kinds = (ids == image).int() + (2 * (ids == video).int() if video != image else 0)
        given: dict[str, Any] = {"input_ids": ids, "attention_mask": torch.ones_like(ids)}
        given |= {**self.hf_inputs(items), "mm_token_type_ids": kinds, **more}
        with torch.inference_mode():
            try:
                logits = reference(**given).logits[0]
            except TypeError:
                del given["mm_token_type_ids"]
                logits = reference(**given).logits[0]
        return torch.log_softmax(logits.float(), dim=-1)

    def check(self, reference: Any, model: Any, items: Sequence[dict[str, Tensor]]) -> None:
        laid = self.laid(model, items)
        count = len(laid.tokens)
        expected = self.expected(reference, laid, items)
        for pieces in ([count], [3, 2, count - 7, 1, 1], [count // 2, count - count // 2]):
            found = self.in_pieces(model, laid, pieces)
            torch.testing.assert_close(found, expected, atol=self.tolerance, rtol=0)

    def test_it_takes_videos(self, model: Any) -> None:
        assert isinstance(model, SupportsMultiModal)
        assert tuple(model.modalities) == ("image", "video")

    def test_a_video(self, reference: Any, model: Any) -> None:
        self.check(reference, model, self.videos()[:1])

    @turns(1)
    def test_images_and_videos(self, reference: Any, model: Any) -> None:
        (image, other), (video, last) = self.images(), self.videos()
        self.check(reference, model, [image, video, other, last])

    def test_videos_do_not_see_each_other(self, model: Any) -> None:
        with torch.inference_mode():
            together = model.embed_media("video", self.videos())
            for index, video in enumerate(self.videos()):
                (alone,) = model.embed_media("video", [video])
                torch.testing.assert_close(alone, together[index], atol=1e-5, rtol=1e-5)

    def test_without_media_no_tower_is_loaded(
        self, reference: Any, folder: Any, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A processor that takes both is as if installed."""
        installed, group = plugins.installed, "headrace.multimodal_processors"
        own = dict.fromkeys([self.architecture or self.hf_class().__name__])
        monkeypatch.setattr(
            plugins, "installed", lambda name: own if name == group else installed(name)
        )
        for limits, has_tower in (({"image": 0}, True), ({"image": 0, "video": 0}, False)):
            model = self.load(folder, limit_mm_per_prompt=limits)
            assert isinstance(model, SupportsMultiModal) is has_tower
