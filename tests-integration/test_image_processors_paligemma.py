"""PaliGemma's image processor beside the library's: numbers, and tokens of whole prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError
from headrace_multimodal import processor_for


@cache
def tokenizer() -> Tokenizer:
    """Of bytes, in which up to 31 line ends are a token, as in Gemma's."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.Sequence([
        pre_tokenizers.Split(Regex("\n+"), "isolated"),
        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
    ])  # fmt: skip
    made.decoder = decoders.ByteLevel()
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        ["caption of the image"] * 5,
        trainers.BpeTrainer(vocab_size=300, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_tokens([AddedToken("\n" * n, normalized=False) for n in range(1, 32)])
    made.add_special_tokens(
        [AddedToken(w, normalized=False, special=True) for w in ("<bos>", "<image>")]
    )
    return made


BOS, IMAGE = (tokenizer().token_to_id(word) for word in ("<bos>", "<image>"))


class TestPaliGemma(ProcessorConformance):
    architecture = "PaliGemmaForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": IMAGE, "text_config": {"model_type": "gemma", "bos_token_id": BOS},
        "vision_config": {"model_type": "siglip_vision_model", "image_size": 224, "patch_size": 14},
    }  # fmt: skip
    settings = ({}, {"size": {"height": 56, "width": 42}, "resample": 2})

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers import SiglipImageProcessor

        class WithTokenizer(SiglipImageProcessor):
            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                tokenizer().save(str(Path(folder) / "tokenizer.json"))
                return super().save_pretrained(folder, **kwargs)

        return WithTokenizer(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        height, width = made["pixel_values"].shape[-2:]
        return (height // 14) * (width // 14)

    @pytest.mark.parametrize(
        "text",
        ["<image>caption en", "<image>", "caption en\n", "<image><image>of\n\n", "<image> a\nb"],
    )
    def test_prompts_are_the_librarys(self, text: str, tmp_path: Path) -> None:
        from transformers import PaliGemmaProcessor, PreTrainedTokenizerFast

        library = self.library(size={"height": 28, "width": 28})
        library.image_seq_length = 4
        library.save_pretrained(tmp_path)
        words = PreTrainedTokenizerFast(
            tokenizer_object=tokenizer(), bos_token="<bos>",
            extra_special_tokens={"image_token": "<image>"},
        )  # fmt: skip
        whole = PaliGemmaProcessor.__new__(PaliGemmaProcessor)
        PaliGemmaProcessor.__init__(whole, library, words)
        images = [picture(40, 61), picture(30, 31)][: max(1, text.count("<image>"))]
        made = whole(text=text, images=[images], return_tensors="np")
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(image) for image in images], {})
        ids = tokenizer().encode(text, add_special_tokens=False).ids
        expected = made["input_ids"][0].tolist()
        for given in (ids, [BOS, *ids]):
            placed = processor.place(given, own)
            assert placed.token_ids == expected
            assert list(placed.whole_spans) == [(0, len(expected))]
        pixels = np.stack([array(one, "pixel_values") for one in own])
        np.testing.assert_allclose(pixels, made["pixel_values"], atol=1e-5)

    def test_a_prompt_beyond_the_window_is_refused(self, tmp_path: Path) -> None:
        self.library(size={"height": 28, "width": 28}).save_pretrained(tmp_path)
        text = {"model_type": "gemma2", "sliding_window": 9, "bos_token_id": BOS}
        processor = processor_for(self.architecture, {**self.config, "text_config": text}, tmp_path)
        own = processor.process([item(picture(9, 9))], {})
        assert len(processor.place([IMAGE, 5, 6, 7], own).token_ids) == 9
        with pytest.raises(RequestError, match="prompt of 10 tokens: must be at most 9"):
            processor.place([IMAGE, 5, 6, 7, 8], own)
