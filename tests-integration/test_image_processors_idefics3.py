"""Image processors of Idefics3 and SmolVLM beside the library's: tiles, and tokens of whole prompts."""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from test_image_processors import ProcessorConformance, array, item, picture
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers, trainers

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for

SPECIAL = (
    "<fake_token_around_image>", "<image>", "<end_of_utterance>", "<global-img>",
    *(f"<row_{row}_col_{column}>" for row in range(1, 7) for column in range(1, 7)),
)  # fmt: skip


@cache
def tokenizer(*, joins_lines: bool = True) -> Tokenizer:
    """Of bytes.

    Args:
        joins_lines: two line ends are a token.
    """
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=300, initial_alphabet=pre_tokenizers.ByteLevel.alphabet(), show_progress=False
    )
    made.train_from_iterator(
        ["a\n\nb\n\nc the of\n\n" if joins_lines else "the of in"] * 9, trainer
    )
    made.add_special_tokens([AddedToken(word, normalized=False, special=True) for word in SPECIAL])
    return made


IMAGE = tokenizer().token_to_id("<image>")


class Idefics3(ProcessorConformance):
    config: ClassVar = {
        "image_token_id": IMAGE, "scale_factor": 2,
        "vision_config": {"image_size": 364, "patch_size": 14},
    }  # fmt: skip
    settings: ClassVar = (
        {},
        {"size": {"longest_edge": 140}, "max_image_size": {"longest_edge": 56}},
        {"size": {"longest_edge": 112}, "max_image_size": {"longest_edge": 56}, "resample": 2},
        {
            "do_image_splitting": False,
            "max_image_size": {"longest_edge": 56},
            "image_mean": [0.1] * 3,
        },
    )

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        tokenizer().save(str(tmp_path / "tokenizer.json"))
        return tmp_path

    def base(self) -> Any:
        from transformers.models.idefics3.image_processing_pil_idefics3 import (
            Idefics3ImageProcessorPil,
        )

        return Idefics3ImageProcessorPil

    def library(self, **settings: Any) -> Any:
        class WithTokenizer(self.base()):  # type: ignore[misc]
            return_row_col_info = True

            def save_pretrained(self, folder: Any, **kwargs: Any) -> Any:
                Path(folder).mkdir(exist_ok=True)
                tokenizer().save(str(Path(folder) / "tokenizer.json"))
                return super().save_pretrained(folder, **kwargs)

        return WithTokenizer(**settings)

    def text(self, made: Mapping[str, Any]) -> str:
        """What the library puts in place of an image."""
        from transformers import Idefics3Processor

        processor = Idefics3Processor.__new__(Idefics3Processor)
        processor.fake_image_token, processor.image_token = SPECIAL[:2]
        processor.global_image_tag = "<global-img>"
        processor.image_seq_len = (made["pixel_values"].shape[-1] // 14 // 2) ** 2
        return str(processor.replace_image_token(made, 0))

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return len(tokenizer().encode(self.text(made)).ids)

    @pytest.mark.parametrize("joins_lines", [True, False])
    @pytest.mark.parametrize("size", [(100, 100), (30, 200), (200, 30), (300, 299), (999, 5)])
    def test_tokens_are_the_librarys(
        self, size: tuple[int, int], joins_lines: bool, tmp_path: Path
    ) -> None:
        library = self.library(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
        library.save_pretrained(tmp_path)
        words = tokenizer(joins_lines=joins_lines)
        words.save(str(tmp_path / "tokenizer.json"))
        image = words.token_to_id("<image>")
        processor = processor_for(
            self.architecture, {**self.config, "image_token_id": image}, tmp_path
        )
        (own,) = processor.process([item(picture(*size))], {})
        made = library(images=picture(*size), return_tensors="pt")
        expected = words.encode(f"the of {self.text(made)} in").ids
        placed = processor.place(words.encode("the of <image> in").ids, [own])
        assert placed.token_ids == expected
        at = [
            placed.offsets[0] + first + index
            for first, number in own.runs
            for index in range(number)
        ]
        assert at == [index for index, token in enumerate(expected) if token == image]
        assert len(at) == len(array(own, "pixel_values")) * 4

    def test_an_image_that_is_not_split(self, tmp_path: Path) -> None:
        library = self.library(max_image_size={"longest_edge": 56})
        library.save_pretrained(tmp_path)
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(90, 200))], {"do_image_splitting": False})
        made = library(images=picture(90, 200), return_tensors="pt", do_image_splitting=False)
        np.testing.assert_allclose(array(own, "pixel_values"), made["pixel_values"][0], atol=1e-5)
        assert own.num_tokens == 3 + 4
        with pytest.raises(RequestError, match="do_image_splitting = 'no'"):
            processor.process([item(picture(9, 9))], {"do_image_splitting": "no"})

    def test_unfit_files_are_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        with pytest.raises(
            UnsupportedModel, match=r"token <image> has the id .*config.json says 5"
        ):
            processor_for(self.architecture, {**self.config, "image_token_id": 5}, tmp_path)
        with pytest.raises(UnsupportedModel, match="scale_factor = 3"):
            processor_for(self.architecture, {**self.config, "scale_factor": 3}, tmp_path)
        (tmp_path / "tokenizer.json").unlink()
        with pytest.raises(UnsupportedModel, match=r"tokenizer\.json: cannot be read"):
            processor_for(self.architecture, self.config, tmp_path)


class TestIdefics3(Idefics3):
    architecture = "Idefics3ForConditionalGeneration"

    def test_a_prompt_of_two_images(self, tmp_path: Path) -> None:
        """Beside the whole of the library's processor."""
        from transformers import Idefics3Processor, PreTrainedTokenizerFast

        library = self.library(size={"longest_edge": 112}, max_image_size={"longest_edge": 56})
        library.save_pretrained(tmp_path)
        words = PreTrainedTokenizerFast(tokenizer_object=tokenizer(), pad_token="<image>")
        whole = Idefics3Processor.__new__(Idefics3Processor)
        Idefics3Processor.__init__(whole, library, words, image_seq_len=4)
        images, text = [picture(80, 50), picture(20, 40)], "the <image> of\n<image>\n\nin"
        expected = whole(text=text, images=[images], return_tensors="np")["input_ids"][0].tolist()
        processor = processor_for(self.architecture, self.config, tmp_path)
        own = processor.process([item(image) for image in images], {})
        assert processor.place(tokenizer().encode(text).ids, own).token_ids == expected


class TestSmolVLM(Idefics3):
    architecture = "SmolVLMForConditionalGeneration"

    def base(self) -> Any:
        from transformers.models.smolvlm.image_processing_pil_smolvlm import (
            SmolVLMImageProcessorPil,
        )

        return SmolVLMImageProcessorPil

    def text(self, made: Mapping[str, Any]) -> str:
        from transformers.models.smolvlm.processing_smolvlm import get_image_prompt_string

        number = (made["pixel_values"].shape[-1] // 14 // 2) ** 2
        return str(
            get_image_prompt_string(
                made["rows"][0][0], made["cols"][0][0], number, *SPECIAL[:2], "<global-img>"
            )
        )
