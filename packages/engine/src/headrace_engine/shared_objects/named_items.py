"""Media that have names, in an engine's process: known there by a name to all of its front ends.

A front end tells which item of a request has a name, and how the item becomes tokens; its inputs come with
the request and are kept, not sent again. Another front end asks for the item by the name.
"""

from __future__ import annotations

import dataclasses
from collections import OrderedDict
from collections.abc import Iterator
from typing import Any, NamedTuple, get_type_hints

import msgspec

from headrace_core.arrays import PackedArray
from headrace_core.multimodal import MediaInput, ProcessedMedia

_COMMON = {field.name for field in dataclasses.fields(ProcessedMedia)}


class ItemForm(NamedTuple):
    """A processed item without its inputs. Plain data."""

    kind: str
    """Full name of its class: :class:`~headrace_core.multimodal.ProcessedMedia`, or a processor's heir."""
    num_tokens: int
    token_ids: tuple[int, ...]
    runs: tuple[tuple[int, int], ...]
    own: dict[str, Any]
    """Fields that only its class has."""


class NamedPlace(NamedTuple):
    """An item of a message's requests that has a name."""

    request: int
    """Index of the request in the message."""
    item: int
    """Index in the request's media."""
    name: str
    form: ItemForm


class NamedItem(NamedTuple):
    """An item as a front end asks for it."""

    form: ItemForm
    inputs: dict[str, PackedArray]


def form_of(made: ProcessedMedia) -> ItemForm:
    """What :func:`as_processed` needs beside an item's inputs."""
    own = {f.name: getattr(made, f.name) for f in dataclasses.fields(made) if f.name not in _COMMON}
    return ItemForm(_name(type(made)), made.num_tokens, made.token_ids, made.runs, own)


def as_processed(item: NamedItem) -> ProcessedMedia | None:
    """The item as its processor made it; None: no class of this process has its kind."""
    kinds = [kind for kind in _kinds(ProcessedMedia) if _name(kind) == item.form.kind]
    if not kinds:
        return None
    kind = kinds[-1]  # a class with slots is made of another of its name, which may linger
    form, types = item.form, get_type_hints(kind)
    own = {name: msgspec.convert(value, types[name]) for name, value in form.own.items()}
    return kind(item.inputs, form.num_tokens, form.token_ids, form.runs, **own)


def _name(kind: type) -> str:
    return f"{kind.__module__}.{kind.__qualname__}"


def _kinds(kind: type[ProcessedMedia]) -> Iterator[type[ProcessedMedia]]:
    yield kind
    for heir in kind.__subclasses__():
        yield from _kinds(heir)


class KeptByName:
    """The items that were named last. For one thread.

    Args:
        max_bytes: of their inputs.
    """

    def __init__(self, max_bytes: int) -> None:
        self._max_bytes, self._num_bytes = max_bytes, 0
        self._kept: OrderedDict[str, NamedItem] = OrderedDict()

    def keep(self, name: str, form: ItemForm, item: MediaInput) -> None:
        """Keep an item, unless another has its name."""
        size = _num_bytes(item.inputs)
        if size > self._max_bytes:
            return
        if name not in self._kept:
            self._kept[name] = NamedItem(form, item.inputs)
            self._num_bytes += size
        self._kept.move_to_end(name)
        while self._num_bytes > self._max_bytes:
            _, oldest = self._kept.popitem(last=False)
            self._num_bytes -= _num_bytes(oldest.inputs)

    def find(self, name: str) -> NamedItem | None:
        """The item of a name; None: none is kept."""
        if name in self._kept:
            self._kept.move_to_end(name)
        return self._kept.get(name)


def _num_bytes(inputs: dict[str, PackedArray]) -> int:
    return sum(len(array.data) for array in inputs.values())
