"""Parts of an update between ranks: the same numbers, whichever way they go."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.errors import WeightsError
from headrace_engine.multiproc import frames
from headrace_engine.weights.messages import ITEM_BYTES
from headrace_engine.weights.rank_parts import as_bytes, spread, taken

TENSORS = [
    ("matrix", torch.arange(6).view(2, 3).float()),
    ("empty", torch.zeros(0, 4)),
    ("number", torch.tensor(1.5)),
    ("turned", torch.arange(8).view(4, 2).t()),
    ("float8", torch.randn(5).to(torch.float8_e4m3fn)),
    *((dtype, torch.ones(3).to(getattr(torch, dtype))) for dtype in ITEM_BYTES),
]


def sent(told: Any, shares_memory: bool) -> Any:
    """As another rank gets it."""
    pieces = b"".join(map(bytes, frames.pack(told)))
    tree = int.from_bytes(pieces[:8], "little")
    if shares_memory:
        assert len(pieces) < 4000, "numbers do not travel"
    return frames.unpack(pieces[16 : 16 + tree], bytearray(pieces[16 + tree :]))


@pytest.mark.parametrize("shares_memory", [True, False])
def test_every_tensor_arrives(shares_memory: bool) -> None:
    with spread(iter(TENSORS), shares_memory=shares_memory) as (own, told):
        theirs = taken(sent(told, shares_memory))
    for found in (own, theirs):  # which may be kept
        assert [name for name, _ in found] == [name for name, _ in TENSORS]
        for (name, one), (_, wanted) in zip(found, TENSORS, strict=True):
            assert (one.dtype, one.shape) == (wanted.dtype, wanted.shape), name
            assert torch.equal(as_bytes(one), as_bytes(wanted)), name
    dict(theirs)["matrix"].zero_()
    assert torch.equal(dict(own)["matrix"], TENSORS[0][1])


def test_nothing_but_empty_tensors() -> None:
    with spread([("empty", torch.zeros(0))], shares_memory=True) as (own, told):
        assert [one.numel() for _, one in [*own, *taken(told)]] == [0, 0]


def test_memory_that_is_gone_is_named() -> None:
    with spread(TENSORS, shares_memory=True) as (_, told):
        pass
    with pytest.raises(WeightsError, match="memory of rank 0 cannot be opened"):
        taken(told)
