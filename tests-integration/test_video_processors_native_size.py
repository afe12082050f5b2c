"""Videos of models that see them at their own size, beside the checkpoints' own library; see
``test_video_processors.py``."""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import test_video_processors as videos
import torch
from PIL import Image, ImageFont
from speech_checkpoints import save_tokenizer
from test_image_processors import array, item, picture
from test_image_processors_native_size import PlainKimiK25
from test_video_processors import VALUES, Array, Library, clip, of_file, video
from transformers import Qwen2VLImageProcessorPil
from transformers.video_utils import VideoMetadata

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import processor_for


class Glm(videos.Qwen):
    """Frames stand in front of their times, as images."""

    names = (
        "<|image|>", "<|video|>", "<|begin_of_image|>", "<|end_of_image|>", "<|begin_of_video|>",
        "<|end_of_video|>",
    )  # fmt: skip
    text = "the FILM water\nFILMruns".replace("FILM", "<|begin_of_video|><|video|><|end_of_video|>")
    settings: ClassVar = {"size": {"shortest_edge": 28 * 28 * 8, "longest_edge": 28 * 28 * 30}}
    shapes = ((4, 61, 37), (5, 20, 64), (8, 300, 90))
    module: ClassVar[str]
    name: ClassVar[str]
    slack = 100

    def size(self, count: int, height: int, width: int) -> tuple[int, int]:
        from transformers.models.glm4v.video_processing_glm4v import smart_resize

        size = self.settings["size"]
        found: tuple[int, int] = smart_resize(
            count, height, width, 2, 28, size["shortest_edge"], size["longest_edge"]
        )
        return found

    def hf_processor(self, tokenizer: Any, taken: Sequence[MediaItem]) -> Any:
        module = f"transformers.models.{self.module}.processing_{self.module}"
        kind: Any = getattr(importlib.import_module(module), f"{self.name}Processor")
        made = kind.__new__(kind)
        made.video_processor, made.video_token = Library(self, taken), "<|video|>"
        made.image_token = "<|image|>"
        return made

    @property
    def vector_token(self) -> int:
        return self.ids[self.names[0]]


class TestGlm4v(Glm):
    architecture = "Glm4vForConditionalGeneration"
    module, name = "glm4v", "Glm4v"

    @pytest.mark.parametrize(
        ("file", "settings"),
        [
            ("processor_config.json", {"processor_class": "Glm46VProcessor"}),
            ("video_preprocessor_config.json", {"processor_class": "Glm46VProcessor"}),
        ],
    )
    def test_a_checkpoint_that_names_its_processor(
        self, folder: Path, file: str, settings: dict[str, str]
    ) -> None:
        """GLM-4.6V's weights are of GLM-4.5V's class."""
        item = video(clip(4, 60, 60), fps=8.0)
        plain, named = self.processor(folder), None
        (folder / file).write_text(json.dumps({**self.settings, **settings}))
        named = processor_for(self.architecture, self.config, folder)
        (whole,), (tenths,) = plain.process([item], {}), named.process([item], {})
        assert tenths.num_tokens > whole.num_tokens


class TestTarsier2(videos.TestQwen2VL):
    """Tokens are those of the tokenizer: the config names none."""

    architecture = "Tarsier2ForConditionalGeneration"

    @property
    def config(self) -> dict[str, Any]:
        return {"vision_config": self.vision}

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        assert self.processor(folder).modalities() == ("image", "video")


class TestQwen3_5(videos.TestQwen3VL):
    architecture = "Qwen3_5ForConditionalGeneration"

    def test_a_token_takes_one_vector(self, folder: Path) -> None:
        """Qwen3-VL's takes those of the decoder's first layers, too."""
        assert self.processor(folder).embeds_width == 1


class TestGlm46V(Glm):
    architecture = "Glm46VForConditionalGeneration"
    module, name = "glm46v", "Glm46V"


