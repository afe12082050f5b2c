"""MiniCPM-V 2.6's image processor: slices and numbers beside the library's processor of the later 4.6, which
differs in the multiples that sides must have; prompts beside the published formula."""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from PIL import Image
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_core.multimodal import MediaItem
from headrace_multimodal import content_hash, processor_for

SPECIAL = (
    "<unk>",
    "<image>",
    "</image>",
    "<slice>",
    "</slice>",
    "<image_id>",
    "</image_id>",
    "<|im_start|>",
)
MARK = "(<image>./</image>)"
SHAPES = [(40, 900), (700, 1009), (449, 447), (1500, 333), (896, 448), (2000, 2000), (3, 500)]


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=290, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["the of (in) the\n(<image>./</image>)\n" for _ in range(9)], trainer)
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


def library(**settings: Any) -> Any:
    from transformers.models.minicpmv4_6.image_processing_pil_minicpmv4_6 import (
        MiniCPMV4_6ImageProcessorPil,
    )

    class WithoutMerge(MiniCPMV4_6ImageProcessorPil):
        def find_best_resize(
            self, image_size: Any, scale_resolution: int, patch_size: int, **rest: Any
        ) -> tuple[int, int]:
            # Of the four patches of a side that become one vector there, one.
            height, width = super().find_best_resize(
                image_size, scale_resolution, patch_size / 4, **rest
            )
            return int(height), int(width)

        def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
            Path(folder).mkdir(exist_ok=True)
            tokenizer().save(str(Path(folder) / "tokenizer.json"))
            return super().save_pretrained(folder, **kwargs)

    return WithoutMerge(**settings)


def written(grid: list[int], index: int, vectors: int) -> str:
    """What the published processor puts in place of an image's mark.

    Args:
        grid: rows and columns of slices; [0, 0]: there are none.
    """
    rows, columns = grid
    whole = f"<image_id>{index}</image_id><image>{'<unk>' * vectors}</image>"
    one = f"<slice>{'<unk>' * vectors}</slice>"
    return whole + "\n".join([one * columns] * rows)


