"""Work in slices: the test holds the clock."""

from __future__ import annotations

import threading
from collections.abc import Callable

import pytest
import torch
from torch import Tensor

from headrace_core.multimodal import MediaInput
from headrace_engine.encoder.slices import FOREVER, EncoderSlices
from headrace_engine.encoder.vectors_ahead import VectorsAhead


class Layers:
    """An encoder whose layers take a second each."""

    def __init__(self, num_layers: int = 5) -> None:
        self.now = 0.0
        self.done = 0
        self.num_layers = num_layers
        self.num_vectors = 2
        self.slices = EncoderSlices(lambda: self.now)

    def __call__(self) -> Tensor:
        for _ in range(self.num_layers):
            self.slices.pause()
            self.now += 1.0
            self.done += 1
        return torch.ones(self.num_vectors, 4)


@pytest.fixture
def layers() -> Layers:
    return Layers()


def test_a_slice_ends_between_layers(layers: Layers) -> None:
    work = layers.slices.begin(layers)
    assert layers.done == 0
    work.advance(1.5)
    assert (layers.done, work.result.done()) == (2, False)
    work.advance(0.5)
    assert layers.done == 3
    work.advance(FOREVER)
    assert (layers.done, work.result.result().shape) == (5, (2, 4))
    assert work.result.result().is_inference()
    work.advance(1.0)  # nothing is left


def test_an_error_comes_out(layers: Layers) -> None:
    def broken() -> Tensor:
        layers.slices.pause()
        raise ValueError("no picture")

    work = layers.slices.begin(broken)
    work.advance(FOREVER)
    with pytest.raises(ValueError, match="no picture"):
        work.result.result()


def test_work_is_given_up_in_the_middle(layers: Layers) -> None:
    before = threading.active_count()
    work = layers.slices.begin(layers)
    work.advance(1.5)
    work.close()
    work.close()
    assert layers.done == 2
    assert threading.active_count() == before


def test_other_threads_do_not_pause(layers: Layers) -> None:
    layers.slices.pause()
    work = layers.slices.begin(layers)
    work.advance(0.5)
    assert layers().shape == (2, 4)  # a step that embeds another item meanwhile
    work.close()


def media(name: str, vectors: int = 2) -> MediaInput:
    return MediaInput("image", {}, name, vectors, 0)


def ahead_of(
    layers: Layers, share: float = 0.5, fail: Callable[[str], bool] = lambda name: False
) -> VectorsAhead:
    def embed(item: MediaInput) -> Tensor:
        if fail(item.content_hash):
            raise ValueError("no picture")
        return layers()

    return VectorsAhead(embed, layers.slices, share, 4, clock=lambda: layers.now)


def test_it_works_for_a_share_of_the_steps(layers: Layers) -> None:
    ahead = ahead_of(layers)
    assert ahead.advance(10.0) == []  # nothing to do; and no credit is left of it
    assert ahead.add([media("a"), media("b")]) == []
    assert ahead.advance(3.0) == []
    assert layers.done == 2  # 1.5 seconds were its share, and half a second is owed
    assert ahead.advance(1.0) == []
    assert layers.done == 2
    assert ahead.advance(6.0) == ["a"]
    assert ahead.advance(10.0) == ["b"]
    assert ahead.take("a") is not None
    assert ahead.take("a") is None


def test_what_is_needed_now_is_finished_at_once(layers: Layers) -> None:
    ahead = ahead_of(layers)
    ahead.add([media("a"), media("b")])
    ahead.advance(2.0)
    made = ahead.take("a")
    assert (layers.done, made is not None) == (5, True)
    assert ahead.take("b") is None  # not begun: the step embeds it with what else it reaches
    assert ahead.advance(100.0) == []


def test_an_item_that_cannot_be_embedded_is_done(layers: Layers) -> None:
    ahead = ahead_of(layers, fail=lambda name: name == "a")
    ahead.add([media("a"), media("b")])
    assert ahead.advance(100.0) == ["a", "b"]
    assert ahead.take("a") is None
    assert ahead.take("b") is not None


def test_what_nobody_takes_makes_room(layers: Layers) -> None:
    ahead = ahead_of(layers)
    ahead.add([media("a"), media("b"), media("c")])
    assert ahead.advance(100.0) == ["a", "b", "c"]
    assert ahead.take("a") is None  # 4 vectors are kept, or one item's
    assert ahead.add([media("b")]) == ["b"]
    ahead.add([media("d")])
    layers.num_vectors = 9
    ahead.advance(100.0)
    assert (ahead.take("c"), ahead.take("d") is None) == (None, False)
    ahead.clear()
    assert ahead.take("b") is None
