"""H2OVL's image processor beside a plain reading of what is published; what is cut once is InternVL's."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image
from test_image_processors import array, item, picture
from test_image_processors_internvl_chat import CONFIG, PER_TILE, ids, published, tokenizer

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for

SIDE = 56
H2OVL = {**CONFIG, "use_msac": True, "max_dynamic_patch": 6}
SHAPES = [(60, 60), (37, 61), (90, 31), (300, 211), (100, 200), (40, 500)]


@pytest.fixture
def processor(tmp_path: Path) -> Any:
    tokenizer().save(str(tmp_path / "tokenizer.json"))
    return processor_for("H2OVLChatModel", H2OVL, tmp_path)


def nearest(image: Image.Image, grids: list[tuple[int, int]]) -> tuple[int, int]:
    """The published rule, of grids by their number of tiles."""
    best, difference = (1, 1), float("inf")
    for columns, rows in grids:
        away = abs(image.width / image.height - columns / rows)
        large = image.width * image.height > 0.5 * SIDE * SIDE * columns * rows
        if away < difference or (away == difference and large):
            best, difference = (columns, rows), away
    return best


def cut_by(image: Image.Image, grid: tuple[int, int]) -> list[Image.Image]:
    """Tiles, and the whole behind more than one."""
    columns, rows = grid
    large = image.resize((columns * SIDE, rows * SIDE))
    boxes = [
        (c * SIDE, r * SIDE, (c + 1) * SIDE, (r + 1) * SIDE)
        for r in range(rows)
        for c in range(columns)
    ]
    found = [large.crop(box) for box in boxes]
    return found if len(found) == 1 else [*found, image.resize((SIDE, SIDE))]


def plain(image: Image.Image, most: int = 6) -> list[Image.Image]:
    grids = sorted(
        ((c, r) for c in range(1, most + 1) for r in range(1, most + 1) if c * r <= most),
        key=lambda grid: (grid[0] * grid[1], grid[0]),
    )
    first = nearest(image, grids)
    others = [g for g in grids if g[0] * g[1] >= 3 and first[0] % g[0] and first[1] % g[1]]
    once, again = cut_by(image, first), cut_by(image, nearest(image, others))
    return [*again[:-1], *once[:-1], again[-1]]


def numbers(tile: Image.Image) -> Any:
    mean, std = (np.array(x, np.float32) for x in ((0.485, 0.456, 0.406), (0.229, 0.224, 0.225)))
    return ((np.asarray(tile).astype(np.float32) / 255 - mean) / std).transpose(2, 0, 1)


@pytest.mark.parametrize("size", SHAPES)
def test_numbers_of_one_image(size: tuple[int, int], processor: Any) -> None:
    image = picture(*size)
    (own,) = processor.process([item(image)], {})
    expected = np.stack([numbers(tile) for tile in plain(image)])
    np.testing.assert_allclose(array(own, "pixel_values"), expected, atol=1e-5)
    placed = processor.place(ids("the <image>\nof"), [own])
    assert placed.token_ids == published("the <image>\nof", [len(expected)])


def test_options(processor: Any, tmp_path: Path) -> None:
    image = item(picture(100, 200))

    def count(**options: Any) -> int:
        (made,) = processor.process([image], options)
        return len(array(made, "pixel_values"))

    once = processor_for("InternVLChatModel", H2OVL, tmp_path).process([image], {})
    (own,) = processor.process([image], {"use_msac": False})
    assert own.inputs["pixel_values"] == once[0].inputs["pixel_values"]
    assert count(max_dynamic_patch=2) == 3
    assert count(dynamic_image_size=False) == 1
    assert count() > len(array(own, "pixel_values"))
    for name, value in (("use_msac", 1), ("dynamic_image_size", 0), ("max_dynamic_patch", 7)):
        with pytest.raises(RequestError, match=f"{name} = {value}"):
            count(**{name: value})


def test_several_images_are_cut_once(processor: Any) -> None:
    images = [item(picture(37, 61)), item(picture(60, 31))]
    with pytest.raises(RequestError, match='"use_msac": false'):
        processor.place(ids("<image><image>"), processor.process(images, {}))
    media = processor.process(images, {"use_msac": False})
    tiles = [len(array(one, "pixel_values")) for one in media]
    placed = processor.place(ids("<image>the<image>"), media)
    assert placed.token_ids == published("<image>the<image>", tiles)


def test_no_image_takes_more_than_the_largest(processor: Any) -> None:
    most = processor.largest("image", {}).num_tokens
    assert most == (6 + 6 + 1) * PER_TILE + 2
    for size in SHAPES:
        (own,) = processor.process([item(picture(*size))], {})
        assert own.num_tokens <= most
