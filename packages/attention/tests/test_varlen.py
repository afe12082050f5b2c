"""``varlen`` keeps the contract of attention without a cache."""

from __future__ import annotations

from headrace_attention.varlen import VarlenBackend
from headrace_testing.attention.encoders import EncoderBackendConformance


class TestVarlen(EncoderBackendConformance):
    backend_class = VarlenBackend


def test_it_caches_nothing() -> None:
    assert "decoder" not in VarlenBackend.supported_attention_types