class TestMiniCPMV(ProcessorConformance):
    architecture = "MiniCPMV"
    config: ClassVar = {
        "version": 2.6,
        "query_num": 64,
        "vision_config": {"model_type": "siglip", "patch_size": 14},
    }
    settings: ClassVar = (
        {},
        {
            "max_slice_nums": 4,
            "scale_resolution": 70,
            "norm_mean": [0.4] * 3,
            "norm_std": [0.3] * 3,
        },
        {"max_slice_nums": 1},
    )
    inputs = ("pixel_values", "tgt_sizes")

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        """The published files have names of their own for means."""
        own = {key.replace("norm_", "image_"): value for key, value in settings.items()}
        return library(**{**settings, **own})

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        if name == "tgt_sizes":
            return np.asarray(made["target_sizes"])
        values = np.asarray(made["pixel_values"])[0]
        return values.reshape(3, 14, -1, 14).transpose(2, 0, 1, 3).reshape(-1, 3 * 14 * 14)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(ids(written(made["grids"][0], 0, 64).partition("</image_id>")[2]))

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, {"version": 4.5}, tmp_path)
        (own,) = processor.process([item(picture(700, 400))], {})
        made = library()(images=picture(700, 400), return_tensors="np")
        for name in self.inputs:
            np.testing.assert_allclose(array(own, name), self.theirs(made, name), atol=1e-5)

    @pytest.mark.parametrize("size", SHAPES)
    def test_slices(self, size: tuple[int, int], tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(*size))], {})
        made = library()(images=picture(*size), return_tensors="np")
        for name in self.inputs:
            np.testing.assert_allclose(array(own, name), self.theirs(made, name), atol=1e-5)
        assert own.num_tokens == self.num_tokens(made)

    @pytest.mark.parametrize(
        "text",
        [
            f"{MARK}\nthe of",
            f"the {MARK}in{MARK}",
            f"<|im_start|>user\n{MARK}\n{MARK}\nthe",
            MARK,
            f"({MARK})",
        ],
    )
    @pytest.mark.parametrize("counts", [True, False])
    @pytest.mark.parametrize("as_token", [True, False])
    def test_prompts_are_the_published_ones(
        self, text: str, counts: bool, as_token: bool, tmp_path: Path
    ) -> None:
        theirs = library(use_image_id=counts)
        theirs.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        images = [picture(500, 900), picture(40, 90)][: text.count(MARK)]
        media = processor.process([item(image) for image in images], {})
        first, *others = text.split(MARK)
        expected = first
        for index, (image, other) in enumerate(zip(images, others, strict=True)):
            made = theirs(images=image, return_tensors="np")
            one = written(made["grids"][0], index, 64)
            expected += (one if counts else one.partition("</image_id>")[2]) + other
        placed = processor.place(ids(text.replace(MARK, "<unk>") if as_token else text), media)
        assert placed.token_ids == ids(expected)
        vectors = {
            offset + first + at
            for one, offset in zip(media, placed.offsets, strict=True)
            for first, number in one.runs
            for at in range(number)
        }
        [unk] = ids("<unk>")
        assert vectors == {at for at, token in enumerate(ids(expected)) if token == unk}

    def test_a_chat_has_an_image_in_front_of_a_line(self, tmp_path: Path) -> None:
        """Parts of a message are joined by line ends, as in the published class."""
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(37, 61))], {})
        text = "\n".join((processor.placeholder("image", 0), "the of"))
        expected = written([0, 0], 0, 64) + "\nthe of"
        assert processor.place(ids(text), media).token_ids == ids(expected)

    def test_text_alone_is_left(self, tmp_path: Path) -> None:
        tokens = ids(f"the {MARK} of")
        placed = processor_for(self.architecture, self.config, tmp_path).place(tokens, [])
        assert placed.token_ids == tokens

    def test_options(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)

        def slices(image: Any = None, **options: Any) -> int:
            (made,) = processor.process([item(image or picture(1300, 1300))], options)
            return len(array(made, "tgt_sizes"))

        assert slices() == 10
        assert slices(max_slice_nums=4) == 5
        assert slices(max_slice_nums=1) == 1
        for value in (0, 10, "4", True):
            with pytest.raises(RequestError, match=f"max_slice_nums = {value!r}"):
                slices(max_slice_nums=value)
        with pytest.raises(RequestError, match="image of 1 x 201"):
            slices(picture(201, 1))

    @pytest.mark.parametrize(
        ("settings", "named"),
        [
            ({"patch_size": 16}, "patch_size = 16"),
            ({"image_feature_size": 32}, "image_feature_size = 32"),
            ({"max_slice_nums": 0}, "max_slice_nums = 0"),
            ({"slice_start": "<part>"}, "<part>"),
            ({"unk": ""}, "unk = ''"),
            ({"slice_mode": False}, "slice_mode = False"),
            ({"norm_mean": 0.5}, "image_mean = 0.5"),
        ],
    )
    def test_what_is_refused(self, settings: Any, named: str, tmp_path: Path) -> None:
        library(**settings).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, self.config, tmp_path)


