"""Every family of decoders, made to pool, against transformers on tiny configs."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import torch
from pooling_families_conformance import PoolingFamilyConformance
from test_families import (
    TINY,
    TestGemma,
    TestGemma2,
    TestGemma3,
    TestGPT2,
    TestLlama,
    TestMistral,
    TestMixtral,
    TestPhi3,
    TestQwen2,
    TestQwen3,
    TestQwen3Moe,
)

from headrace_core.testing.model import Checkpoint, PagedDriver

pytestmark = pytest.mark.spec("POOL-CONVERT")

GENERATING = (
    TestLlama, TestMistral, TestQwen2, TestQwen3, TestGemma, TestGemma2, TestGemma3, TestPhi3,
    TestGPT2, TestMixtral, TestQwen3Moe,
)  # fmt: skip
"""Suites of the classes that generate; their configs are used here, too."""


class _Decoder(PoolingFamilyConformance):
    causal: ClassVar[bool] = True
    prefix: ClassVar[str] = "model."
    default_pooling: ClassVar[str] = "LAST"

    def hf_config(self, **overrides: Any) -> Any:
        return TestQwen3().hf_config(**{"num_labels": 3, **overrides})

    @pytest.mark.parametrize("kind", ["LAST", "MEAN", "ALL"])
    def test_chunks_equal_the_whole(self, checkpoint: Checkpoint, kind: str) -> None:
        """Rows of earlier chunks are kept by whoever runs the model."""
        model = self.open(checkpoint.path)
        prompt, other = self.prompt(30, seed=5), self.prompt(4, seed=6)
        driver = PagedDriver(model)
        with torch.inference_mode():
            pieces = [
                model.forward(driver.batch({"a": prompt[:7]})),
                model.forward(driver.batch({"b": other, "a": prompt[7:20]}))[len(other) :],
                model.forward(driver.batch({"a": prompt[20:]})),
            ]
            whole = self.hidden(model, [prompt])[0]
        chunked = torch.cat(pieces)
        select = {"LAST": chunked[-1] - whole[-1], "MEAN": (chunked - whole).mean(0)}
        self.assert_close(
            select.get(kind, chunked - whole),
            torch.zeros(1).expand_as(select.get(kind, chunked - whole)),
        )


class TestQwen3Model(_Decoder):
    def hf_class(self) -> Any:
        from transformers import Qwen3Model

        return Qwen3Model
