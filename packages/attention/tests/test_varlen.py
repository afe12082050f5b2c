"""``varlen`` keeps the contract of attention without a cache."""

from __future__ import annotations

import pytest

from headrace_attention.varlen import VarlenBackend
from headrace_core.testing.encoder_attention import EncoderBackendConformance

pytestmark = pytest.mark.spec("ATTN-ENCODER-ONLY")


class TestVarlen(EncoderBackendConformance):
    backend_class = VarlenBackend


def test_it_caches_nothing() -> None:
    assert "decoder" not in VarlenBackend.supported_attention_types
