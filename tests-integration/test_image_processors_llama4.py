"""Llama 4's image processor beside the library's: canvases, numbers, prompts.

The library's takes torchvision, which is not installed: its resampling, its padding and its normalization are
written here with Pillow and torch; everything else is its own code.
"""

from __future__ import annotations

import importlib
import sys
import types
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from PIL import Image
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from torch import Tensor
from torch.nn import functional

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.images.llama4 import canvas_of, canvases, fitted

SPECIAL = (
    "<|begin_of_text|>", "<|image_start|>", "<|image_end|>", "<|image|>", "<|patch|>",
    "<|tile_x_separator|>", "<|tile_y_separator|>",
)  # fmt: skip
SIDES = st.integers(1, 3000)


@cache
def module() -> Any:
    """transformers' image processor, which imports torchvision at its top."""
    importlib.import_module("transformers.image_processing_backends")  # looks for torchvision
    names = ("torchvision", "torchvision.transforms", "torchvision.transforms.v2")
    missing = [name for name in names if name not in sys.modules]
    for name in missing:
        sys.modules[name] = types.ModuleType(name)
    sys.modules[names[2]].functional = types.SimpleNamespace(pad=pad)  # type: ignore[attr-defined]
    try:
        return importlib.import_module("transformers.models.llama4.image_processing_llama4")
    finally:
        for name in missing:
            del sys.modules[name]


def pad(images: Tensor, padding: list[int], fill: Any) -> Tensor:
    """With black, at the right and below."""
    assert padding[:2] == [0, 0]
    assert not any(fill)
    return functional.pad(images, (0, padding[2], 0, padding[3]))


def resize(image: Tensor, size: Any, resample: int | None = None, **_: Any) -> Tensor:
    """[N, 3, H, W] uint8, by Pillow."""
    wanted = (int(size.width), int(size.height))
    made = [
        np.asarray(Image.fromarray(one.permute(1, 2, 0).numpy()).resize(wanted, resample))
        for one in image
    ]
    return torch.from_numpy(np.stack(made)).permute(0, 3, 1, 2)


def normalize(image: Tensor, mean: Any, std: Any) -> Tensor:
    """In the image's own type."""
    means, stds = (torch.tensor(x, dtype=image.dtype).view(-1, 1, 1) for x in (mean, std))
    return (image - means) / stds


