"""Gemma 4's processors of images and videos beside those of its library."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from test_image_processors import ProcessorConformance, array, item, picture
from test_video_processors import Conformance, Library, clip, of_file, video

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal import processor_for

VISION = {"patch_size": 4, "pooling_kernel_size": 2}
IDS = {"image_token_id": 90, "video_token_id": 91, "boi_token_id": 92, "eoi_token_id": 93}


def library(**settings: Any) -> Any:
    from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil

    return Gemma4ImageProcessorPil(**{**VISION, **settings})


def unpadded(made: Mapping[str, Any]) -> np.ndarray[Any, Any]:
    at = np.asarray(made["image_position_ids"][0])
    found: np.ndarray[Any, Any] = np.asarray(made["pixel_values"][0])[(at >= 0).all(-1)]
    return found


class TestGemma4(ProcessorConformance):
    architecture = "Gemma4ForConditionalGeneration"
    config: ClassVar = {**IDS, "vision_config": VISION}
    settings: ClassVar = ({}, {"max_soft_tokens": 70}, {"rescale_factor": 0.01, "resample": 2})

    def library(self, **settings: Any) -> Any:
        return library(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return unpadded(made)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return int(made["num_soft_tokens_per_image"][0]) + 2

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Patches of 16."""
        (tmp_path / "preprocessor_config.json").write_text("{}")
        (own,) = processor_for(self.architecture, IDS, tmp_path).process(
            [item(picture(70, 40))], {}
        )
        made = library(patch_size=16, pooling_kernel_size=3)(
            images=picture(70, 40), return_tensors="np"
        )
        np.testing.assert_allclose(array(own, "pixel_values"), unpadded(made), atol=1e-5, rtol=0)

    @pytest.mark.parametrize("size", [(3, 900), (700, 2), (61, 37)])
    def test_tokens(self, size: tuple[int, int], tmp_path: Path) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(VISION))
        (own,) = processor_for(self.architecture, self.config, tmp_path).process(
            [item(picture(*size))], {}
        )
        number = self.num_tokens(library()(images=picture(*size), return_tensors="np")) - 2
        assert own.token_ids == (92, *[90] * number, 93)
        assert own.runs == ((1, number),)
        assert array(own, "grids").prod() == 4 * number

    def test_options(self, tmp_path: Path) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(VISION))
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(90, 90))], {"max_soft_tokens": 140})
        assert own.num_tokens <= 142
        for value in (100, 560, True, "70"):
            with pytest.raises(RequestError, match="must be one of 70, 140, 280"):
                processor.process([item(picture(90, 90))], {"max_soft_tokens": value})

    @pytest.mark.parametrize("text", [{}, {"use_bidirectional_attention": "vision"}])
    def test_pictures_that_are_seen_whole(self, text: dict[str, Any], tmp_path: Path) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(VISION))
        config = {**self.config, "text_config": text}
        processor = processor_for(self.architecture, config, tmp_path)
        media = processor.process([item(picture(61, 37)), item(picture(30, 30))], {})
        placed = processor.place([5, 90, 6, 90], media)
        assert placed.token_ids == [5, *media[0].token_ids, 6, *media[1].token_ids]
        counts = [own.num_tokens - 2 for own in media]
        spans = [(2, 2 + counts[0]), (5 + counts[0], 5 + sum(counts))]
        assert list(placed.whole_spans) == (spans if text else [])

    @pytest.mark.parametrize(
        ("settings", "text", "named"),
        [({"max_soft_tokens": 100}, {}, "max_soft_tokens = 100"), ({"patch_size": 8}, {}, "patch_size = 8"),
         ({"do_resize": False}, {}, "do_resize"),
         ({}, {"use_bidirectional_attention": "vision", "sliding_window": 96}, "sliding_window = 96")],
    )  # fmt: skip
    def test_refused(self, settings: Any, text: Any, named: str, tmp_path: Path) -> None:
        (tmp_path / "preprocessor_config.json").write_text(json.dumps({**VISION, **settings}))
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, {**self.config, "text_config": text}, tmp_path)


class TestVideos(Conformance):
    architecture = "Gemma4ForConditionalGeneration"
    names = ("<|image|>", "<|video|>", "<boi>", "<eoi>")
    text = "the wheel: <|video|>runs in <|video|>\nthe water"
    settings: ClassVar = {**VISION, "max_soft_tokens": 70}
    of_images: ClassVar = VISION
    vision: ClassVar = VISION
    slack = 12 * 8

    @property
    def config(self) -> dict[str, Any]:
        begin, end = (self.ids[name] for name in self.names[2:])
        return {**super().config, "boi_token_id": begin, "eoi_token_id": end}

    def theirs(self, frames: np.ndarray[Any, Any]) -> tuple[np.ndarray[Any, Any], None]:
        made = [
            unpadded(
                library(max_soft_tokens=70)(images=Image.fromarray(frame), return_tensors="np")
            )
            for frame in frames
        ]
        return np.concatenate(made), None

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers.models.gemma4 import processing_gemma4

        made = processing_gemma4.Gemma4Processor.__new__(processing_gemma4.Gemma4Processor)
        made.image_token, made.video_token, made.boi_token, made.eoi_token = self.names
        made.video_processor = _Counted(self, videos)
        return made

    def check_runs(self, media: Sequence[ProcessedMedia]) -> None:
        super().check_runs(media)
        for own in media:
            assert array(own, "grids").prod(1).sum() // 4 == sum(number for _, number in own.runs)

    def test_images_and_videos_in_one_prompt(self, folder: Path) -> None:
        """A video's time is one text with what stands before it."""
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        items = [item(picture(40, 56)), video(clip(2, 30, 30), **of_file(2))]
        media = own.process(items, {})
        placed = own.place(tokenizer("the <|image|> and <|video|>")["input_ids"], media)
        for one, offset in zip(media, placed.offsets, strict=True):
            assert placed.token_ids[offset : offset + one.num_tokens] == list(one.token_ids)
        said = tokenizer.decode(placed.token_ids)
        assert " and 00:00 <boi>" in said
        assert "<eoi> 00:05 <boi>" in said
        for text in ("<|image|>", "<|image|> <|video|><|video|>"):
            with pytest.raises(RequestError, match="must be one for each"):
                own.place(tokenizer(text)["input_ids"], media)


class _Counted(Library):
    """With the number of vectors of a frame."""

    def __call__(self, _: Any, **__: Any) -> Any:
        made = super().__call__(_)
        counts = [len(self.own.theirs(item.data)[0]) // len(item.data) // 4 for item in self.videos]
        return {**made, "num_soft_tokens_per_video": counts}
