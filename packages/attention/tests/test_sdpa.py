"""``sdpa`` keeps the contract of attention backends."""

from __future__ import annotations

import pytest
import torch

from headrace_attention.sdpa import SDPABackend
from headrace_core.errors import ConfigError
from headrace_core.ops import OpTable
from headrace_testing.attention.backends import AttentionBackendConformance, Case, World
from headrace_testing.attention.cross import CrossAttentionConformance
from headrace_testing.attention.encoders import EncoderBackendConformance


class TestSDPA(AttentionBackendConformance):
    backend_class = SDPABackend


class TestSDPACross(CrossAttentionConformance):
    backend_class = SDPABackend


class TestSDPAWithoutACache(EncoderBackendConformance):
    backend_class = SDPABackend


@pytest.mark.parametrize(
    ("case", "what"),
    [(Case([1], [3], soft_cap=5.0), "soft_cap"), (Case([1], [3], sinks=True), "sinks")],
    ids=["soft cap", "sinks"],
)
def test_what_it_cannot_do_is_an_error(reference_ops: OpTable, case: Case, what: str) -> None:
    world = World(SDPABackend(reference_ops), case, "float32")
    with pytest.raises(ConfigError, match=f"sets {what}, which attention backend 'sdpa' does not"):
        world.run()


def test_requests_without_tokens_are_passed_over(reference_ops: OpTable) -> None:
    """As padding of a captured graph leaves them."""
    world = World(SDPABackend(reference_ops), Case([2, 1, 3], [4, 0, 0]), "float32")
    world.batch.seq_lens[1] = 0
    out = world.run()
    assert torch.equal(out[2], torch.zeros_like(out[2]))
