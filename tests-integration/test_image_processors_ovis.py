"""Ovis' image processors: transformers' beside that library's, the published one beside a plain reading."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from test_image_processors import ProcessorConformance, array, item, picture
from test_image_processors_minicpmv import tokenizer
from test_video_processors import VALUES, clip, video
from tokenizers import AddedToken

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

TOKENS = {"<image>": 20, "<IMG_ATOM>": 21, "<IMG_START>": 22, "<IMG_GRID>": 23, "<IMG_COL>": 24,
          "<IMG_ROW>": 25, "<IMG_END>": 26}  # fmt: skip


class TestOvis2(ProcessorConformance):
    architecture = "Ovis2ForConditionalGeneration"
    config: ClassVar = {
        "image_token_id": 21, "visual_indicator_token_ids": [22, 23, 24, 25, 26],
        "vision_config": {"image_size": 56, "patch_size": 14, "hidden_stride": 2},
    }  # fmt: skip
    settings: ClassVar = (
        {},
        {"crop_to_patches": True},
        {"crop_to_patches": True, "max_patches": 4},
        {"crop_to_patches": True, "use_covering_area_grid": False, "min_patches": 2},
    )

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.ovis2.image_processing_pil_ovis2 import Ovis2ImageProcessorPil

        class InFolder(Ovis2ImageProcessorPil):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                add_files(Path(folder))
                return super().save_pretrained(folder, **kwargs)

        return InFolder(**{"size": {"height": 56, "width": 56}, **settings})

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        return np.asarray(made[name])

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(ids_of(made["grids"][0]))

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Tiles of 384."""
        add_files(tmp_path)
        config = {
            **self.config,
            "vision_config": {"image_size": 384, "patch_size": 96, "hidden_stride": 2},
        }
        (own,) = processor_for(self.architecture, config, tmp_path).process(
            [item(picture(70, 40))], {}
        )
        made = self.library(size={"height": 384, "width": 384})(
            images=picture(70, 40), return_tensors="pt"
        )
        np.testing.assert_allclose(
            array(own, "pixel_values"), made["pixel_values"], atol=1e-5, rtol=0
        )

    @pytest.mark.parametrize("size", [(56, 168), (200, 90), (40, 40)])
    def test_tokens(self, size: tuple[int, int], tmp_path: Path) -> None:
        library = self.library(crop_to_patches=True)
        library.save_pretrained(tmp_path)
        (own,) = processor_for(self.architecture, self.config, tmp_path).process(
            [item(picture(*size))], {}
        )
        grid = library(images=picture(*size), return_tensors="pt")["grids"][0]
        assert list(own.token_ids) == ids_of(grid)
        assert own.runs == ((0, own.num_tokens),)
        marks = [-1 if token == 21 else token - 22 for token in own.token_ids]
        assert array(own, "marks").tolist() == marks

    def test_options(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)

        def tiles(**options: Any) -> int:
            (own,) = processor.process([item(picture(160, 160))], options)
            return len(array(own, "pixel_values"))

        assert tiles() == 1
        assert tiles(crop_to_patches=True) > 5
        assert tiles(crop_to_patches=True, max_patches=4) == 5
        for name, value in (
            ("max_patches", 13),
            ("crop_to_patches", 1),
            ("use_covering_area_grid", "x"),
        ):
            with pytest.raises(RequestError, match=name):
                tiles(**{"crop_to_patches": True, name: value})

    def test_another_number_of_words_is_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        (tmp_path / "processor_config.json").write_text('{"image_seq_length": 9}')
        with pytest.raises(UnsupportedModel, match="image_seq_length = 9"):
            processor_for(self.architecture, self.config, tmp_path)


def add_files(folder: Path) -> None:
    tokens = {str(number): {"content": token} for token, number in TOKENS.items()}
    (folder / "tokenizer_config.json").write_text(json.dumps({"added_tokens_decoder": tokens}))
    (folder / "processor_config.json").write_text('{"image_seq_length": 4}')


def ids_of(grid: Any) -> list[int]:
    """As the library's processor writes them."""
    rows, columns = (int(x) for x in grid)
    found = [22, *[21] * 4, 23]
    if rows * columns > 1:
        lines = [[*[21] * 4, 24] * columns for _ in range(rows)]
        found += [token for line in lines for token in [*line[:-1], 25]][:-1]
    return [*found, 26]


OVIS: dict[str, Any] = {
    "llm_config": {"model_type": "qwen2"},
    "visual_tokenizer_config": {
        "hidden_stride": 2, "backbone_config": {"model_type": "aimv2", "image_size": 56, "patch_size": 14},
    },
}  # fmt: skip


