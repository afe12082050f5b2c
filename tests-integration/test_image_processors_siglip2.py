"""The image processor of SigLIP 2 NaFlex beside the library's."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import pytest
from hypothesis import given
from hypothesis import settings as examples
from hypothesis import strategies as st
from speech_checkpoints import save_tokenizer
from test_image_processors import ProcessorConformance, array, item, picture

from headrace_core.errors import RequestError, UnsupportedModel
from headrace_multimodal import processor_for
from headrace_multimodal.images.shared_space import patch_grid

SIDES = st.integers(1, 3000)


class TestSiglip2(ProcessorConformance):
    architecture = "Siglip2Model"
    config: ClassVar = {"vision_config": {"patch_size": 16}}
    settings: ClassVar = ({}, {"max_num_patches": 30, "image_mean": [0.4] * 3, "resample": 3})
    inputs = ("pixel_values", "spatial_shapes")

    @pytest.fixture
    @classmethod
    def tmp_path(cls, tmp_path: Path) -> Path:
        for number in ("", *map(str, range(len(cls.settings)))):
            (tmp_path / number).mkdir(exist_ok=True)
            save_tokenizer(tmp_path / number, ("<eos>",))
        return tmp_path

    def library(self, **settings: Any) -> Any:
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            Siglip2ImageProcessorPil,
        )

        return Siglip2ImageProcessorPil(**settings)

    def num_tokens(self, made: Mapping[str, Any]) -> int:
        return 1

    def theirs(self, made: Mapping[str, Any], name: str) -> np.ndarray[Any, Any]:
        if name == "pixel_values":
            found: np.ndarray[Any, Any] = made[name][made["pixel_attention_mask"].bool()].numpy()
            return found
        return np.asarray(made[name])

    @given(SIDES, SIDES, st.integers(1, 1024))
    @examples(max_examples=100, deadline=None)
    def test_grids(self, height: int, width: int, most: int) -> None:
        from transformers.models.siglip2.image_processing_pil_siglip2 import (
            get_image_size_for_max_num_patches,
        )

        wanted = get_image_size_for_max_num_patches(height, width, 16, most)
        rows, columns = patch_grid((height, width), 16, most)
        assert (rows * 16, columns * 16) == tuple(wanted)

    def test_options_and_what_is_refused(self, tmp_path: Path) -> None:
        processor = processor_for(self.architecture, self.config, tmp_path)
        (own,) = processor.process([item(picture(90, 90))], {"max_num_patches": 9})
        assert array(own, "spatial_shapes").tolist() == [[3, 3]]
        for value in (0, 257, "9"):
            with pytest.raises(RequestError, match=f"max_num_patches = {value!r}"):
                processor.process([item(picture(90, 90))], {"max_num_patches": value})
        for stated, named in (
            ({"patch_size": 14}, "patch_size = 14"),
            ({"max_num_patches": 0}, "max_num_patches = 0"),
        ):
            self.library(**stated).save_pretrained(tmp_path)
            with pytest.raises(UnsupportedModel, match=named):
                processor_for(self.architecture, self.config, tmp_path)
