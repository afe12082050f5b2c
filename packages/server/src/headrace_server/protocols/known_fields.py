"""Known fields of the objects within a request, at every depth, and the search for others.

A model declares its fields. What it holds as plain objects (tools, parts of messages) has its fields
here, as :class:`KnownFields`. Data that is free by nature has none: schemas, arguments, metadata, variables
of templates.
"""

from __future__ import annotations

import functools
from collections.abc import Collection, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, NamedTuple, TypeAlias

from pydantic import BaseModel, ConfigDict

MAX_NAME = 64
"""Characters of one field's name, as messages and logs show it."""
MAX_UNKNOWN = 64
"""Names of unknown fields that one request may bring to the log and the metrics; more are not looked for."""

Path: TypeAlias = tuple[str | int, ...]


@dataclass(frozen=True)
class KnownFields:
    """Fields of an object; where a list is given, of each object in it.

    Args:
        fields: name -> fields of the objects that it holds; None: it holds a plain value or free data.
        types: objects of other types than these (their field ``type``) are not looked into: whoever
            reads them leaves them out, or refuses them by their type. None: all are.
    """

    fields: Mapping[str, KnownFields | None]
    types: frozenset[Any] | None = None

    def covers(self, kind: object) -> bool:
        """True if objects of this type are searched for unknown fields."""
        return self.types is None or (isinstance(kind, Hashable) and kind in self.types)


def known(names: str, /, **objects: KnownFields | None) -> KnownFields:
    """The fields of an object.

    Args:
        names: of the fields that hold plain values or free data, between spaces.
        objects: further fields, and what their objects have.
    """
    return KnownFields({**dict.fromkeys(names.split()), **objects})


class UnknownField(NamedTuple):
    """A field that nothing knows."""

    name: str
    """Its path without positions, so that there are few of them: ``tools[].function.parmeters``."""
    path: Path
    """Names and positions from the body's root."""
    known: tuple[str, ...]
    """Fields that are known in its place."""

    @property
    def place(self) -> str:
        """The path with positions: ``tools[0].function.parmeters``."""
        parts = [f"[{p}]" if isinstance(p, int) else f".{p[:MAX_NAME]}" for p in self.path]
        return "".join(parts).removeprefix(".")


class RequestObject(BaseModel):
    """An object within a request. Fields that no class declares are kept in ``model_extra``."""

    model_config = ConfigDict(extra="allow", allow_inf_nan=False, arbitrary_types_allowed=False)

    also_known: ClassVar[Mapping[str, KnownFields | None]] = {}
    """Known fields of declared fields that are plain objects, and documented fields that are not declared."""

    def is_searched(self) -> bool:
        """True if an object that holds this one searches it for unknown fields."""
        return True


def unknown_fields(body: RequestObject, also: Collection[str] = ()) -> list[UnknownField]:
    """Fields that nothing knows, at every depth, the first of each :attr:`UnknownField.name`; at most
    :data:`MAX_UNKNOWN`. Null is like a field that was left out.

    Args:
        also: names at the root that count as known.
    """
    search = _Search()
    search.model(body, (), "", also)
    return list(search.found.values())


class _Search:
    """One look through a body. Takes a microsecond for an object, and less for a field: there may be a
    hundred thousand."""

    def __init__(self) -> None:
        self.found: dict[str, UnknownField] = {}

    def model(
        self, model: RequestObject, path: Path, name: str, also: Collection[str] = ()
    ) -> None:
        """Look through a model.

        Args:
            path: of the model.
            name: the same without positions.
        """
        kind = type(model)
        declared = _declared(kind)
        prefix = name + "." if name else ""
        for field, value in (model.model_extra or {}).items():
            if value is None or field in also:
                continue
            if field in kind.also_known:
                self._value(value, kind.also_known[field], (*path, field), prefix + field)
            elif not self._note(prefix, field, path, (*declared.values(), *kind.also_known, *also)):
                return
        for field, value in model.__dict__.items():
            if isinstance(value, (list, dict, RequestObject)):
                shown = declared[field]
                below = kind.also_known.get(shown)
                self._value(value, below, (*path, shown), prefix + shown)

    def _note(self, prefix: str, field: str, path: Path, known: Iterable[str]) -> bool:
        """Keep an unknown field; False: enough are known."""
        name = prefix + field[:MAX_NAME]
        if name not in self.found:
            if len(self.found) >= MAX_UNKNOWN:
                return False
            self.found[name] = UnknownField(name, (*path, field), tuple(known))
        return True

    def _value(self, value: Any, known: KnownFields | None, path: Path, name: str) -> None:
        if isinstance(value, list):
            # Numbers are not looked at one by one: there may be millions.
            if value and isinstance(value[0], (dict, list, str, RequestObject)):
                name += "[]"
                for index, item in enumerate(value):
                    if isinstance(item, (dict, list, RequestObject)):
                        self._value(item, known, (*path, index), name)
        elif isinstance(value, RequestObject):
            if value.is_searched():
                self.model(value, path, name)
        elif isinstance(value, dict) and known is not None and known.covers(value.get("type")):
            fields, prefix = known.fields, name + "."
            for field, held in value.items():
                if field not in fields:
                    if held is not None and not self._note(prefix, field, path, fields):
                        return
                elif (below := fields[field]) is not None:
                    self._value(held, below, (*path, field), prefix + field)


@functools.cache
def _declared(kind: type[BaseModel]) -> Mapping[str, str]:
    """Attributes of a model -> the client's names of them."""
    return {name: info.alias or name for name, info in kind.model_fields.items()}