def published(folder: Path, **settings: Any) -> Path:
    from transformers import CLIPImageProcessor

    CLIPImageProcessor(
        **{"size": {"shortest_edge": 56}, "do_center_crop": False, **settings}
    ).save_pretrained(folder)
    made = tokenizer()
    made.add_special_tokens([AddedToken("<|image_pad|>", normalized=False, special=True)])
    made.save(str(folder / "tokenizer.json"))
    return folder


def expected(image: Image.Image, boxes: list[tuple[int, int, int, int]]) -> torch.Tensor:
    """Each part as the library's processor resizes it to its own proportions, in an empty tile."""
    from transformers import CLIPImageProcessor

    library, found = CLIPImageProcessor(do_center_crop=False), []
    for box in boxes:
        piece = image.crop(box)
        width, height = piece.size
        size = (56, int(width / height * 56)) if height > width else (int(height / width * 56), 56)
        made = library(
            images=piece, size={"height": size[0], "width": size[1]}, return_tensors="pt"
        )["pixel_values"][0]
        tile = torch.zeros(3, 56, 56)
        top, left = (56 - size[0]) // 2, (56 - size[1]) // 2
        tile[:, top : top + size[0], left : left + size[1]] = made
        found.append(tile)
    return torch.stack(found)


@pytest.mark.parametrize(
    ("size", "boxes", "grid"),
    [
        ((50, 40), [(0, 0, 40, 50)], (1, 1)),
        ((50, 111), [(0, 0, 111, 50), (0, 0, 55, 50), (55, 0, 111, 50)], (1, 2)),
        ((109, 30), [(0, 0, 30, 109), (0, 0, 30, 54), (0, 54, 30, 109)], (2, 1)),
    ],
)
def test_published(size: Any, boxes: Any, grid: Any, tmp_path: Path) -> None:
    image, processor = picture(*size), processor_for("Ovis", OVIS, published(tmp_path))
    (own,) = processor.process([item(image)], {})
    np.testing.assert_allclose(
        array(own, "pixel_values"), expected(image, boxes), atol=1e-5, rtol=0
    )
    marks = [-1 if token == 21 else token - 22 for token in ids_of(grid)]
    assert array(own, "marks").tolist() == marks
    assert set(own.token_ids) == {processor.placeholder_id}  # type: ignore[attr-defined]
    assert own.runs == ((0, own.num_tokens),)


def test_published_prompts(tmp_path: Path) -> None:
    """``<image>`` is text; what stands around it becomes tokens by itself."""
    processor = processor_for("Ovis", OVIS, published(tmp_path))
    media = processor.process([item(picture(30, 40)), item(picture(40, 30))], {})
    made = tokenizer()

    def ids(text: str) -> list[int]:
        return list(made.encode(text, add_special_tokens=False).ids)

    made.add_special_tokens([AddedToken("<|image_pad|>", normalized=False, special=True)])
    placed = processor.place(ids("the [x]\nof [x]in".replace("[x]", "<img>")), [])
    assert placed.offsets == []
    mark = made.token_to_id("<|image_pad|>")
    items = [list(own.token_ids) for own in media]
    for text in ("the <|image_pad|>\nof <|image_pad|>in",):
        placed = processor.place(ids(text), media)
        first, second, third = text.split("<|image_pad|>")
        assert placed.token_ids == [*ids(first), *items[0], *ids(second), *items[1], *ids(third)]
    assert mark == items[0][0]


def test_published_parts_are_bounded(tmp_path: Path) -> None:
    processor = processor_for("Ovis", OVIS, published(tmp_path))
    most = processor.largest("image", {}).num_tokens
    for size in ((600, 600), (900, 300), (200, 1000)):
        (own,) = processor.process([item(picture(*size))], {})
        assert own.num_tokens <= most
        assert len(array(own, "pixel_values")) <= 10
    (own,) = processor.process([item(picture(600, 600))], {"max_partition": 2})
    assert len(array(own, "pixel_values")) <= 3
    with pytest.raises(RequestError, match="max_partition = 10"):
        processor.process([item(picture(60, 60))], {"max_partition": 10})
    with pytest.raises(RequestError, match="too narrow") as caught:
        processor.process([item(picture(1, 900))], {})
    assert caught.value.param == "multi_modal_data", "for which a chat names the part"


@pytest.mark.parametrize(
    ("config", "settings", "named"),
    [
        ({"llm_config": {"model_type": "gpt2"}}, {}, "llm_config.model_type = 'gpt2'"),
        ({}, {"size": {"shortest_edge": 28}}, "size = 28"),
        ({}, {"do_center_crop": True}, "do_center_crop"),
    ],
)
def test_published_refused(config: Any, settings: Any, named: str, tmp_path: Path) -> None:
    with pytest.raises(UnsupportedModel, match=named):
        processor_for("Ovis", {**OVIS, **config}, published(tmp_path, **settings))


