"""Models by transformers' code over headrace's cache and kernels."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import pooling_decoders
import test_encoders as encoders
import test_families as families
import test_rotary_encoders as rotary_encoders
from model_families_conformance import FamilyConformance
from pooling_families_conformance import PoolingFamilyConformance

from headrace_core.model import ModelInfo

pytestmark = [
    pytest.mark.spec("MODEL-TRANSFORMERS-BACKEND"),
    pytest.mark.filterwarnings("ignore"),  # of model code that is not ours
]


class ByTransformers(FamilyConformance):
    """A suite of a family, with the other implementation."""

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return super().resolve(path, **{"model_impl": "transformers", **settings})


class TestLlamaByTransformers(ByTransformers, families.TestLlama):
    tensor_parallel = 2


class TestQwen3ByTransformers(ByTransformers, families.TestQwen3):
    """Windows on one layer: two groups of the cache."""


class TestMixtralByTransformers(ByTransformers, families.TestMixtral):
    """Experts are stored one by one and become one tensor."""


class TestPhi3LongByTransformers(ByTransformers, families.TestPhi3Long):
    """Fused projections; frequencies that transformers would choose for each batch."""


class TestGPT2ByTransformers(ByTransformers, families.TestGPT2):
    """Learned positions, transposed weights."""

    tensor_parallel = 1  # transformers has no plan for it


class PoolsByTransformers(PoolingFamilyConformance):
    """A suite of a pooling model, with the other implementation."""

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return super().resolve(path, **{"model_impl": "transformers", **settings})


class TestBertByTransformers(PoolsByTransformers, encoders.TestBert):
    tensor_parallel = 1  # transformers has no plan for it


class TestBertForSequenceClassificationByTransformers(
    PoolsByTransformers, encoders.TestBertForSequenceClassification
):
    tensor_parallel = 1


class TestBertForTokenClassificationByTransformers(
    PoolsByTransformers, encoders.TestBertForTokenClassification
):
    tensor_parallel = 1


class TestRobertaByTransformers(PoolsByTransformers, encoders.TestRoberta):
    """Positions begin behind the padding."""

    tensor_parallel = 1


class TestModernBertByTransformers(PoolsByTransformers, rotary_encoders.TestModernBert):
    """Windows to both sides."""

    tensor_parallel = 1


class TestQwen3ModelByTransformers(PoolsByTransformers, pooling_decoders.PoolingDecoderConformance):
    reference = "Qwen3Model"


class TestQwen3ForSequenceClassificationByTransformers(
    PoolsByTransformers, pooling_decoders.PoolingDecoderConformance
):
    makes = "labels"
    reference = "Qwen3ForSequenceClassification"
