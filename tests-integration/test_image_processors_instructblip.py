"""InstructBLIP's processor beside the library's: images, and the text that the Q-Former reads."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from instructblip_checkpoints import save_former_tokenizer
from speech_checkpoints import save_tokenizer
from test_image_processors import ProcessorConformance, array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for


class TestInstructBlip(ProcessorConformance):
    architecture = "InstructBlipForConditionalGeneration"
    config: ClassVar = {
        "image_token_index": 32000, "vision_config": {"image_size": 224},
        "qformer_config": {"max_position_embeddings": 12},
    }  # fmt: skip
    settings: ClassVar = (
        {"size": {"height": 224, "width": 224}},
        {"size": {"height": 224, "width": 224}, "resample": 2, "do_rescale": False},
    )

    @pytest.fixture(autouse=True)
    def with_tokenizer(self, tmp_path: Path) -> None:
        for folder in (tmp_path, *(tmp_path / str(n) for n in range(len(self.settings)))):
            save_former_tokenizer(folder)

    def library(self, **settings: Any) -> Any:
        from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

        return BlipImageProcessorPil(**{"size": {"height": 224, "width": 224}, **settings})

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return 32

    def test_what_the_config_leaves_out_is_the_librarys_default(self, tmp_path: Path) -> None:
        """Images of 384 pixels, which are not this tower's."""
        (tmp_path / "preprocessor_config.json").write_text("{}")
        with pytest.raises(UnsupportedModel, match=r"makes images of \(384, 384\)"):
            processor_for(self.architecture, self.config, tmp_path)

    def test_prompts_are_the_librarys(self, tmp_path: Path) -> None:
        from transformers import InstructBlipProcessor, PreTrainedTokenizerFast

        ids = save_tokenizer(tmp_path, ("</s>", "<image>"))
        tokenizer, former = (
            PreTrainedTokenizerFast(tokenizer_file=str(folder / "tokenizer.json"))
            for folder in (tmp_path, tmp_path / "qformer_tokenizer")
        )
        library = InstructBlipProcessor(self.library(), tokenizer, former, num_query_tokens=4)
        self.library().save_pretrained(tmp_path)
        config = {**self.config, "image_token_index": ids["<image>"], "num_query_tokens": 4}
        processor: Any = processor_for(self.architecture, config, tmp_path)
        for text in ("the Water runs, in the race", ""):
            made = library(images=picture(30, 40), text=text)
            options = processor.options_for_text(f"<image>{text}", {})
            media = processor.process([item(picture(30, 40))], options)
            assert array(media[0], "qformer_input_ids").tolist() == made["qformer_input_ids"][0]
            plain = tokenizer(text)["input_ids"]
            assert processor.place(plain, media).token_ids == made["input_ids"][0]
            marked = [*plain[:1], ids["<image>"], *plain[1:]]
            assert processor.place(marked, media).token_ids == made["input_ids"][0]

    def test_texts_that_the_former_cannot_read_are_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor: Any = processor_for(self.architecture, self.config, tmp_path)
        with pytest.raises(
            RequestError, match="has 13 tokens of the Q-Former; it reads at most 12"
        ):
            processor.options_for_text("the " * 11, {})
        assert processor.options_for_text("the " * 10, {})
        small = {**self.config, "qformer_config": {"vocab_size": 9}}
        processor = processor_for(self.architecture, small, tmp_path)
        with pytest.raises(RequestError, match="has the token 9 of qformer_tokenizer"):
            processor.options_for_text("wheel", {})

    def test_no_request_sets_the_text(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        processor: Any = processor_for(self.architecture, self.config, tmp_path)
        for options in ({"text": "the"}, processor.options_for_text("", {"text": "the"})):
            with pytest.raises(RequestError, match=r"mm_processor_kwargs.text: no such option"):
                processor.process([item(picture(30, 40))], options)

    def test_without_its_tokenizer_it_is_refused(self, tmp_path: Path) -> None:
        (tmp_path / "qformer_tokenizer" / "tokenizer.json").unlink()
        self.library().save_pretrained(tmp_path)
        with pytest.raises(UnsupportedModel, match="qformer_tokenizer"):
            processor_for(self.architecture, self.config, tmp_path)
