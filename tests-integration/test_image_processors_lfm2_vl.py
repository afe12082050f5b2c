"""LFM2-VL's image processor beside the library's: grids, numbers, prompts.

The library's takes torchvision, which is not installed: its resampling is Pillow's here; everything else is
its own code.
"""

from __future__ import annotations

import importlib
import json
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from test_image_processors import ProcessorConformance, array, item, picture
from test_image_processors_llama4 import normalize, resize
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.tiles.lfm2_vl import nearest_grid

SPECIAL = (
    "<|startoftext|>", "<image>", "<|image_start|>", "<|image_end|>", "<|img_thumbnail|>",
    *(f"<|img_row_{row}_col_{column}|>" for row in range(1, 11) for column in range(1, 11)),
)  # fmt: skip
SMALL: Mapping[str, Any] = {
    "encoder_patch_size": 4, "tile_size": 32, "min_image_tokens": 4, "max_image_tokens": 16,
}  # fmt: skip
KEYS = (
    "downsample_factor", "do_image_splitting", "min_tiles", "max_tiles", "use_thumbnail", "min_image_tokens",
    "max_image_tokens", "encoder_patch_size", "tile_size", "max_pixels_tolerance", "do_rescale",
    "rescale_factor", "do_normalize", "image_mean", "image_std", "resample",
)  # fmt: skip


@cache
def module() -> Any:
    """transformers' image processor, which imports torchvision at its top; it uses it for types alone."""
    importlib.import_module("transformers.image_processing_backends")  # looks for torchvision
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[2]].functional = types.SimpleNamespace()  # type: ignore[attr-defined]
    try:
        return importlib.import_module("transformers.models.lfm2_vl.image_processing_lfm2_vl")
    finally:
        for name in missing:
            del sys.modules[name]


@cache
def tokenizer() -> Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet)}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


IMAGE: int = tokenizer().token_to_id("<image>")


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text).ids
    return found


def library(**stated: Any) -> Any:
    """The library's processor with another way to resize; of one image."""
    own = module().Lfm2VlImageProcessor
    base: Any = own.__mro__[1]

    class OnPillow(own):  # type: ignore[misc]
        def __init__(self, **settings: Any) -> None:
            self.stated = settings
            for key, value in settings.items():
                setattr(self, key, value)

        def rescale_and_normalize(self, x: Tensor, *_: Any) -> Tensor:
            mean, std = (list(getattr(self, key)) for key in ("image_mean", "image_std"))
            return normalize(x.float() * self.rescale_factor, mean, std)

        def save_pretrained(self, folder: Any) -> None:
            Path(folder).mkdir(exist_ok=True)
            tokenizer().save(str(Path(folder) / "tokenizer.json"))
            (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.stated))

        def __call__(self, images: Any, return_tensors: str = "pt") -> dict[str, Any]:
            given = {key: getattr(self, key) for key in KEYS}
            given |= {"do_resize": True, "return_row_col_info": True, "do_pad": True}
            pixels = torch.tensor(np.asarray(images)).permute(2, 0, 1)
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(base, "resize", staticmethod(resize))
                made = self._preprocess(
                    [pixels], return_tensors=None, disable_grouping=True, **given
                )
            return dict(made)

    return OnPillow(**stated)


def text_of(made: Mapping[str, Any], processor: Any, marked: bool = True) -> str:
    """What the library puts in place of an image."""
    library = importlib.import_module("transformers.models.lfm2_vl.processing_lfm2_vl")
    own = library.Lfm2VlProcessor.__new__(library.Lfm2VlProcessor)
    own.image_processor, own.image_token = processor, "<image>"
    own.image_start_token, own.image_end_token = "<|image_start|>", "<|image_end|>"
    own.image_thumbnail_token = "<|img_thumbnail|>"
    found: str = own.replace_image_token(made, 0, use_image_special_tokens=marked)
    return found


