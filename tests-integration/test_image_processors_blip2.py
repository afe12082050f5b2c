"""BLIP-2's image processor beside the library's, and the place of images in front of a prompt."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import pytest
from speech_checkpoints import save_tokenizer
from test_image_processors import ProcessorConformance, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for


class TestBlip2(ProcessorConformance):
    architecture = "Blip2ForConditionalGeneration"
    config: ClassVar = {"image_token_index": 50265, "vision_config": {"image_size": 384}}
    settings: ClassVar = ({}, {"resample": 2, "image_mean": [0.5] * 3, "do_rescale": False})

    def library(self, **settings: Any) -> Any:
        from transformers.models.blip.image_processing_pil_blip import BlipImageProcessorPil

        return BlipImageProcessorPil(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return 32

    @pytest.mark.parametrize("count", [1, 2])
    def test_prompts_are_the_librarys(self, count: int, tmp_path: Path) -> None:
        """Which takes several images only one by one, so that two are counted here."""
        from transformers import Blip2Processor, PreTrainedTokenizerFast

        ids = save_tokenizer(tmp_path, ("</s>", "<image>"))
        tokenizer = PreTrainedTokenizerFast(tokenizer_file=str(tmp_path / "tokenizer.json"))
        library = Blip2Processor(self.library(), tokenizer, num_query_tokens=4)
        made = library(images=picture(30, 40), text="</s>the water runs")["input_ids"][0]
        config = {**self.config, "image_token_index": ids["<image>"], "num_query_tokens": 4}
        processor = processor_for(self.architecture, config, tmp_path)
        images = [picture(30, 40), picture(50, 20)][:count]
        media = processor.process([item(image) for image in images], {})
        plain = tokenizer("</s>the water runs")["input_ids"]
        expected = [ids["<image>"]] * 4 * (count - 1) + list(made)
        assert processor.place(plain, media).token_ids == expected
        marked = [plain[0], *[ids["<image>"]] * count, *plain[1:]]
        assert processor.place(marked, media).token_ids == expected
        with pytest.raises(RequestError, match="there must be one for each"):
            processor.place([*marked, ids["<image>"]], media)

    def test_images_of_another_size_than_the_towers_are_refused(self, tmp_path: Path) -> None:
        self.library().save_pretrained(tmp_path)
        for change, named in (
            ({"vision_config": {}}, "image_size = 224"),
            ({"num_query_tokens": 0}, "num_query_tokens = 0"),
        ):
            with pytest.raises(UnsupportedModel, match=named):
                processor_for(self.architecture, {**self.config, **change}, tmp_path)