@cache
def tokenizer() -> Tokenizer:
    made = Tokenizer(models.BPE(vocab={c: i for i, c in enumerate(alphabet())}, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


def alphabet() -> list[str]:
    return sorted(pre_tokenizers.ByteLevel.alphabet())


def ids(text: str) -> list[int]:
    found: list[int] = tokenizer().encode(text, add_special_tokens=False).ids
    return found


[PATCH] = ids("<|patch|>")
CONFIG: Mapping[str, Any] = {
    "image_token_index": PATCH,
    "vision_config": {"model_type": "llama4_vision_model", "image_size": 336, "patch_size": 14},
}


def library(**changed: Any) -> Any:
    class WithTokenizer(module().Llama4ImageProcessor):  # type: ignore[misc,name-defined]
        resize = staticmethod(resize)
        normalize = staticmethod(normalize)

        def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
            Path(folder).mkdir(exist_ok=True)
            tokenizer().save(str(Path(folder) / "tokenizer.json"))
            return super().save_pretrained(folder, **kwargs)

    return WithTokenizer(**changed)


def whole(image_processor: Any, **changed: Any) -> Any:
    """The library's whole processor."""
    from transformers import PreTrainedTokenizerFast
    from transformers.models.llama4.processing_llama4 import Llama4Processor

    made = Llama4Processor.__new__(Llama4Processor)
    words = PreTrainedTokenizerFast(tokenizer_object=tokenizer())
    Llama4Processor.__init__(made, image_processor, words, **changed)
    return made


class TestLlama4(ProcessorConformance):
    architecture = "Llama4ForConditionalGeneration"
    config: ClassVar = CONFIG
    settings: ClassVar = (
        {},
        {"max_patches": 5, "resize_to_max_canvas": True},
        {"max_patches": 1, "resample": 3},
        {"image_mean": [0.48, 0.45, 0.4], "image_std": [0.27, 0.26, 0.3], "rescale_factor": 0.003},
    )

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **changed: Any) -> Any:
        return library(**changed)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = made[name].float().numpy()
        return found

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(ids(whole(library()).replace_image_token(made, 0)))

    @pytest.mark.keep(4, every_value=False)
    @pytest.mark.parametrize("size", [(40, 500), (700, 1009), (337, 335), (2100, 90), (336, 672)])
    @pytest.mark.parametrize("to_largest", [False, True])
    def test_canvases_of_several_tiles(
        self, size: tuple[int, int], to_largest: bool, tmp_path: Path
    ) -> None:
        theirs = library(resize_to_max_canvas=to_largest)
        theirs.save_pretrained(tmp_path)
        (own,) = processor_for(self.architecture, self.config, tmp_path).process(
            [item(picture(*size))], {}
        )
        made = theirs(images=picture(*size), return_tensors="pt")
        np.testing.assert_array_equal(array(own, "pixel_values"), self.theirs(made, "pixel_values"))
        assert own.token_ids == tuple(ids(whole(theirs).replace_image_token(made, 0)))

    def test_resampled_bytes_are_the_librarys_within_two_steps(self) -> None:
        """The library resamples bytes with torch, in narrower integers than Pillow's."""
        image = np.array(picture(90, 131))
        mine = np.asarray(Image.fromarray(image).resize((335, 230), Image.Resampling.BILINEAR))
        theirs = functional.interpolate(
            torch.from_numpy(image).permute(2, 0, 1)[None], (230, 335), mode="bilinear",
            antialias=True, align_corners=False,
        )[0].permute(1, 2, 0)  # fmt: skip
        assert np.abs(mine.astype(int) - theirs.numpy().astype(int)).max() <= 2

    @pytest.mark.parametrize(
        "text", ["<|begin_of_text|>a <|image|> b", "<|image|><|image|>", "{<|image|>}"]
    )
    def test_prompts_are_the_librarys(self, text: str, tmp_path: Path) -> None:
        theirs = library(max_patches=4)
        theirs.save_pretrained(tmp_path)
        images = [picture(500, 800), picture(31, 90)][: text.count("<|image|>")]
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(image) for image in images], {})
        first, *others = text.split("<|image|>")
        expected = first
        for image, other in zip(images, others, strict=True):
            made = theirs(images=image, return_tensors="pt")
            expected += whole(theirs).replace_image_token(made, 0) + other
        placed = processor.place(ids(text), media)
        assert placed.token_ids == ids(expected)
        vectors = {
            offset + first + at
            for one, offset in zip(media, placed.offsets, strict=True)
            for first, number in one.runs
            for at in range(number)
        }
        assert vectors == {at for at, token in enumerate(ids(expected)) if token == PATCH}

    def test_options(self, tmp_path: Path) -> None:
        library(max_patches=8).save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)

        def tiles(**options: Any) -> int:
            (made,) = processor.process([item(picture(336, 3000))], options)
            return array(made, "pixel_values").shape[0]

        assert tiles() == 9
        assert tiles(max_patches=3) == 4
        for name, value in [("max_patches", 9), ("max_patches", 0), ("resize_to_max_canvas", 1)]:
            with pytest.raises(RequestError, match=f"{name} = {value}"):
                tiles(**{name: value})

    @pytest.mark.parametrize(
        ("change", "named"),
        [
            ({"size": {"height": 336, "width": 448}}, r"size = \(336, 448\)"),
            ({"size": {"height": 448, "width": 448}}, r"size = \(448, 448\)"),
            ({"max_patches": 0}, "max_patches = 0"),
            ({"do_resize": False}, "do_resize = False"),
            ({"do_rescale": False}, "do_rescale = False"),
        ],
    )
    def test_what_is_refused(self, change: Any, named: str, tmp_path: Path) -> None:
        library(**change).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, self.config, tmp_path)


@settings(max_examples=300, deadline=None)
@given(height=SIDES, width=SIDES, most=st.integers(1, 16), to_largest=st.booleans())
def test_sizes_are_the_librarys(height: int, width: int, most: int, to_largest: bool) -> None:
    from transformers.image_utils import SizeDict

    reference, side = module(), 336
    sizes = reference.find_supported_resolutions(most, SizeDict(height=side, width=side))
    assert sorted(sizes) == sorted(canvases(most, side))
    target = reference.get_best_fit((height, width), torch.tensor(sizes), to_largest)
    canvas = canvas_of((height, width), canvases(most, side), to_largest)
    assert canvas == tuple(target.tolist())
    inner = tuple(target) if to_largest else (
        min(max(height, side), target[0]), min(max(width, side), target[1])
    )  # fmt: skip
    found = reference.get_max_res_without_distortion((height, width), inner)
    expected = tuple(max(int(x), 1) for x in found)
    assert fitted((height, width), canvas, None if to_largest else side) == expected
