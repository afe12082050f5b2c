"""Phi-3-vision's image processor: canvases and numbers beside a plain reading in torch of what is published,
prompts beside the published formula."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
import torch
from PIL import Image
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import (
    AddedToken,
    Tokenizer,
    decoders,
    models,
    normalizers,
    processors,
    trainers,
)

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SIDE, PER_TILE, ROWS = 28, 4, 2
CONFIG: Mapping[str, Any] = {"img_processor": {"image_size": SIDE, "patch_size": 7}}
SPECIAL = ("<s>", "<|image|>", "<|user|>", "<|end|>")
MEAN, STD = (0.48145466, 0.4578275, 0.40821073), (0.26862954, 0.26130258, 0.27577711)


@cache
def tokenizer(begins: bool = True, line_ends: bool = False) -> Tokenizer:
    """As Llama's: a space in front of each run, and a first token.

    Args:
        line_ends: special tokens swallow what is white behind them, as Phi-3's do.
    """
    made = Tokenizer(models.BPE(unk_token="<unk>"))
    made.normalizer = normalizers.Sequence(
        [normalizers.Prepend("▁"), normalizers.Replace(" ", "▁")]
    )
    made.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    lines = ["the of in <|image_1|> image_2 <| |> 0123456789\n the of" for _ in range(9)]
    trainer = trainers.BpeTrainer(vocab_size=90, special_tokens=["<unk>"], show_progress=False)
    made.train_from_iterator(lines, trainer)
    tokens = [AddedToken(x, normalized=False, special=True, rstrip=line_ends) for x in SPECIAL]
    made.add_special_tokens(tokens)
    if begins:
        first = [("<s>", made.token_to_id("<s>"))]
        made.post_processor = processors.TemplateProcessing(single="<s> $A", special_tokens=first)
    return made


class Plain:
    """The published image processor, by its description."""

    def __init__(
        self, num_crops: int = 1, image_mean: Any = MEAN, image_std: Any = STD, side: int = SIDE
    ) -> None:
        self.side = side
        self.settings = {"num_crops": num_crops, "image_mean": image_mean, "image_std": image_std}

    def save_pretrained(self, folder: Any) -> None:
        Path(folder).mkdir(exist_ok=True)
        tokenizer().save(str(Path(folder) / "tokenizer.json"))
        (Path(folder) / "preprocessor_config.json").write_text(json.dumps(self.settings))

    def canvas(self, image: Image.Image) -> Image.Image:
        turned = image.width < image.height
        if turned:
            image = image.transpose(Image.Transpose.TRANSPOSE)
        ratio, most = image.width / image.height, self.settings["num_crops"]
        columns = max(c for c in range(1, most + 1) if c * math.ceil(c / ratio) <= most)
        width = columns * self.side
        height = int(width / ratio)
        whole = Image.new(
            "RGB", (width, math.ceil(height / self.side) * self.side), (255, 255, 255)
        )
        resized = image.resize((width, height), Image.Resampling.BILINEAR)
        whole.paste(resized, (0, (whole.height - height) // 2))
        return whole.transpose(Image.Transpose.TRANSPOSE) if turned else whole

    def __call__(self, images: Image.Image, return_tensors: str = "pt") -> dict[str, Any]:
        """Of one image."""
        mean, std = (
            torch.tensor(self.settings[key]).view(3, 1, 1) for key in ("image_mean", "image_std")
        )
        x = torch.tensor(np.asarray(self.canvas(images))).permute(2, 0, 1).float() / 255
        x = (x - mean) / std
        whole = torch.nn.functional.interpolate(
            x[None], size=(self.side, self.side), mode="bicubic"
        )
        rows, columns = x.shape[1] // self.side, x.shape[2] // self.side
        tiles = [
            x[:, r * self.side : (r + 1) * self.side, c * self.side : (c + 1) * self.side]
            for r in range(rows)
            for c in range(columns)
        ]
        values = torch.cat([whole, torch.stack(tiles)])
        return {"pixel_values": values[None], "image_grid": torch.tensor([[rows, columns]])}


def tokens_of(grid: list[int]) -> int:
    """The published formula."""
    rows, columns = grid
    return (rows * columns + 1) * PER_TILE + 1 + (rows + 1) * ROWS


def published(text: str, counts: list[int], begins: bool = True, **kind: bool) -> list[int]:
    """Tokens of a prompt as the published processor makes them: those of each piece, as of a text."""
    made = tokenizer(begins, **kind)
    found = []
    numbers = [int(n) for n in re.findall(r"<\|image_(\d+)\|>", text)]
    for index, piece in enumerate(re.split(r"<\|image_\d+\|>", text)):
        found += made.encode(piece).ids
        if index < len(numbers):
            found += [made.token_to_id("<|image|>")] * counts[numbers[index] - 1]
    return found


class TestPhi3V(ProcessorConformance):
    architecture = "Phi3VForCausalLM"
    config: ClassVar = CONFIG
    settings: ClassVar = (
        {},
        {"num_crops": 4},
        {"num_crops": 16, "image_mean": [0.5] * 3, "image_std": [0.5] * 3},
    )
    inputs = ("pixel_values", "image_grid")

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        return Plain(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return tokens_of(made["image_grid"][0].tolist())

    @pytest.mark.parametrize("size", [(30, 95), (95, 30), (500, 13), (56, 57), (200, 199)])
    def test_canvases_of_other_shapes(self, size: tuple[int, int], tmp_path: Path) -> None:
        library = Plain(num_crops=9)
        library.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(*size))], {})
        made = library(picture(*size))
        for name in self.inputs:
            np.testing.assert_allclose(array(own, name), self.theirs(made, name), atol=1e-5)

    @pytest.mark.parametrize(
        "text",
        [
            "<|user|>\n<|image_1|>\nthe of<|end|>\n",
            "<|user|> the <|image_1|>\n<|image_2|> in",
            "<|image_2|>the of<|image_1|>",
            "<|image_1|>",
        ],
    )
    @pytest.mark.parametrize("begins", [True, False])
    @pytest.mark.parametrize("line_ends", [True, False])
    def test_prompts_are_the_published_ones(
        self, text: str, begins: bool, line_ends: bool, tmp_path: Path
    ) -> None:
        made = tokenizer(begins, line_ends=line_ends)
        made.save(str(tmp_path / "tokenizer.json"))
        processor = processor_for(self.architecture, self.config, tmp_path)
        images = [picture(50, 90), picture(40, 30)][: text.count("<|image_")]
        media = processor.process([item(image) for image in images], {"num_crops": 4})
        counts = [one.num_tokens for one in media]
        expected = published(text, counts, begins, line_ends=line_ends)
        for specials in (True, False):  # a prompt's text, and a chat's
            ids = made.encode(text, add_special_tokens=specials).ids
            placed = processor.place(ids, media)
            assert placed.token_ids == expected
            numbers = re.findall(r"<\|image_(\d+)\|>", text)
            assert sorted(placed.offsets) == [placed.offsets[int(n) - 1] for n in numbers]

    def test_a_chat_and_the_token_of_a_vector(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(37, 61)), item(picture(80, 30))], {})
        assert [processor.placeholder("image", i) for i in range(2)] == [
            "<|image_1|>", "<|image_2|>",
        ]  # fmt: skip
        counts = [one.num_tokens for one in media]
        expected = published("<|image_1|>\n<|image_2|>\nthe", counts)
        ids = tokenizer().encode("<|image|>\n<|image|>\nthe").ids
        assert processor.place(ids, media).token_ids == expected

    def test_what_the_tokenizers_settings_say_of_its_first_token(self, tmp_path: Path) -> None:
        (tmp_path / "tokenizer_config.json").write_text(json.dumps({"add_bos_token": False}))
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(37, 61))], {})
        text = "the <|image_1|> of"
        ids = tokenizer(False).encode(text).ids
        expected = published(text, [media[0].num_tokens], begins=False)
        assert processor.place(ids, media).token_ids == expected

    @pytest.mark.parametrize(
        "text", ["the of", "<|image_1|><|image_1|>", "<|image_2|>", "<|image_1|><|image_2|>"]
    )
    def test_other_numbers_than_the_images_are_refused(self, text: str, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(37, 61))], {})
        with pytest.raises(RequestError, match="there must be one for each"):
            processor.place(tokenizer().encode(text).ids, media)

    def test_tokens_of_no_text_are_refused(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)
        media = processor.process([item(picture(37, 61))], {})
        ids = [tokenizer().token_to_id(x) for x in (*"▁the▁of▁in", "<|image|>")]
        with pytest.raises(RequestError, match="give the text"):
            processor.place(ids, media)

    def test_text_alone_is_left(self, tmp_path: Path) -> None:
        ids = tokenizer().encode("the <|image_1|> of").ids
        placed = processor_for(self.architecture, self.config, tmp_path).place(ids, [])
        assert placed.token_ids == ids

    def test_options(self, tmp_path: Path) -> None:
        Plain(num_crops=4).save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)

        def grid(image: Any = None, **options: Any) -> list[int]:
            (made,) = processor.process([item(image or picture(100, 100))], options)
            found: list[int] = array(made, "image_grid").tolist()
            return found

        assert grid() == [2, 2]
        assert grid(num_crops=16) == [4, 4]
        assert grid(picture(100, 400), num_crops=16) == [2, 8]
        for value in (0, 17, "4", True):
            with pytest.raises(RequestError, match=f"num_crops = {value!r}"):
                grid(num_crops=value)
        with pytest.raises(RequestError, match="image of 113 x 1 pixels") as caught:
            grid(picture(1, 113))
        assert caught.value.param == "multi_modal_data"

    @pytest.mark.parametrize(
        ("settings", "config", "named"),
        [
            ({"num_crops": 0}, {}, "num_crops = 0"),
            ({"image_mean": 0.5}, {}, "image_mean = 0.5"),
            ({}, {"img_processor": {"image_size": 7, "patch_size": 14}}, "image_size = 7"),
        ],
    )
    def test_what_is_refused(self, settings: Any, config: Any, named: str, tmp_path: Path) -> None:
        Plain(**settings).save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match=named):
            processor_for(self.architecture, {**self.config, **config}, tmp_path)
