"""Video processors beside the checkpoints' own library.

The library's video processors need torchvision. So frames are compared one by one with its image processors
on Pillow, at the size that its formulas give; and prompts with its processors of prompts, which get these
frames.
"""

from __future__ import annotations

import importlib
import json
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from speech_checkpoints import save_tokenizer
from test_image_processors import array, item, picture
from transformers import BatchFeature, PreTrainedTokenizerFast, Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem, ProcessedMedia
from headrace_multimodal import content_hash, processor_for
from headrace_multimodal.video.number_words import in_words

VALUES = "pixel_values_videos"
Array = np.ndarray[Any, Any]
METADATA = {"fps": 7.5, "total_num_frames": 40, "duration": 40 / 7.5}


def clip(count: int, height: int, width: int) -> Array:
    return np.random.default_rng(count).integers(0, 256, (count, height, width, 3), np.uint8)


def video(frames: Array, **metadata: Any) -> MediaItem:
    return MediaItem("video", frames, content_hash("video", frames, metadata), metadata)


def of_file(count: int) -> dict[str, Any]:
    """What is known of so many frames of a file."""
    return {**METADATA, "frames_indices": np.linspace(0, 39, count).astype(int).tolist()}


class Library:
    """In place of a video processor: frames by an image processor.

    Args:
        of_frame: frame [height, width, 3] -> numbers.
    """

    temporal_patch_size, merge_size, model_input_names = 2, 2, (VALUES,)

    def __init__(self, own: Any, videos: Sequence[MediaItem]) -> None:
        self.own, self.videos = own, list(videos)

    def __call__(self, _: Any, **__: Any) -> BatchFeature:
        made = [self.own.theirs(item.data) for item in self.videos]
        known = [
            VideoMetadata(
                total_num_frames=item.metadata.get("total_num_frames", len(item.data)),
                fps=item.metadata.get("fps"),
                duration=item.metadata.get("duration"),
                frames_indices=item.metadata.get("frames_indices", list(range(len(item.data)))),
            )
            for item in self.videos
        ]
        grids = [grid for _, grid in made]
        values = [values for values, _ in made]
        data = {VALUES: values, "video_metadata": known, "pixel_values": values[0][None]}
        return BatchFeature({**data, **({"video_grid_thw": np.array(grids)} if grids[0] else {})})