def resized_25(height: int, width: int, least: int, most: int) -> tuple[int, int]:
    """Ovis 2.5's formula of sizes, by a plain reading."""
    side = 32
    if min(height, width) < side and height < width:
        height, width = side, round(side / height * width)
    elif min(height, width) < side:
        height, width = round(side / width * height), side
    elif max(height, width) / min(height, width) > 200:
        height, width = min(height, 200 * width), min(width, 200 * height)
    found = round(height / side) * side, round(width / side) * side
    if found[0] * found[1] > most:
        factor = (height * width / most) ** 0.5
        found = int(height / factor / side) * side, int(width / factor / side) * side
    elif found[0] * found[1] < least:
        factor = (least / (height * width)) ** 0.5
        up, across = -(-height * factor // side), -(-width * factor // side)
        found = int(up) * side, int(across) * side
    return found


class TestOvis25:
    """Beside a plain reading of the published code, on SigLIP's processor of transformers."""

    @pytest.fixture
    def processor(self, tmp_path: Path) -> Any:
        self.tokens = tokenizer()
        marks = [AddedToken(text, special=True) for text in ("<|image_pad|>", "<|video_pad|>")]
        self.tokens.add_special_tokens(marks)
        self.tokens.save(str(tmp_path / "tokenizer.json"))
        (tmp_path / "preprocessor_config.json").write_text('{"size": {"height": 9, "width": 9}}')
        config = {"vit_config": {"patch_size": 16, "hidden_stride": 2}}
        return processor_for("Ovis2_5", config, tmp_path)

    def patches(self, frames: Any, least: int, most: int) -> tuple[Any, list[int]]:
        from transformers import SiglipImageProcessor

        height, width = resized_25(frames[0].height, frames[0].width, least, most)
        library = SiglipImageProcessor(size={"height": height, "width": width}, resample=3)
        rows, columns = height // 16, width // 16
        x = torch.tensor(np.asarray(library(images=frames, return_tensors="np")["pixel_values"]))
        cut = x.view(len(frames), 3, rows // 2, 2, 16, columns // 2, 2, 16)
        return cut.permute(0, 2, 5, 3, 6, 1, 4, 7).reshape(-1, 768), [len(frames), rows, columns]

    @pytest.mark.parametrize("size", [(61, 37), (300, 211), (20, 300), (9, 3), (40, 9000)])
    def test_images(self, size: tuple[int, int], processor: Any) -> None:
        for options, bounds in (
            ({}, (448 * 448, 1344 * 1792)),
            ({"min_pixels": 5000, "max_pixels": 20_000}, (5000, 20_000)),
        ):
            if options and max(size) == 9000:
                with pytest.raises(RequestError, match="9000 x 40 pixels: is too narrow"):
                    processor.process([item(picture(*size))], options)
                continue
            (own,) = processor.process([item(picture(*size))], options)
            values, grid = self.patches([picture(*size)], *bounds)
            np.testing.assert_allclose(array(own, "pixel_values"), values, atol=1e-5, rtol=0)
            assert array(own, "image_grid_thw").tolist() == grid
            assert own.num_tokens == len(values) // 4 + 2

    def test_videos_and_prompts(self, processor: Any) -> None:
        options = {"min_pixels": 5000, "max_pixels": 20_000}
        frames = clip(3, 61, 90)
        items = [item(picture(40, 56)), video(frames), item(picture(30, 30))]
        media = processor.process(items, options)
        values, grid = self.patches([Image.fromarray(x) for x in frames], 5000, 20_000)
        np.testing.assert_allclose(array(media[1], VALUES), values, atol=1e-5, rtol=0)
        assert array(media[1], "video_grid_thw").tolist() == grid
        assert media[1].num_tokens == len(values) // 4 + 2
        image, film = (self.tokens.token_to_id(f"<|{kind}_pad|>") for kind in ("image", "video"))
        counts = [one.num_tokens for one in media]
        pieces = [
            self.tokens.encode(x, add_special_tokens=False).ids for x in ("the ", " in", "of")
        ]
        first, second, third = pieces
        expected = [
            *first, *[image] * counts[0], *second, *[film] * counts[1], *[image] * counts[2], *third
        ]  # fmt: skip
        for texts in (("<image>", "<video>"), ("<|image_pad|>", "<|video_pad|>")):
            text = "the I inFIof".replace("F", texts[1]).replace("I", texts[0])
            ids = self.tokens.encode(text, add_special_tokens=False).ids
            placed = processor.place(ids, media)
            assert placed.token_ids == expected
        assert placed.offsets[0] == len(first)
        largest = processor.largest("video", {"num_frames": 8, "num_tokens": 500})
        assert 300 < largest.num_tokens <= 500
        assert processor.largest("image", {}).num_tokens >= counts[0]
        assert processor.placeholder("video", 0) == "<|video_pad|>"