class TestLfm2Vl(ProcessorConformance):
    architecture = "Lfm2VlForConditionalGeneration"
    config: ClassVar = {"image_token_id": IMAGE, "vision_config": {"patch_size": 16}}
    settings: ClassVar = (
        {},
        {"tile_size": 64, "max_image_tokens": 20, "min_image_tokens": 10, "max_tiles": 5},
        {"tile_size": 64, "max_image_tokens": 20, "min_image_tokens": 1, "use_thumbnail": False},
        {"do_image_splitting": False, "max_image_tokens": 100, "image_mean": [0.4] * 3},
    )
    inputs = ("pixel_values", "spatial_shapes")

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        return library(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        if name == "pixel_values":
            found: np.ndarray[Any, Any] = made[name][made["pixel_attention_mask"].bool()].numpy()
            return found
        return np.asarray(made[name])

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        processor = types.SimpleNamespace(**self.used)
        return len(ids(text_of(made, processor)))

    @property
    def used(self) -> dict[str, Any]:
        kind = module().Lfm2VlImageProcessor
        keys = ("use_thumbnail", "tile_size", "downsample_factor", "encoder_patch_size")
        return {key: getattr(kind, key) for key in keys}

    @pytest.mark.parametrize("size", [(37, 61), (90, 31), (300, 211)])
    def test_numbers_are_the_librarys(self, size: tuple[int, int], tmp_path: Path) -> None:
        for number, stated in enumerate(self.settings):
            theirs, folder = library(**stated), tmp_path / str(number)
            theirs.save_pretrained(folder)
            (own,) = processor_for(self.architecture, self.config, folder).process(
                [item(picture(*size))], {}
            )
            made = theirs(picture(*size))
            for name in self.inputs:
                np.testing.assert_allclose(
                    array(own, name), self.theirs(made, name), atol=1e-5, rtol=0
                )
            assert list(own.token_ids) == ids(text_of(made, theirs))

    def test_an_image_that_is_cut(self, tmp_path: Path) -> None:
        """By the library's defaults."""
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(700, 1100))], {})
        theirs = library()
        made = theirs(picture(700, 1100))
        for name in self.inputs:
            np.testing.assert_allclose(array(own, name), self.theirs(made, name), atol=1e-5)
        assert list(own.token_ids) == ids(text_of(made, theirs))
        assert array(own, "spatial_shapes").tolist() == [[32, 32]] * 6 + [[24, 40]]

    @given(st.integers(1, 3000), st.integers(1, 3000), st.integers(2, 4), st.integers(4, 12))
    @examples(max_examples=200, deadline=None)
    def test_grids(self, height: int, width: int, least: int, most: int) -> None:
        theirs = module().Lfm2VlImageProcessor
        made = theirs._get_grid_layout(library(), height, width, least, most, 512)
        assert nearest_grid((height, width), 512, least, most) == made[:2]

    @pytest.mark.parametrize("marked", [True, False])
    def test_prompts(self, marked: bool, tmp_path: Path) -> None:
        (tmp_path / "processor_config.json").write_text(
            json.dumps({"use_image_special_tokens": marked})
        )
        theirs = library(**SMALL)
        theirs.save_pretrained(tmp_path)
        config = {**self.config, "vision_config": {"patch_size": 4}}
        processor = processor_for(self.architecture, config, tmp_path)
        images = [picture(120, 90), picture(30, 30)]
        media = processor.process([item(image) for image in images], {})
        placed = processor.place(ids("<|startoftext|>the <image>of<image>in"), media)
        texts = [text_of(theirs(image), theirs, marked) for image in images]
        assert placed.token_ids == ids(f"<|startoftext|>the {texts[0]}of{texts[1]}in")
        at = {
            offset + first + i
            for one, offset in zip(media, placed.offsets, strict=True)
            for first, number in one.runs
            for i in range(number)
        }
        assert at == {i for i, token in enumerate(placed.token_ids) if token == IMAGE}
        shapes = sum(int(array(one, "spatial_shapes").prod(1).sum()) for one in media)
        assert len(at) == shapes // 4

    def test_options(self, tmp_path: Path) -> None:
        library(**SMALL).save_pretrained(tmp_path)
        config = {**self.config, "vision_config": {"patch_size": 4}}
        processor = processor_for(self.architecture, config, tmp_path)

        def shapes(image: Any = None, **options: Any) -> list[list[int]]:
            (made,) = processor.process([item(image or picture(90, 90))], options)
            found: list[list[int]] = array(made, "spatial_shapes").tolist()
            return found

        assert shapes() == [[8, 8]] * 10
        assert shapes(max_tiles=4) == [[8, 8]] * 5
        assert shapes(do_image_splitting=False) == [[8, 8]]
        assert shapes(do_image_splitting=False, max_image_tokens=9) == [[6, 6]]
        assert shapes(picture(8, 8), min_image_tokens=9) == [[6, 6]]
        for name, value in (
            ("max_tiles", 1), ("max_tiles", 11), ("max_image_tokens", 17), ("max_image_tokens", 3),
            ("min_image_tokens", 0), ("min_image_tokens", "9"), ("do_image_splitting", 1),
        ):  # fmt: skip
            with pytest.raises(RequestError, match=f"{name} = {value!r}"):
                shapes(**{name: value})
        with pytest.raises(RequestError, match="image of 1 x 201"):
            shapes(picture(201, 1))

    @pytest.mark.parametrize(
        ("stated", "named"),
        [
            ({"encoder_patch_size": 14}, "encoder_patch_size = 14"),
            ({"downsample_factor": 3}, "downsample_factor = 3"),
            ({"tile_size": 520}, "tile_size = 520"),
            ({"min_tiles": 1}, "min_tiles = 1"),
            ({"max_tiles": 1}, "min_tiles = 2"),
            ({"max_pixels_tolerance": "2"}, "max_pixels_tolerance = '2'"),
            ({"max_image_tokens": 0}, "max_image_tokens = 0"),
            ({"max_image_tokens": 63}, "min_image_tokens = 64"),
        ],
    )
    def test_what_is_refused(self, stated: Any, named: str, tmp_path: Path) -> None:
        library(**stated).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, self.config, tmp_path)