class Conformance:
    architecture: ClassVar[str]
    names: ClassVar[tuple[str, ...]]
    """Special tokens; those of an image and of a video come first."""
    text: ClassVar[str]
    extra: ClassVar[Mapping[str, str]] = {}
    shapes: ClassVar[Sequence[tuple[int, int, int]]] = ((4, 61, 37), (3, 64, 64), (8, 31, 90))
    settings: ClassVar[Mapping[str, Any]]
    of_images: ClassVar[Mapping[str, Any]] = {}
    """Settings of the processors of videos and of images."""
    vision: ClassVar[Mapping[str, Any]]

    def theirs(self, frames: Array) -> tuple[Array, tuple[int, int, int] | None]:
        """Numbers of a video by the library, and its grid."""
        raise NotImplementedError

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        raise NotImplementedError

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        self.ids = save_tokenizer(tmp_path, ("<|endoftext|>", *self.names))
        (tmp_path / "tokenizer_config.json").write_text(
            json.dumps({"extra_special_tokens": dict(self.extra)})
        )
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(self.of_images))
        (tmp_path / "video_preprocessor_config.json").write_text(json.dumps(self.settings))
        return tmp_path

    @property
    def config(self) -> dict[str, Any]:
        image, film = (self.ids[name] for name in self.names[:2])
        return {"image_token_id": image, "video_token_id": film, "vision_config": self.vision}

    def tokenizer(self, folder: Path) -> Any:
        file = str(folder / "tokenizer.json")
        return PreTrainedTokenizerFast(tokenizer_file=file, extra_special_tokens=dict(self.extra))

    def processor(self, folder: Path) -> Any:
        return processor_for(self.architecture, self.config, folder)

    @pytest.mark.parametrize("number", range(3))
    def test_numbers_are_the_librarys(self, folder: Path, number: int) -> None:
        frames = clip(*self.shapes[number])
        (own,) = self.processor(folder).process([video(frames)], {})
        values, grid = self.theirs(frames)
        np.testing.assert_allclose(array(own, VALUES), values, atol=1e-5, rtol=0)
        if grid is not None:
            assert array(own, "video_grid_thw").tolist() == list(grid)

    def test_prompt(self, folder: Path) -> None:
        """The library's own code of prompts, with videos that say when their frames were, and with one that
        does not."""
        videos = [video(clip(*self.shapes[0]), **of_file(4)), video(clip(*self.shapes[1]))]
        tokenizer = self.tokenizer(folder)
        theirs = self.hf_processor(tokenizer, videos)
        own = self.processor(folder)
        media = own.process(videos, {})
        replaced = [
            theirs.replace_video_token(theirs.video_processor(None), index) for index in range(2)
        ]
        (text,), _ = theirs.get_text_with_replacements([self.text], [], replaced)
        expected = tokenizer(text)["input_ids"]
        assert own.place(tokenizer(self.text)["input_ids"], media).token_ids == expected
        self.check_runs(media)

    def check_runs(self, media: Sequence[ProcessedMedia]) -> None:
        """Vectors stand where the placeholders are."""
        for one in media:
            places = [i for i, token in enumerate(one.token_ids) if token == self.vector_token]
            runs = one.runs or ((0, one.num_tokens),)
            assert places == [first + i for first, number in runs for i in range(number)]

    @property
    def vector_token(self) -> int:
        return self.ids[self.names[1]]

    def test_images_and_videos_in_one_prompt(self, folder: Path) -> None:
        own, (image, film) = self.processor(folder), self.names[:2]
        items = [item(picture(40, 56)), item(picture(30, 30)), video(clip(2, 30, 30))]
        media = own.process(items, {})
        marks = [self.ids[image], self.ids[film], self.ids[image]]
        placed = own.place([1, marks[0], 2, marks[1], marks[2], 3], media)
        for one, offset in zip(media, placed.offsets, strict=True):
            tokens = list(one.token_ids) or [marks[0]] * one.num_tokens
            assert placed.token_ids[offset : offset + one.num_tokens] == tokens
        first, last, middle = placed.offsets
        assert first == 1
        assert first + media[0].num_tokens < middle
        assert middle + media[2].num_tokens == last
        with pytest.raises(RequestError, match=r"2 placeholders .* 3 media items"):
            own.place(
                [marks[0], marks[0], marks[1]], own.process([*items[:2], items[0], items[2]], {})
            )

    def test_largest(self, folder: Path) -> None:
        own = self.processor(folder)
        largest = own.largest("video", {"num_frames": 8})
        for shape in (*self.shapes, (8, 400, 400), (7, 500, 90)):
            (made,) = own.process([video(clip(*shape))], {})
            assert made.num_tokens <= largest.num_tokens + self.slack
        assert (
            own.largest("video", {"num_frames": 8, "num_tokens": 60}).num_tokens <= 60 + self.slack
        )
        small = own.largest("video", {"num_frames": 2, "height": 40, "width": 60})
        (made,) = own.process([video(np.zeros((2, 40, 60, 3), np.uint8))], {})
        assert array(small, VALUES).shape == array(made, VALUES).shape

    slack: ClassVar[int] = 0
    """Tokens of an item that take no vector and are not counted."""

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        config = {key: value for key, value in self.config.items() if key != "video_token_id"}
        assert processor_for(self.architecture, config, folder).modalities() == ("image",)