class TestMiniCPMV25:
    """Slices are images between two tokens; a config without a version is one of 2.5."""

    config: ClassVar = {
        "query_num": 96,
        "vision_config": {"model_type": "idefics2", "patch_size": 14},
    }

    @pytest.fixture
    def processor(self, tmp_path: Path) -> Any:
        library(image_feature_size=96).save_pretrained(tmp_path)
        stated = json.loads((tmp_path / "preprocessor_config.json").read_text())
        stated.pop("use_image_id", None)
        (tmp_path / "preprocessor_config.json").write_text(json.dumps(stated))
        return processor_for("MiniCPMV", self.config, tmp_path)

    @pytest.mark.parametrize("size", [(40, 900), (700, 1009), (2000, 2000), (30, 50)])
    def test_slices_and_tokens(self, size: tuple[int, int], processor: Any) -> None:
        (own,) = processor.process([item(picture(*size))], {})
        made = library()(images=picture(*size), return_tensors="np")
        values = np.asarray(made["pixel_values"])[0]
        values = values.reshape(3, 14, -1, 14).transpose(2, 0, 1, 3).reshape(-1, 3 * 14 * 14)
        np.testing.assert_allclose(array(own, "pixel_values"), values, atol=1e-5)
        assert array(own, "tgt_sizes").tolist() == np.asarray(made["target_sizes"]).tolist()
        one = f"<image>{'<unk>' * 96}</image>"
        rows, columns = made["grids"][0]
        cut = "\n".join([one * columns] * rows)
        assert list(own.token_ids) == ids(one + (f"<slice>{cut}</slice>" if rows else ""))

    def test_prompts(self, processor: Any) -> None:
        media = processor.process([item(picture(30, 50)), item(picture(60, 50))], {})
        one = f"<image>{'<unk>' * 96}</image>"
        placed = processor.place(ids(f"the {MARK}\nof {MARK}in"), media)
        assert list(placed.token_ids) == [
            *ids("the "), *ids(one), *ids("\nof "), *ids(one), *ids("in")
        ]  # fmt: skip
        assert tuple(processor.modalities()) == ("image",)

    def test_numbers_are_refused(self, tmp_path: Path) -> None:
        library(use_image_id=True).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="use_image_id = True"):
            processor_for("MiniCPMV", {**self.config, "query_num": 64}, tmp_path)


class TestVideos:
    """A frame is a picture that is not cut."""

    config: ClassVar = TestMiniCPMV.config

    @pytest.fixture
    def processor(self, tmp_path: Path) -> Any:
        library().save_pretrained(tmp_path)
        return processor_for("MiniCPMV", self.config, tmp_path)

    def film(self, count: int, height: int, width: int) -> MediaItem:
        frames = np.stack(
            [np.asarray(picture(height + i, width)) for i in range(count)][:1] * count
        )
        frames[1:] = frames[1:, ::-1]
        return MediaItem("video", frames, content_hash("video", frames), {})

    @pytest.mark.parametrize("size", [(64, 90), (700, 500)])
    def test_numbers(self, size: tuple[int, int], processor: Any) -> None:
        film = self.film(3, *size)
        (own,) = processor.process([film], {})
        made = library()(
            images=[Image.fromarray(frame) for frame in film.data],
            max_slice_nums=1,
            return_tensors="np",
        )
        values = np.asarray(made["pixel_values"])[0]
        values = values.reshape(3, 14, -1, 14).transpose(2, 0, 1, 3).reshape(-1, 3 * 14 * 14)
        np.testing.assert_allclose(array(own, "pixel_values_videos"), values, atol=1e-5)
        assert array(own, "tgt_sizes").tolist() == np.asarray(made["target_sizes"]).tolist()
        assert list(own.token_ids) == ids(f"<image>{'<unk>' * 64}</image>") * 3

    def test_prompts(self, processor: Any) -> None:
        media = processor.process([self.film(2, 50, 60), item(picture(50, 60))], {})
        frame = f"<image>{'<unk>' * 64}</image>"
        image = f"<image_id>0</image_id>{frame}"
        placed = processor.place(ids(f"the (<video>./</video>)\nof {MARK}in"), media)
        assert placed.token_ids == [
            *ids("the "), *ids(frame * 2), *ids("\nof "), *ids(image), *ids("in"),
        ]  # fmt: skip
        (film,) = media[:1]
        placed = processor.place(ids("(<video>./</video>)"), [film])
        assert placed.token_ids == ids(frame * 2)
        with pytest.raises(RequestError, match="must be one for each"):
            processor.place(ids("the of"), [film])

    def test_the_largest(self, processor: Any) -> None:
        found = processor.largest("video", {"num_frames": 8, "num_tokens": 200})
        assert found.num_tokens == 3 * 66
