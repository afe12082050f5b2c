"""Items that are kept by name, and their way between processes."""

from __future__ import annotations

from dataclasses import dataclass

import msgspec
import pytest

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import MediaInput, ProcessedMedia
from headrace_engine.shared_objects.named_items import (
    KeptByName,
    NamedItem,
    as_processed,
    form_of,
)


@dataclass(frozen=True, slots=True)
class Timed(ProcessedMedia):
    """As processors have their own."""

    time: str = ""
    places: tuple[int, ...] = ()


def item(size: int) -> MediaInput:
    return MediaInput("image", {"x": PackedArray("uint8", (size,), bytes(size))}, "hash", 1)


@pytest.mark.parametrize(
    "made",
    [
        ProcessedMedia(item(4).inputs, 3, (7, 8, 7), ((1, 1),)),
        ProcessedMedia({}, 5),
        Timed(item(4).inputs, 2, time="00:01 ", places=(1, 2)),
    ],
)
def test_an_item_is_the_same_behind_a_socket(made: ProcessedMedia) -> None:
    frame = msgspec.msgpack.encode(NamedItem(form_of(made), dict(made.inputs)))
    found = as_processed(msgspec.msgpack.decode(frame, type=NamedItem))
    assert found == made
    assert type(found) is type(made)


def test_a_kind_that_this_process_does_not_know_is_not_found() -> None:
    form = form_of(ProcessedMedia({}, 1))._replace(kind="os.system")
    assert as_processed(NamedItem(form, {})) is None


def test_the_items_that_were_named_last_are_kept() -> None:
    kept, form = KeptByName(10), form_of(ProcessedMedia({}, 1))
    for name in "ab":
        kept.keep(name, form, item(4))
    kept.keep("b", form, item(1))
    assert kept.find("b") == (form, item(4).inputs), "the first of a name stays"
    assert kept.find("a") is not None
    kept.keep("c", form, item(4))
    assert kept.find("b") is None
    assert kept.find("a") is not None
    kept.keep("large", form, item(11))
    assert kept.find("large") is None
    assert kept.find("c") is not None