class Qwen(Conformance):
    names = ("<|image_pad|>", "<|video_pad|>", "<|vision_start|>", "<|vision_end|>")
    text = "the FILM water\nFILMruns".replace("FILM", "<|vision_start|><|video_pad|><|vision_end|>")
    settings: ClassVar = {"size": {"shortest_edge": 28 * 28 * 3, "longest_edge": 28 * 28 * 9}}
    vision: ClassVar = {"patch_size": 14}
    patch = 14
    mean: ClassVar[Any] = None

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import smart_resize

        size = self.settings["size"]
        found: tuple[int, int] = smart_resize(
            height, width, 28, size["shortest_edge"], size["longest_edge"]
        )
        return found

    def theirs(self, frames: Array) -> tuple[Array, tuple[int, int, int]]:
        height, width = self.size(*frames.shape[:3])
        numbers = {} if self.mean is None else {"image_mean": self.mean, "image_std": self.mean}
        library = Qwen2VLImageProcessorPil(
            patch_size=self.patch, size={"shortest_edge": 1, "longest_edge": 1 << 40}, **numbers
        )
        found = []
        for frame in frames:
            fitted = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
            patches = np.asarray(library(images=fitted)["pixel_values"])
            still = patches.reshape(-1, 3, 2, self.patch, self.patch)  # twice the same frame
            found.append(still[:, :, 0])
        found += found[-1:] * (len(found) % 2)
        pairs = [np.stack(found[i : i + 2], axis=2) for i in range(0, len(found), 2)]
        values = np.concatenate([pair.reshape(len(pair), -1) for pair in pairs])
        return values, (len(pairs), height // self.patch, width // self.patch)

    def with_library(self, name: str, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        module = name.lower().replace("vl", "_vl")
        library = importlib.import_module(f"transformers.models.{module}.processing_{module}")
        kind: Any = getattr(library, f"{name}Processor")
        made = kind.__new__(kind)
        made.video_processor, made.video_token = Library(self, videos), "<|video_pad|>"
        made.vision_start_token, made.vision_end_token = "<|vision_start|>", "<|vision_end|>"
        made.image_token = "<|image_pad|>"
        return made


class TestQwen2VL(Qwen):
    architecture = "Qwen2VLForConditionalGeneration"

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        return self.with_library("Qwen2VL", tokenizer, videos)

    def test_options(self, folder: Path) -> None:
        own, frames = self.processor(folder), [video(clip(2, 200, 200))]
        (plain,), (small,) = (
            own.process(frames, {}),
            own.process(frames, {"max_pixels": 28 * 28 * 4}),
        )
        assert (plain.num_tokens, small.num_tokens) == (9, 4)
        # An option for images may be beyond what the checkpoint takes of videos.
        (large,) = own.process(frames, {"max_pixels": 28 * 28 * 1000})
        assert large.num_tokens == 9
        with pytest.raises(RequestError, match="max_pixels = '9'"):
            own.process(frames, {"max_pixels": "9"})

    @pytest.mark.parametrize(
        ("key", "value"), [("cap_pixels_per_frame", True), ("patch_size", 16), ("merge_size", 1)]
    )
    def test_settings_that_are_not_served(self, folder: Path, key: str, value: object) -> None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({key: value}))
        with pytest.raises(UnsupportedModel, match=f"video processor: {key} = {value}"):
            self.processor(folder)


class TestQwen2_5VL(Qwen):
    architecture = "Qwen2_5_VLForConditionalGeneration"

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers.models.qwen2_5_vl.processing_qwen2_5_vl import Qwen2_5_VLProcessor

        made = Qwen2_5_VLProcessor.__new__(Qwen2_5_VLProcessor)
        made.video_processor, made.video_token = Library(self, videos), "<|video_pad|>"
        made.image_token = "<|image_pad|>"
        return made

    def test_seconds(self, folder: Path) -> None:
        """As the library computes them, of frames that are taken of a file, and of frames alone."""
        frames = clip(4, 61, 37)
        cases = [video(frames, **of_file(4)), video(frames), video(frames, fps=2.0)]
        for one in cases:
            (own,) = self.processor(folder).process([one], {})
            theirs = Library(self, [one])(None)["video_metadata"][0]
            if "total_num_frames" not in one.metadata:
                theirs.total_num_frames = None
            assert array(own, "second_per_grid_ts").tolist() == [np.float32(2 / theirs.sampled_fps)]


class TestQwen3VL(Qwen):
    architecture = "Qwen3VLForConditionalGeneration"
    settings: ClassVar = {"size": {"shortest_edge": 32 * 32 * 8, "longest_edge": 32 * 32 * 30}}
    vision: ClassVar = {"patch_size": 16}
    shapes = ((4, 61, 37), (5, 20, 64), (8, 300, 90))
    patch = 16
    mean = (0.5, 0.5, 0.5)
    slack = 100

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        library = importlib.import_module("transformers.models.qwen3_vl.video_processing_qwen3_vl")
        size = self.settings["size"]
        found: tuple[int, int] = library.smart_resize(
            count, height, width, 2, 32, size["shortest_edge"], size["longest_edge"]
        )
        return found

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        return self.with_library("Qwen3VL", tokenizer, videos)


class TestLlavaOnevision(Conformance):
    architecture = "LlavaOnevisionForConditionalGeneration"
    names = ("<image>", "<video>")
    text = "the <video> water\n<video>runs"
    settings: ClassVar = {"size": {"height": 42, "width": 42}}
    vision: ClassVar = {"model_type": "siglip_vision_model", "image_size": 42, "patch_size": 14}

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "image_grid_pinpoints": [[42, 42], [42, 84]]}

    def theirs(self, frames: Array) -> tuple[Array, None]:
        from transformers import SiglipImageProcessor
        from transformers.image_utils import OPENAI_CLIP_MEAN, OPENAI_CLIP_STD

        library = SiglipImageProcessor(
            size={"height": 42, "width": 42}, resample=3, image_mean=OPENAI_CLIP_MEAN,
            image_std=OPENAI_CLIP_STD,
        )  # fmt: skip
        pictures = [Image.fromarray(frame) for frame in frames]
        return np.asarray(library(images=pictures, return_tensors="np")["pixel_values"]), None

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers import LlavaOnevisionProcessor

        made = LlavaOnevisionProcessor.__new__(LlavaOnevisionProcessor)
        made.video_processor, made.video_token = Library(self, videos), "<video>"
        made.num_image_tokens, made.image_token = 9, "<image>"
        return made


