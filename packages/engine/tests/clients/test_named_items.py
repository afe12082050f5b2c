"""A front end's named media: what it tells of them, and how long it waits for those of others."""

from __future__ import annotations

from concurrent.futures import Future
from dataclasses import dataclass

import pytest

from headrace_core.errors import EngineDead, QueueFull
from headrace_core.multimodal import MediaInput, ProcessedMedia
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients import named_items
from headrace_engine.clients.named_items import NamedItems
from headrace_engine.shared_objects.named_items import NamedItem, form_of

MADE = ProcessedMedia({}, 2, (7, 8), ((0, 1),))


def request(*hashes: str) -> CoreRequest:
    media = [MediaInput("image", {}, name, 2, 2 * i) for i, name in enumerate(hashes)]
    return CoreRequest("r", [7, 8], SamplingParams(), frozenset(), 1, 0.0, media=media)


def answered(item: NamedItem | None) -> Future[NamedItem | None]:
    found = Future[NamedItem | None]()
    found.set_result(item)
    return found


def test_an_item_is_told_once_with_the_first_request_that_brings_it() -> None:
    names = NamedItems(lambda name: answered(None))
    names.offer("cat", "one", MADE)
    [place] = names.places([request("other"), request("other", "one", "one"), request("one")])
    assert place == (1, 1, "cat", form_of(MADE))
    assert names.places([request("one")]) == []


@dataclass(frozen=True)
class Odd(ProcessedMedia):
    thing: object = None


def test_an_item_that_cannot_travel_stays() -> None:
    names = NamedItems(lambda name: answered(None))
    names.offer("cat", "one", Odd({}, 2, thing=object()))
    assert names.places([request("one")]) == []


def test_items_whose_requests_never_come_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(named_items, "_MOST_OFFERED", 2)
    names = NamedItems(lambda name: answered(None))
    for name in "abc":
        names.offer(name, name, MADE)
    assert [place.name for place in names.places([request("a", "b", "c")])] == ["b", "c"]


def test_what_the_engine_says(monkeypatch: pytest.MonkeyPatch) -> None:
    kept = NamedItem(form_of(MADE), {})
    assert NamedItems(lambda name: answered(kept)).find("cat") == MADE
    assert NamedItems(lambda name: answered(None)).find("cat") is None
    monkeypatch.setattr(named_items, "ANSWER_SECONDS", 0.01)
    with pytest.raises(QueueFull, match=r"no answer about a named item in 0\.01 s"):
        NamedItems(lambda name: Future()).find("cat")
    dead = Future[NamedItem | None]()
    dead.set_exception(EngineDead("gone"))
    with pytest.raises(EngineDead, match="gone"):
        NamedItems(lambda name: dead).find("cat")
