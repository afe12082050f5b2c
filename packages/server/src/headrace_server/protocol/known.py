"""Known fields of the objects within a request, at every depth, and the search for others.

A model declares its fields. What it holds as plain objects (tools, parts of messages) has its fields
here, as :class:`Known`. Data that is free by nature has none: schemas, arguments, metadata, variables of
templates.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

MAX_NAME = 64
"""Characters of one field's name, as messages and logs show it."""

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class Known:
    """Fields of an object; where a list is given, of each object in it.

    Args:
        fields: name -> fields of the objects that it holds; None: it holds a plain value or free data.
        types: objects of other types than these (their field ``type``) are not looked into: whoever
            reads them leaves them out, or refuses them by their type. None: all are.
    """

    fields: Mapping[str, Known | None]
    types: frozenset[Any] | None = None

    def covers(self, kind: object) -> bool:
        """Whether objects of a type are looked into."""
        return self.types is None or (isinstance(kind, Hashable) and kind in self.types)


def known(names: str, /, **objects: Known | None) -> Known:
    """The fields of an object.

    Args:
        names: of the fields that hold plain values or free data, between spaces.
        objects: further fields, and what their objects have.
    """
    return Known({**dict.fromkeys(names.split()), **objects})


class Unknown(NamedTuple):
    """A field that nothing knows."""

    path: Path
    """Names and positions from the body's root."""
    known: tuple[str, ...]
    """Fields that are known in its place."""

    @property
    def name(self) -> str:
        """The path without positions, so that there are few of them: ``tools[].function.parmeters``."""
        return _shown(self.path, "[]".format)

    @property
    def place(self) -> str:
        """The path with positions: ``tools[0].function.parmeters``."""
        return _shown(self.path, "[{}]".format)


def _shown(path: Path, position: Callable[[int], str]) -> str:
    parts = [position(p) if isinstance(p, int) else f".{p[:MAX_NAME]}" for p in path]
    return "".join(parts).removeprefix(".")


class RequestObject(BaseModel):
    """An object within a request. Fields that no class declares are kept in ``model_extra``."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, arbitrary_types_allowed=False)

    also_known: ClassVar[Mapping[str, Known | None]] = {}
    """What declared fields hold as plain objects; and fields that are documented and not declared."""

    def is_searched(self) -> bool:
        """Whether an object that holds this one looks for unknown fields in it."""
        return True


def unknown_fields(body: RequestObject, also: Mapping[str, Any] | None = None) -> list[Unknown]:
    """Fields that nothing knows, at every depth, the first of each :attr:`Unknown.name`. Null is like a
    field that was left out.

    Args:
        also: names at the root that count as known.
    """
    found: dict[str, Unknown] = {}
    for unknown in _in_model(body, (), also or {}):
        found.setdefault(unknown.name, unknown)
    return list(found.values())


def _in_model(
    model: RequestObject, path: Path, also: Mapping[str, Any] | None = None
) -> Iterator[Unknown]:
    kind = type(model)
    for name, value in (model.model_extra or {}).items():
        if value is None or (also and name in also):
            continue
        if name in kind.also_known:
            yield from _in_value(value, kind.also_known[name], (*path, name))
        else:
            yield Unknown((*path, name), (*_names(kind), *kind.also_known, *(also or ())))
    for name in model.model_fields_set & kind.model_fields.keys():
        value = getattr(model, name)
        if isinstance(value, (BaseModel, list, dict)):
            shown = kind.model_fields[name].alias or name
            yield from _in_value(value, kind.also_known.get(shown), (*path, shown))


def _names(kind: type[BaseModel]) -> list[str]:
    return [info.alias or name for name, info in kind.model_fields.items()]


def _in_value(value: Any, known: Known | None, path: Path) -> Iterator[Unknown]:
    if isinstance(value, RequestObject):
        if value.is_searched():
            yield from _in_model(value, path)
    elif isinstance(value, list):
        # Numbers are not looked at one by one: there may be millions.
        if value and isinstance(value[0], (dict, str, RequestObject)):
            for index, item in enumerate(value):
                if isinstance(item, (dict, RequestObject)):
                    yield from _in_value(item, known, (*path, index))
    elif isinstance(value, dict) and known is not None and known.covers(value.get("type")):
        for name, held in value.items():
            if held is None:
                continue
            if name not in known.fields:
                yield Unknown((*path, name), tuple(known.fields))
            elif (below := known.fields[name]) is not None:
                yield from _in_value(held, below, (*path, name))