class TestLlavaNextVideo(Conformance):
    architecture = "LlavaNextVideoForConditionalGeneration"
    names = ("<image>", "<video>")
    text = "the <video> water\n<video>runs"
    settings: ClassVar = {"size": {"shortest_edge": 56}, "crop_size": {"height": 56, "width": 56}}
    of_images: ClassVar = settings
    vision: ClassVar = {"image_size": 56, "patch_size": 14}

    @property
    def config(self) -> dict[str, Any]:
        return {**super().config, "image_grid_pinpoints": [[56, 56], [56, 112]]}

    def theirs(self, frames: Array) -> tuple[Array, None]:
        from transformers import CLIPImageProcessor

        library = CLIPImageProcessor(**self.settings)
        pictures = [Image.fromarray(frame) for frame in frames]
        return np.asarray(library(images=pictures, return_tensors="np")["pixel_values"]), None

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers import LlavaNextVideoProcessor

        made = LlavaNextVideoProcessor.__new__(LlavaNextVideoProcessor)
        made.video_processor, made.video_token = Library(self, videos), "<video>"
        made.patch_size, made.image_token = 14, "<image>"
        return made

    def test_frames_of_another_size_than_the_towers_are_refused(self, folder: Path) -> None:
        """Which is what settings mean that do not say."""
        (folder / "video_preprocessor_config.json").write_text('{"do_rescale": true}')
        with pytest.raises(UnsupportedModel, match=r"frames of \(224, 224\)"):
            self.processor(folder)


class TestVideoLlava(TestLlavaNextVideo):
    """A frame has a token more than patches."""

    architecture = "VideoLlavaForConditionalGeneration"

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers import VideoLlavaProcessor

        made = VideoLlavaProcessor.__new__(VideoLlavaProcessor)
        made.video_processor, made.video_token = Library(self, videos), "<video>"
        made.patch_size, made.num_additional_image_tokens = 14, 1
        made.image_token = "<image>"
        return made

    def test_frames_of_another_size_than_the_towers_are_refused(self, folder: Path) -> None:
        (folder / "video_preprocessor_config.json").write_text('{"do_rescale": true}')
        with pytest.raises(
            UnsupportedModel, match=r"video processor: makes images of \(224, 224\)"
        ):
            self.processor(folder)


class TestInternVL(Conformance):
    architecture = "InternVLForConditionalGeneration"
    names = ("<IMG_CONTEXT>", "<video>", "<img>", "</img>")
    text = "the <video>\nwater:<video>\nruns"
    settings: ClassVar = {"size": {"height": 56, "width": 56}}
    of_images: ClassVar = settings
    vision: ClassVar = {"model_type": "internvl_vision", "image_size": [56, 56], "patch_size": 14}
    extra: ClassVar = {
        "context_image_token": "<IMG_CONTEXT>", "start_image_token": "<img>",
        "end_image_token": "</img>", "video_token": "<video>",
    }  # fmt: skip
    slack = 200

    @property
    def vector_token(self) -> int:
        return self.ids["<IMG_CONTEXT>"]

    def theirs(self, frames: Array) -> tuple[Array, None]:
        from transformers import GotOcr2ImageProcessorPil

        library = GotOcr2ImageProcessorPil(size={"height": 56, "width": 56}, crop_to_patches=False)
        pictures = [Image.fromarray(frame) for frame in frames]
        return np.asarray(library(images=pictures, return_tensors="np")["pixel_values"]), None

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers.models.internvl.processing_internvl import InternVLProcessor

        made = InternVLProcessor.__new__(InternVLProcessor)
        made.video_processor, made.image_seq_length = Library(self, videos), 4
        made.start_image_token, made.end_image_token = "<img>", "</img>"
        made.image_token, made.video_token = "<IMG_CONTEXT>", "<video>"
        return made

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        self.ids = save_tokenizer(folder, ("<|endoftext|>", *self.names[:1], *self.names[2:]))
        config = {"image_token_id": self.ids["<IMG_CONTEXT>"], "vision_config": self.vision}
        assert processor_for(self.architecture, config, folder).modalities() == ("image",)


