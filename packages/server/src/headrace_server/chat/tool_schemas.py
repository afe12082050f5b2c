"""The schemas of a request's tools: checked, and named where the engine refuses what was made of them."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

from headrace_core.errors import RequestError
from headrace_core.sampling.params import StructuredOutputsParams

LITERAL_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords whose values are data: a ``$ref`` in there refers to nothing."""
NAMED_SCHEMAS = frozenset(
    {"properties", "patternProperties", "$defs", "definitions", "dependentSchemas"}
)
"""Keywords whose values map names to schemas: a key ``const`` in there is a name."""
DEFINITIONS = {"$defs": "", "definitions": "d"}
"""Keywords of definitions -> what keeps apart equal names under both, where several tools' are in one
schema."""

_PLACE = re.compile(r""" at ('#[^']*'|"#[^"]*")""")
"""A place in a schema, as the engine's errors name it."""
_IN_CALLS = re.compile(r"/items(?:/anyOf/(\d+))?/properties/parameters")
_DEFINED = re.compile(r"/\$defs/(d?)(\d+)_")


def check_references(path: str, schema: Any) -> None:
    """Check that what a schema refers to is there, and that its properties are schemas.

    Formats that write parameters one by one take a schema apart, where nobody would miss it.

    Args:
        path: of the schema in the request.

    Raises:
        RequestError: naming the place.
    """
    for pointer, value in _parts(schema):
        if pointer.rpartition("/")[2] == "$ref" and isinstance(value, str):
            if not _leads_somewhere(value, schema):
                where = place(path, pointer.removesuffix("/$ref"))
                raise RequestError(f"{where}: '$ref' {value!r:.80} leads nowhere", param="tools")
        elif not isinstance(value, (Mapping, bool)):
            raise RequestError(
                f"{place(path, pointer)} = {value!r:.80}: must be a JSON schema, an object or a boolean",
                param="tools",
            )


def place(path: str, pointer: str) -> str:
    """A place in a schema of the request: the schema's path, and the JSON pointer in it unless that is the
    whole. Without a path it is the pointer."""
    return f"{path}#{pointer}" if pointer or not path else path


def escaped(name: str) -> str:
    """A name as a part of a JSON pointer (RFC 6901)."""
    return name.replace("~", "~0").replace("/", "~1")


def _parts(schema: Any) -> Iterator[tuple[str, Any]]:
    """(JSON pointer, value) of all references, and of what stands where named schemas do."""
    pending = [("", schema, False)]
    while pending:
        at, found, names = pending.pop()
        if isinstance(found, list):
            pending += [(f"{at}/{index}", one, False) for index, one in enumerate(found)]
        if not isinstance(found, Mapping):
            continue
        for key, value in found.items():
            below = f"{at}/{escaped(str(key))}"
            if names or key == "$ref":
                yield below, value
            if names or key not in LITERAL_VALUES:
                pending.append((below, value, not names and key in NAMED_SCHEMAS))


def _leads_somewhere(reference: str, root: Any) -> bool:
    """True for other references than JSON pointers: the engine says what it knows of these."""
    if not reference.startswith("#/"):
        return True
    found = root
    for part in unquote(reference[2:]).split("/"):
        name = part.replace("~1", "/").replace("~0", "~")
        if isinstance(found, Mapping) and name in found:
            found = found[name]
        elif isinstance(found, list) and name.isdecimal() and int(name) < len(found):
            found = found[int(name)]
        else:
            return False
    return True


@dataclass(frozen=True)
class Sources:
    """The request's schemas that a constraint was made of."""

    schemas: Sequence[tuple[str, Mapping[str, Any] | bool]]
    """(path in the request, schema); the tools' first, all of them, in their order. Path "": the request's
    field says which schema it is."""
    only: int | None = None
    """Index of the one that is the constraint as it stands, if it is JSON."""

    def name_in(
        self, error: RequestError, constraint: StructuredOutputsParams | None, client_field: str
    ) -> None:
        """Name places as the client knows them, in an error of the engine about a constraint.

        Args:
            error: is changed.
            constraint: what was made of the schemas.
            client_field: the request's field that asked for it.
        """
        field = error.param or ""
        if constraint is None or not field.startswith("structured_outputs"):
            return
        message = str(error).replace(f"{field}: ", f"{client_field}: ", 1)

        def named(found: re.Match[str]) -> str:
            known = self._find(_unquoted(found[1])[1:], constraint)
            return found[0] if known is None else f" at {known!r}"

        error.args = (_PLACE.sub(named, message),)
        error.param = client_field

    def _find(self, pointer: str, constraint: StructuredOutputsParams) -> str | None:
        if isinstance(constraint.structural_tag, Mapping):
            return self._in_tag(pointer, constraint.structural_tag)
        if self.only is not None:
            return place(self.schemas[self.only][0], pointer)
        call, defined = _IN_CALLS.match(pointer), _DEFINED.match(pointer)
        if call is not None:
            return place(self.schemas[int(call[1] or 0)][0], pointer[call.end() :])
        if defined is not None:
            keyword = next(word for word, mark in DEFINITIONS.items() if mark == defined[1])
            name = pointer[defined.end() :]
            return place(self.schemas[int(defined[2])][0], f"/{keyword}/{name}")
        return None

    def _in_tag(self, pointer: str, tag: Mapping[str, Any]) -> str | None:
        """A place behind the first schema on the way."""
        found: Any = tag
        parts = pointer.split("/")[1:]
        for depth, part in enumerate(parts, 1):
            name = part.replace("~1", "/").replace("~0", "~")
            try:
                found = found[int(name)] if isinstance(found, list) else found[name]
            except (KeyError, IndexError, ValueError, TypeError):
                return None
            if name in ("json_schema", "schema"):
                return self._inside(found, "".join(f"/{one}" for one in parts[depth:]))
        return None

    def _inside(self, schema: Any, inner: str) -> str | None:
        """A place in a schema that is one of the request's, or a property of one."""
        own = _without(schema, *DEFINITIONS, "$schema", "$id")
        shared = inner.split("/")[1:2]
        for path, whole in self.schemas:
            if _without(whole, *DEFINITIONS, "$schema", "$id") == own:
                return place(path, inner)
            named = whole.get("properties") if isinstance(whole, Mapping) else None
            for name, part in named.items() if isinstance(named, Mapping) else ():
                if _without(part, *DEFINITIONS) == own:
                    from_root = shared and shared[0] in DEFINITIONS
                    return place(
                        path, inner if from_root else f"/properties/{escaped(name)}{inner}"
                    )
        return None


NO_SOURCES = Sources(())


def _without(schema: Any, *keywords: str) -> Any:
    if not isinstance(schema, Mapping):
        return schema
    return {key: value for key, value in schema.items() if key not in keywords}


def _unquoted(text: str) -> str:
    """The text that Python's ``repr`` has put in quotes."""
    return text[1:-1].encode("ascii", "backslashreplace").decode("unicode_escape")