class TestKeyeVL1_5(videos.Conformance):
    """Frames are images of Keye's, whose processor is compared beside it; texts are a plain reading."""

    architecture = "KeyeVL1_5ForConditionalGeneration"
    names = ("<|image_pad|>", "<|video_pad|>", "<|frame|>")
    text = "the <|video_pad|> water\n<|video_pad|>runs"
    settings: ClassVar = {"min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 9}
    of_images: ClassVar = settings
    vision: ClassVar = {"patch_size": 14}
    slack = 40

    def theirs(self, frames: Array) -> tuple[Array, tuple[int, int, int]]:
        processor = processor_for("KeyeForConditionalGeneration", self.config, self.path)
        made = processor.process([item(Image.fromarray(frame)) for frame in frames], {})
        grid = array(made[0], "image_grid_thw").tolist()
        values = np.concatenate([array(one, "pixel_values") for one in made])
        return values, (len(frames), *grid[1:])

    @pytest.fixture(autouse=True)
    def where(self, folder: Path) -> None:
        self.path = folder

    def test_prompt(self, folder: Path) -> None:
        items = [video(clip(*self.shapes[0]), **of_file(4)), video(clip(*self.shapes[1]))]
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        media = own.process(items, {})
        pads = ["<|video_pad|>" * one.runs[0][1] for one in media]
        times = [f"{index / 7.5:.1f}" for index in (0, 13, 26, 39)]
        text = self.text.replace("<|video_pad|>", "FILM")
        for pad, said in zip(pads, (times, [""] * 3), strict=True):
            text = text.replace("FILM", "".join(f"<|frame|>{time}{pad}" for time in said), 1)
        placed = own.place(tokenizer(self.text)["input_ids"], media)
        assert placed.token_ids == tokenizer(text)["input_ids"]
        self.check_runs(media)

    def test_without_a_token_of_frames_images_alone_are_taken(self, folder: Path) -> None:
        save_tokenizer(folder, ("<|endoftext|>", *self.names[:2]))
        assert self.processor(folder).modalities() == ("image",)


class TestKeye(videos.Conformance):
    """Frames are images of Keye's, whose processor is compared beside it; a video is one run of tokens,
    and the model is told how many seconds a frame takes."""

    architecture = "KeyeForConditionalGeneration"
    names = ("<|image_pad|>", "<|video_pad|>")
    text = "the <|video_pad|> water\n<|video_pad|>runs"
    settings: ClassVar = {
        "min_pixels": 28 * 28 * 2, "max_pixels": 28 * 28 * 9, "temporal_patch_size": 1,
    }  # fmt: skip
    of_images: ClassVar = settings
    vision: ClassVar = {"patch_size": 14, "temporal_patch_size": 2, "tokens_per_second": 2}
    slack = 40

    def theirs(self, frames: Array) -> tuple[Array, tuple[int, int, int]]:
        processor = processor_for(self.architecture, self.config, self.path)
        made = processor.process([item(Image.fromarray(frame)) for frame in frames], {})
        grid = array(made[0], "image_grid_thw").tolist()
        values = np.concatenate([array(one, "pixel_values") for one in made])
        return values, (len(frames), *grid[1:])

    @pytest.fixture(autouse=True)
    def where(self, folder: Path) -> None:
        self.path = folder

    def test_prompt(self, folder: Path) -> None:
        items = [video(clip(*self.shapes[0]), **of_file(4)), video(clip(*self.shapes[1]))]
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        media = own.process(items, {})
        text = self.text
        for one in media:
            count, height, width = array(one, "video_grid_thw").tolist()
            assert one.num_tokens == count * height * width // 4
            text = text.replace("<|video_pad|>", "FILM" * one.num_tokens, 1)
        placed = own.place(tokenizer(self.text)["input_ids"], media)
        assert placed.token_ids == tokenizer(text.replace("FILM", "<|video_pad|>"))["input_ids"]
        seconds = [float(array(one, "second_per_grid_ts")[0]) for one in media]
        assert seconds[1] == 0.5, "where nobody says it, two frames a second"
        assert seconds[0] != 0.5
        self.check_runs(media)


class Stretches(Library):
    """Grids of stretches of frames, as the library of Kimi K2.5 has them."""

    temporal_patch_size = 4

    def __call__(self, _: Any, **__: Any) -> Any:
        found = super().__call__(_)
        counts = [-(-len(item.data) // 4) for item in self.videos]
        grids = [
            [grid] * count for grid, count in zip(found["video_grid_thw"], counts, strict=True)
        ]
        found["video_grid_thw"] = np.concatenate(grids)
        found["num_chunks_per_video"] = counts
        return found


class TestKimiK25(videos.Conformance):
    """Stretches of four frames; a video's place is a text. Vectors have the token of images."""

    architecture = "KimiK25ForConditionalGeneration"
    names = ("<|media_pad|>", "<|media_begin|>", "<|media_content|>", "<|media_end|>")
    film = "<|kimi_k25_video_placeholder|>"
    text = f"the 1{film} water\n{film}runs"
    settings: ClassVar = {"size": {"max_height": 8, "max_width": 8}, "max_patches": 30}
    shapes = ((6, 61, 37), (3, 64, 64), (8, 31, 90))
    vision: ClassVar = {"patch_size": 14}
    slack = 60

    @property
    def config(self) -> dict[str, Any]:
        image = self.ids["<|media_pad|>"]
        return {"media_placeholder_token_id": image, "vision_config": self.vision}

    @property
    def vector_token(self) -> int:
        return self.ids["<|media_pad|>"]

    def theirs(self, frames: Array) -> tuple[Array, tuple[int, int, int]]:
        library = PlainKimiK25(**self.settings)
        made = [library(images=Image.fromarray(frame), return_tensors="pt") for frame in frames]
        rows, columns = made[0]["image_grid_hws"][0].tolist()
        return np.concatenate([one["pixel_values"].numpy() for one in made]), (1, rows, columns)

    @pytest.mark.parametrize("number", range(3))
    def test_numbers_are_the_librarys(self, folder: Path, number: int) -> None:
        frames = clip(*self.shapes[number])
        (own,) = self.processor(folder).process([video(frames)], {})
        values, grid = self.theirs(frames)
        np.testing.assert_allclose(array(own, VALUES), values, atol=1e-5, rtol=0)
        counts = [len(frames[first : first + 4]) for first in range(0, len(frames), 4)]
        assert array(own, "video_grid_thw").tolist() == [[n, *grid[1:]] for n in counts]

    @pytest.mark.parametrize("is_token", [False, True])
    def test_prompt(self, folder: Path, *, is_token: bool) -> None:  # type: ignore[override]
        from transformers.models.kimi_k25.processing_kimi_k25 import Kimi_K25Processor

        if is_token:
            self.ids = save_tokenizer(folder, ("<|endoftext|>", *self.names, self.film))
        items = [video(clip(*self.shapes[0]), **of_file(6)), video(clip(*self.shapes[1]))]
        theirs = Kimi_K25Processor.__new__(Kimi_K25Processor)
        theirs.video_processor, theirs.video_token = Stretches(self, items), "<|media_pad|>"
        given = theirs.video_processor(None)
        text, tokenizer = self.text, self.tokenizer(folder)
        for index in range(2):
            text = text.replace(self.film, theirs.replace_video_token(given, index), 1)
        own = self.processor(folder)
        media = own.process(items, {})
        placed = own.place(tokenizer(self.text)["input_ids"], media)
        assert placed.token_ids == tokenizer(text)["input_ids"]
        self.check_runs(media)

    def test_images_and_videos_in_one_prompt(self, folder: Path) -> None:
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        media = own.process([item(picture(40, 56)), video(clip(2, 30, 30))], {})
        text = f"the {self.film} and <|media_pad|>"
        placed = own.place(tokenizer(text)["input_ids"], media)
        for one, offset in zip(media, placed.offsets, strict=True):
            tokens = list(one.token_ids) or [self.vector_token] * one.num_tokens
            assert placed.token_ids[offset : offset + one.num_tokens] == tokens
        for wrong in ("<|media_pad|>", text + self.film):
            with pytest.raises(RequestError, match="must be one for each"):
                own.place(tokenizer(wrong)["input_ids"], media)

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        """None is needed; what may be missing is the tokenizer's file."""
        (folder / "tokenizer.json").unlink()
        assert self.processor(folder).modalities() == ("image",)

    def test_as_published(self, folder: Path) -> None:
        stated = {
            "in_patch_limit_each_frame": 30, "in_patch_limit": 16384, "patch_limit_on_one_side": 8,
            "temporal_merge_kernel_size": 4, "in_patch_limit_video": None,
            "timestamp_mode": "hh:mm:ss.fff", "merge_kernel_size": 2, "patch_size": 14,
        }  # fmt: skip
        files = [folder / f"{name}preprocessor_config.json" for name in ("", "video_")]
        plain, item = self.processor(folder), video(clip(*self.shapes[0]))
        files[1].unlink()
        files[0].write_text(json.dumps({"media_proc_cfg": stated}))
        assert self.processor(folder).process([item], {}) == plain.process([item], {})
        for key, value in (
            ("in_patch_limit_video", 9), ("timestamp_mode", "s"), ("temporal_merge_kernel_size", 8),
        ):  # fmt: skip
            files[0].write_text(json.dumps({"media_proc_cfg": {**stated, key: value}}))
            with pytest.raises(UnsupportedModel, match=f"{value}"):
                self.processor(folder)


class TestErnie4_5VL(videos.Qwen):
    """Times are drawn into frames, here in Pillow's own font."""

    architecture = "Ernie4_5_VLMoeForConditionalGeneration"
    names = (
        "<|IMAGE_PLACEHOLDER|>", "<|VIDEO_PLACEHOLDER|>", "<|IMAGE_START|>", "<|IMAGE_END|>",
        "<|VIDEO_START|>", "<|VIDEO_END|>",
    )  # fmt: skip
    text = "the FILM water\nFILMruns".replace(
        "FILM", "<|VIDEO_START|><|VIDEO_PLACEHOLDER|><|VIDEO_END|>"
    )

    @pytest.fixture
    def folder(self, tmp_path: Path) -> Path:
        folder: Path = videos.Qwen.folder.__wrapped__(self, tmp_path)  # type: ignore[attr-defined]
        font: Any = ImageFont.load_default(20)
        self.font = folder / "Roboto-Regular.ttf"
        self.font.write_bytes(font.path.getvalue())
        return folder

    @pytest.fixture(autouse=True)
    def module(self, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
        """The library's module, with the two functions of torchvision that its drawing needs."""
        before = set(sys.modules)

        def put(name: str, **functions: Any) -> None:
            made = types.ModuleType(f"torchvision{name}")
            made.__dict__.update(functions)
            monkeypatch.setitem(sys.modules, made.__name__, made)

        put("")
        put(".transforms")
        put(".transforms.v2", functional=None)
        put(
            ".transforms.functional",
            pil_to_tensor=lambda image: torch.tensor(np.asarray(image)).permute(2, 0, 1),
            to_pil_image=lambda frame: Image.fromarray(frame.permute(1, 2, 0).numpy()),
        )
        name = "transformers.models.ernie4_5_vl_moe.video_processing_ernie4_5_vl_moe"
        library = importlib.import_module(name).Ernie4_5_VLMoeVideoProcessor
        self.library = library.__new__(library)
        yield
        for name in set(sys.modules) - before:
            if "ernie4_5_vl_moe" in name:
                del sys.modules[name]

    def theirs(
        self, frames: Array, known: VideoMetadata | None = None
    ) -> tuple[Array, tuple[int, int, int]]:
        count = len(frames)
        known = known or VideoMetadata(total_num_frames=count, frames_indices=list(range(count)))
        self.library.font = str(self.font)
        (drawn,) = self.library._prepare_input_videos([frames.copy()], None, None, [known], True)
        height, width = self.size(*frames.shape[:3])
        patches = Qwen2VLImageProcessorPil(
            temporal_patch_size=1, size={"shortest_edge": 1, "longest_edge": 1 << 40}
        )
        found = []
        for frame in drawn.permute(0, 2, 3, 1).numpy():
            fitted = Image.fromarray(frame).resize((width, height), Image.Resampling.BICUBIC)
            found.append(np.asarray(patches(images=fitted)["pixel_values"]))
        return np.concatenate(found), (len(drawn), height // 14, width // 14)

    def hf_processor(self, tokenizer: Any, taken: Sequence[MediaItem]) -> Any:
        module = "transformers.models.ernie4_5_vl_moe.processing_ernie4_5_vl_moe"
        kind: Any = importlib.import_module(module).Ernie4_5_VLMoeProcessor
        made = kind.__new__(kind)
        made.video_processor, made.video_token = Library(self, taken), self.names[1]
        made.image_token = self.names[0]
        return made

    def test_times_of_a_file(self, folder: Path) -> None:
        stated = {**of_file(4), "fps": 0.01}
        item = video(clip(4, 200, 310), **stated)
        (own,) = self.processor(folder).process([item], {})
        values, _ = self.theirs(item.data, VideoMetadata(**stated))
        np.testing.assert_allclose(array(own, VALUES), values, atol=1e-5, rtol=0)

    def test_places_as_chat_templates_write_them(self, folder: Path) -> None:
        own, tokenizer = self.processor(folder), self.tokenizer(folder)
        media = own.process([item(picture(40, 56)), video(clip(3, 30, 30))], {})
        text = "the <|VIDEO_START|>{}<|VIDEO_END|> in <|IMAGE_START|>{}<|IMAGE_END|> runs"
        written = text.format("<|video@placeholder|>", "<|image@placeholder|>")
        image, film = (one.num_tokens for one in media)
        wanted = text.format(self.names[1] * film, self.names[0] * image)
        placed = own.place(tokenizer(written)["input_ids"], media)
        assert placed.token_ids == tokenizer(wanted)["input_ids"]

    def test_without_a_token_of_videos_images_alone_are_taken(self, folder: Path) -> None:
        """The library names one; what may be missing is the font."""
        config = {key: value for key, value in self.config.items() if key != "video_token_id"}
        made = processor_for(self.architecture, config, folder)
        assert made.video_placeholder_id == 103_367
        self.font.unlink()
        assert self.processor(folder).modalities() == ("image",)

    def test_a_checkpoint_that_draws_none(self, folder: Path) -> None:
        self.font.unlink()
        settings = {**self.settings, "draw_on_frames": False}
        (folder / "video_preprocessor_config.json").write_text(json.dumps(settings))
        frames = clip(2, 60, 56)
        (plain,) = self.processor(folder).process([video(frames)], {})
        values, _ = super().theirs(frames)  # Qwen2-VL's: pairs of patches
        patches = values.reshape(-1, 3, 2, 14 * 14).transpose(2, 0, 1, 3).reshape(-1, 3 * 14 * 14)
        np.testing.assert_allclose(array(plain, VALUES), patches, atol=1e-5, rtol=0)

    @pytest.mark.parametrize("font", ["../Roboto.ttf", 5, "preprocessor_config.json"])
    def test_fonts_that_are_refused(self, folder: Path, font: object) -> None:
        (folder / "video_preprocessor_config.json").write_text(json.dumps({"font": font}))
        (folder.parent / "Roboto.ttf").write_bytes(self.font.read_bytes())
        with pytest.raises(UnsupportedModel, match="must be a f"):
            self.processor(folder)

    def test_frames_too_small_for_times(self, folder: Path) -> None:
        with pytest.raises(RequestError, match="9 x 60 pixels: sides must have at least 10"):
            self.processor(folder).process([video(clip(2, 60, 9))], {})