class TestSmolVLM(Conformance):
    """A video's place is a text, which is no token."""

    architecture = "SmolVLMForConditionalGeneration"
    names = ("<image>", "<fake_token_around_image>", "<global-img>")
    text = "the wheel: <video>runs in<video>\nthe water"
    settings: ClassVar = {
        "size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56},
        "video_sampling": {"video_size": {"longest_edge": 84}, "max_frames": 64, "fps": 1},
    }  # fmt: skip
    of_images: ClassVar = {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}}
    # The library pads the videos of a prompt to one length, and counts those frames.
    shapes = ((4, 61, 37), (4, 64, 64), (8, 31, 90))
    vision: ClassVar = {"image_size": 56, "patch_size": 14}
    slack = 300

    @property
    def config(self) -> dict[str, Any]:
        return {
            "image_token_id": self.ids["<image>"], "vision_config": self.vision, "scale_factor": 2
        }  # fmt: skip

    @property
    def vector_token(self) -> int:
        return self.ids["<image>"]

    def theirs(self, frames: Array) -> tuple[Array, None]:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
        )

        library = SmolVLMImageProcessorPil(
            size={"longest_edge": 84}, max_image_size={"longest_edge": 56}, do_image_splitting=False
        )
        pictures = [[Image.fromarray(frame)] for frame in frames]
        made = library(images=pictures, return_tensors="np")["pixel_values"]
        return np.asarray(made)[:, 0], None

    def hf_processor(self, tokenizer: Any, videos: Sequence[MediaItem]) -> Any:
        from transformers.models.smolvlm import processing_smolvlm

        made = processing_smolvlm.SmolVLMProcessor.__new__(processing_smolvlm.SmolVLMProcessor)
        made.fake_image_token, made.global_image_token = self.names[1:]
        made.image_token, made.video_token, made.image_seq_len = "<image>", "<video>", 4
        made.video_processor = Library(self, videos)
        return made

    @pytest.fixture(autouse=True)
    def words(self, monkeypatch: pytest.MonkeyPatch) -> None:
        """The library spells numbers with a package that is not installed."""
        module = "transformers.models.smolvlm.processing_smolvlm"
        monkeypatch.setattr(f"{module}.num2words", {4: "four"}.__getitem__)

    def test_images_and_videos_in_one_prompt(self, folder: Path) -> None:
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        items = [item(picture(40, 56)), video(clip(2, 30, 30), fps=1.0)]
        media = own.process(items, {})
        placed = own.place(tokenizer("the <image> and <video>")["input_ids"], media)
        for one, offset in zip(media, placed.offsets, strict=True):
            assert placed.token_ids[offset : offset + one.num_tokens] == list(one.token_ids)
        said = tokenizer.decode(placed.token_ids)
        assert "two frames from a 0:00:01 [H:MM:SS] video.\n\nFrame from 00:00:" in said
        for text in ("<image>", "<image> <video><video>"):
            with pytest.raises(RequestError, match="must be one for each"):
                own.place(tokenizer(text)["input_ids"], media)

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        """It needs none."""
        assert self.processor(folder).modalities() == ("image", "video")


def test_numbers_in_words() -> None:
    found = [in_words(n) for n in (0, 7, 12, 20, 32, 99, 100, 101, 340, 768, 999)]
    assert found == [
        "zero", "seven", "twelve", "twenty", "thirty-two", "ninety-nine", "one hundred",
        "one hundred and one", "three hundred and forty", "seven hundred and sixty-eight",
        "nine hundred and ninety-nine",
    ]  # fmt: skip
