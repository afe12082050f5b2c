"""Vectors that engines hand to each other, and those that do not fit their item."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import ECConnector, MediaInput
from headrace_engine.encoder.transfer import EncoderTransfer
from headrace_engine.given_vectors import INDEX_WIDTH, RETAINED


class Kept(ECConnector):
    """Keeps what it is offered."""

    def __init__(self) -> None:
        super().__init__({})
        self.arrays: dict[str, PackedArray] = {}

    def save(self, key: str, vectors: PackedArray) -> None:
        self.arrays[key] = vectors

    def load(self, key: str) -> PackedArray | None:
        return self.arrays.get(key)


@pytest.mark.parametrize(
    ("inputs", "width", "fits"),
    [
        ({}, 8, True),
        ({}, 16, True),
        ({}, 8 + INDEX_WIDTH, False),
        ({RETAINED: PackedArray("int64", (0,), b"")}, 8 + INDEX_WIDTH, True),
        ({RETAINED: PackedArray("int64", (0,), b"")}, 8, False),
    ],
)
def test_pruned_items_have_numbers_behind_their_vectors(
    inputs: Any, width: int, fits: bool
) -> None:
    transfer = EncoderTransfer(
        Kept(), is_producer=True, model="m", dtype="float32", hidden_size=8, device="cpu"
    )
    item = MediaInput("video", inputs, "h", 4)
    vectors = torch.randn(4, width)
    transfer.save(item, vectors)
    loaded = transfer.load(item)
    assert (loaded is not None) is fits
    if loaded is not None:
        assert torch.equal(loaded, vectors)
