"""A front end's named media, shared with the other front ends of its engine."""

from __future__ import annotations

import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future

import msgspec

from headrace_core.errors import QueueFull
from headrace_core.multimodal import ProcessedMedia
from headrace_core.request import CoreRequest
from headrace_engine.shared_objects.named_items import (
    ItemForm,
    NamedItem,
    NamedPlace,
    as_processed,
    form_of,
)

ANSWER_SECONDS = 30.0
"""Longest wait for the engine's process, which may be busy with a step."""
_MOST_OFFERED = 1024
"""Items whose requests are still to be sent: of requests that are refused, none ever is."""


class NamedItems:
    """See the module. Thread-safe.

    Args:
        recall: asks the engine's process for an item by name.
    """

    def __init__(self, recall: Callable[[str], Future[NamedItem | None]]) -> None:
        self._recall = recall
        self._lock = threading.Lock()
        self._offered: OrderedDict[str, tuple[str, ItemForm]] = OrderedDict()

    def find(self, name: str) -> ProcessedMedia | None:
        """The item that a front end sent under a name; None: it is not kept.

        Raises:
            EngineDead: the engine's process has ended.
            QueueFull: it does not answer.
        """
        try:
            found = self._recall(name).result(ANSWER_SECONDS)
        except TimeoutError:
            raise QueueFull(
                f"the engine gave no answer about a named item in {ANSWER_SECONDS:g} s",
                retry_after=1.0,
            ) from None
        return None if found is None else as_processed(found)

    def offer(self, name: str, content_hash: str, made: ProcessedMedia) -> None:
        """Give an item its name when a request with it is sent. One of a class whose own fields are no plain
        data is known by its name in this process only."""
        form = form_of(made)
        try:
            msgspec.msgpack.encode(form.own)
        except TypeError:
            return
        with self._lock:
            self._offered[content_hash] = name, form
            if len(self._offered) > _MOST_OFFERED:
                self._offered.popitem(last=False)

    def places(self, requests: Sequence[CoreRequest]) -> list[NamedPlace]:
        """Items of requests that are to be sent now that have names, each once."""
        found: list[NamedPlace] = []
        with self._lock:
            for index, request in enumerate(requests):
                for place, item in enumerate(request.media):
                    offered = self._offered.pop(item.content_hash, None)
                    if offered is not None:
                        found.append(NamedPlace(index, place, *offered))
        return found
