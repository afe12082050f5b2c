"""Gemma 3's image processor beside the library's: parts, numbers, and tokens of whole prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SPECIAL = (
    "<bos>",
    "<pad>",
    "<start_of_image>",
    "<image_soft_token>",
    "<end_of_image>",
    "<start_of_turn>",
)
SIZES = [(70, 70), (40, 200), (333, 50), (64, 129), (128, 128), (21, 400)]


@cache
def tokenizer() -> Tokenizer:
    """Of bytes, in which up to 31 line ends are a token, as in Gemma's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("\n+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(["of the image", "some crops to see"] * 5, trainer)
    made.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(1, 32)])
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


BEGIN, IMAGE, END = map(tokenizer().token_to_id, SPECIAL[2:5])


class TestGemma3(ProcessorConformance):
    architecture = "Gemma3ForConditionalGeneration"
    config: ClassVar = {
        "boi_token_index": BEGIN, "eoi_token_index": END, "image_token_index": IMAGE,
        "mm_tokens_per_image": 4,
    }  # fmt: skip
    settings: ClassVar = (
        {},
        {"size": {"height": 56, "width": 56}},
        {"size": {"height": 42, "width": 42}, "resample": 3, "image_mean": [0.1] * 3},
        {
            "size": {"height": 28, "width": 28}, "do_pan_and_scan": True,
            "pan_and_scan_min_crop_size": 16, "pan_and_scan_max_num_crops": 5,
            "pan_and_scan_min_ratio_to_activate": 1.1,
        },
    )  # fmt: skip

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        class WithTokenizer(Gemma3ImageProcessorPil):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                tokenizer().save(str(Path(folder) / "tokenizer.json"))
                return super().save_pretrained(folder, **kwargs)

        return WithTokenizer(**settings)

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        found: np.ndarray[Any, Any] = made[name].numpy()
        return found

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        text = self.whole().replace_image_token(made, 0).strip("\n")
        return len(tokenizer().encode(text, add_special_tokens=False).ids)

    def whole(self, library: Any = None) -> Any:
        """The library's whole processor."""
        from transformers import Gemma3Processor, PreTrainedTokenizerFast

        words = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer(), pad_token="<pad>", bos_token="<bos>",
            extra_special_tokens={
                "boi_token": SPECIAL[2], "image_token": SPECIAL[3], "eoi_token": SPECIAL[4],
            },
        )  # fmt: skip
        whole = Gemma3Processor.__new__(Gemma3Processor)
        Gemma3Processor.__init__(whole, library or self.library(), words, image_seq_length=4)
        return whole

    @pytest.mark.parametrize("scans", [False, True])
    @pytest.mark.parametrize("size", SIZES)
    @pytest.mark.parametrize(
        "text",
        [
            "<bos><start_of_turn>user\n{}What is it?",
            "{}",
            "a\n\n{}\n{}\n\n\nb",
            "{}{} the {}",
            "no lines {}\n",
            "\n\na\n\n\nb\n{}c\n\n",
        ],
    )
    def test_prompts_are_the_librarys(
        self, text: str, size: tuple[int, int], scans: bool, tmp_path: Path
    ) -> None:
        scan = {"do_pan_and_scan": scans, "pan_and_scan_min_crop_size": 16,
                "pan_and_scan_max_num_crops": 4, "pan_and_scan_min_ratio_to_activate": 1.2}  # fmt: skip
        library = self.library(size={"height": 28, "width": 28}, **scan)
        library.save_pretrained(tmp_path)
        count = text.count("{}")
        images = [picture(*size), picture(30, 31), picture(31, 90)][:count]
        text = text.format(*["<start_of_image>"] * count)
        # The library's whole processor has values of its own for what its image processor's file says.
        made = self.whole(library)(text=text, images=[images], return_tensors="np", **scan)
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(image) for image in images], {})
        plain = tokenizer().encode(text, add_special_tokens=False).ids
        placed = processor.place(plain, own)
        expected = made["input_ids"][0].tolist()
        assert placed.token_ids == expected
        pixels = np.concatenate([array(one, "pixel_values") for one in own])
        np.testing.assert_allclose(pixels, made["pixel_values"], atol=1e-5)
        seen = {at for first, end in placed.whole_spans for at in range(first, end)}
        assert seen == {at for at, token in enumerate(expected) if token == IMAGE}
        assert all(expected[first - 1] == BEGIN for first, _ in placed.whole_spans)
        assert all(expected[end] == END for _, end in placed.whole_spans)

    def test_options(self, tmp_path: Path) -> None:
        self.library(size={"height": 28, "width": 28}).save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        asked = {"do_pan_and_scan": True, "pan_and_scan_min_crop_size": 10}
        (own,) = processor.process([item(picture(20, 60))], asked)
        assert len(array(own, "pixel_values")) == 1 + 3
        for name, value, words in [
            ("do_pan_and_scan", 1, "true or false"),
            ("pan_and_scan_max_num_crops", 5, "from 2 to 4"),
            ("pan_and_scan_min_crop_size", 0, "a number of pixels"),
            ("pan_and_scan_min_ratio_to_activate", "x", "at least 1"),
        ]:
            with pytest.raises(RequestError, match=rf"{name} = .*must be .*{words}"):
                processor.process([item(picture(9, 9))], {name: value})

    def test_another_token_of_images_is_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="<image_soft_token> has the id"):
            processor_for(self.architecture, {**self.config, "image_token_index": 5}, tmp_path)
