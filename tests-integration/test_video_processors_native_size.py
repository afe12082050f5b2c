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
from test_image_processors import array, item, picture
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
