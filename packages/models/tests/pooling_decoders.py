"""What the suites of decoders that pool share: tiny configs, and prompts in chunks."""

from __future__ import annotations

from typing import Any, ClassVar

import pytest
import test_families as families
import torch
from pooling_families_conformance import PoolingFamilyConformance

from headrace_testing.model.decoders import Checkpoint, ModelConformance, PagedDriver
from headrace_testing.model.pooling import pooling_batch
from headrace_testing.sampling import turns


@turns(3)
class PoolingDecoderConformance(PoolingFamilyConformance):
    """Config and class come from the suite of the class that generates."""

    causal: ClassVar[bool] = True
    prefix: ClassVar[str] = "model."
    default_pooling: ClassVar[str] = "LAST"
    generating: ClassVar[type[ModelConformance]] = families.TestQwen3
    reference: ClassVar[str]
    """Name of the transformers class."""

    def hf_config(self, **overrides: Any) -> Any:
        return self.generating().hf_config(**{"num_labels": 3, **overrides})

    def hf_class(self) -> Any:
        import transformers

        return getattr(transformers, self.reference)

    @pytest.mark.parametrize("kind", ["LAST", "MEAN", "ALL"])
    def test_chunks_equal_the_whole(self, checkpoint: Checkpoint, kind: str) -> None:
        """Rows of earlier chunks are kept by whoever runs the model."""
        if not self.causal:
            pytest.skip("a prompt is computed in one step")
        if self.makes == "token labels" and kind != "ALL":
            pytest.skip("it labels tokens")
        model = self.open(checkpoint.path, pooler_config={"pooling_type": kind})
        prompt, other = self.prompt(30, seed=5), self.prompt(4, seed=6)
        driver = PagedDriver(model)
        with torch.inference_mode():
            pieces = [
                model.forward(driver.batch({"a": prompt[:7]})),
                model.forward(driver.batch({"b": other, "a": prompt[7:20]}))[len(other) :],
                model.forward(driver.batch({"a": prompt[20:]})),
            ]
        params = self.params() if kind != "ALL" else self.params(self._of_tokens())
        (whole,) = self.pooled(model, [prompt], [params])
        batch = pooling_batch(model, [torch.cat(pieces)], [params], [prompt])
        self.assert_close(model.pooler(batch)[0], whole)

    def _of_tokens(self) -> str:
        return "token_embed" if self.makes == "vectors" else "token_classify"
