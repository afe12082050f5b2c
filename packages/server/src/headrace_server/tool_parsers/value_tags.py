"""Forms of a call's parameters, for formats that write each of them by itself.

The schema of an object is taken apart: each property is a value of its own, in the order in which
the schema names them. What only the object as a whole can satisfy is refused.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

from headrace_server.tool_parsers.schema_values import SchemaValues, spell
from headrace_server.tool_parsers.structural_tags import (
    StructuralTag,
    const,
    either,
    escaped,
    json_schema,
    not_strict,
    regex,
    repeat,
    sequence,
)

_ANNOTATIONS = frozenset(
    {"$comment", "$schema", "$id", "default", "deprecated", "description", "example", "examples",
     "readOnly", "title", "writeOnly"}
)  # fmt: skip
_DEFINITIONS = ("$defs", "definitions")
_OBJECT = _ANNOTATIONS | {*_DEFINITIONS, "additionalProperties", "properties", "required", "type"}
_MAX_IN_ORDER = 8
"""Parameters of which none is required that are kept in their order."""
_MAX_STEPS = 64
"""References and alternatives that are followed in one schema."""


class Parameter(NamedTuple):
    """A parameter of a tool."""

    name: str
    schema: Any
    """With the definitions that it may refer to."""
    required: bool
    pointer: str


def parameters(tool: str, schema: Mapping[str, Any]) -> list[Parameter]:
    """The parameters that a schema names, in its order.

    Raises:
        UnsupportedFeature: it says more than that; names the keyword.
    """
    for keyword in schema.keys() - _OBJECT:
        not_strict(tool, "", f"{keyword!r}: parameters are written one by one in its format")
    named = schema.get("properties", {})
    required = schema.get("required", [])
    if not isinstance(named, Mapping):
        not_strict(tool, "/properties", "must be an object")
    if not isinstance(required, list) or not all(isinstance(name, str) for name in required):
        not_strict(tool, "/required", "must be a list of names")
    for name in required:
        if name not in named:
            not_strict(tool, "/required", f"{name[:64]!r} is not among the properties")
    shared = {word: schema[word] for word in _DEFINITIONS if word in schema}
    for reference in _references([named, shared]):
        if not reference.startswith(("#/$defs/", "#/definitions/")):
            not_strict(tool, "", f"'$ref': {reference[:64]!r} is not among the definitions")
    return [
        Parameter(
            name,
            {**part, **shared} if isinstance(part, Mapping) and _references(part) else part,
            name in required,
            f"/properties/{name}",
        )
        for name, part in named.items()
    ]


def need_parameters(tool: str, schema: Mapping[str, Any]) -> None:
    """Refuse a schema that asks for properties without naming any: an empty call would be all that
    could be written.

    Raises:
        UnsupportedFeature: it is such a schema.
    """
    if not schema.get("properties") and schema.get("additionalProperties"):
        not_strict(tool, "", "has no 'properties': its format writes parameters one by one")


def _references(part: Any) -> list[str]:
    found, waiting = [], [part]
    while waiting:
        one = waiting.pop()
        if isinstance(one, Mapping):
            if isinstance(one.get("$ref"), str):
                found.append(one["$ref"])
            waiting += one.values()
        elif isinstance(one, list):
            waiting += one
    return found


def listed(parts: Sequence[tuple[StructuralTag, bool]], separator: str) -> StructuralTag | None:
    """Parts in their order, each of which may be required, with a separator between those that come.

    Many parts of which none is required may come in any order, and one of them more than once: the
    last counts. In order, each would be written once for every part that may be the first.

    Returns:
        None if there are none.
    """
    if not parts:
        return None
    gap, nothing = const(separator), const("")
    first = next((index for index, (_, must) in enumerate(parts) if must), None)
    if first is not None:
        before = [either(sequence(tag, gap), nothing) for tag, _ in parts[:first]]
        return sequence(*before, parts[first][0], *_following(parts[first + 1 :], gap))
    if len(parts) <= _MAX_IN_ORDER:
        return either(
            *(sequence(tag, *_following(parts[i + 1 :], gap)) for i, (tag, _) in enumerate(parts)),
            nothing,
        )
    one = either(*(tag for tag, _ in parts))
    return either(sequence(one, repeat(0, len(parts) - 1, sequence(gap, one))), nothing)


def _following(
    parts: Sequence[tuple[StructuralTag, bool]], gap: StructuralTag
) -> list[StructuralTag]:
    """Parts behind one that came."""
    return [
        sequence(gap, tag) if must else either(sequence(gap, tag), const("")) for tag, must in parts
    ]


@dataclass(frozen=True)
class BareText:
    """Values in formats whose text has no types."""

    end: str
    """The tag behind a value."""
    newlines: bool
    """One new line at each end of a value belongs to the format."""

    def tag(self, tool: str, parameter: Parameter) -> StructuralTag | None:
        """Structural tag of a value's text; None: any text.

        Raises:
            UnsupportedFeature: text without quotes cannot be held to the schema; names the keyword.
        """
        types = value_types(tool, parameter)
        if not types & {"string", "any"}:
            space = regex(r"\n?") if self.newlines else const("")
            return sequence(space, json_schema(parameter.schema), space)
        leaves = _leaves(tool, parameter)
        if all(says_nothing(leaf) for leaf in leaves):
            return None
        tags = [self._leaf(tool, parameter, leaf, types) for leaf in leaves]
        return either(*tags)

    def _leaf(
        self, tool: str, parameter: Parameter, leaf: Mapping[str, Any], types: frozenset[str]
    ) -> StructuralTag:
        said = leaf.keys() - _ANNOTATIONS - set(_DEFINITIONS)
        values = leaf.get("enum", [leaf["const"]] if "const" in leaf else None)
        if values is not None and said <= {"enum", "const", "type"}:
            return self._values(tool, parameter, values, types)
        if said == {"type"} and leaf["type"] in ("boolean", "null"):
            return self._values(
                tool, parameter, [None] if leaf["type"] == "null" else [True, False], types
            )
        if types == {"string"} and said <= {"type", "minLength", "maxLength"}:
            least, most = leaf.get("minLength", 0), leaf.get("maxLength", "")
            for word in ("minLength", "maxLength"):
                if not isinstance(leaf.get(word, 0), int):
                    not_strict(tool, parameter.pointer, f"{word!r}: must be an integer")
            edge = const("\n") if self.newlines else const("")
            other = escaped(self.end[0])
            return sequence(edge, regex(f"[^{other}]{{{least},{most}}}"), edge)
        keyword = next(iter(sorted(said - {"type", "minLength", "maxLength"})), "type")
        not_strict(
            tool, parameter.pointer,
            f"{keyword!r}: cannot be held where strings are written without quotes",
        )  # fmt: skip

    def _values(
        self, tool: str, parameter: Parameter, values: Sequence[Any], types: frozenset[str]
    ) -> StructuralTag:
        space = regex(r"\n?") if self.newlines else const("")
        texts = []
        if not isinstance(values, list) or not values:
            not_strict(tool, parameter.pointer, "'enum': must be a list of at least one value")
        for value in values:
            text = value if isinstance(value, str) else json.dumps(value, ensure_ascii=False)
            read = json.loads(spell(text, types))
            if (
                self.end in text
                or text.strip("\n") != text
                or (read, type(read)) != (value, type(value))
            ):
                not_strict(tool, parameter.pointer, f"the value {text[:64]!r} cannot be written")
            texts.append(const(text))
        return sequence(space, either(*texts), space)


def value_types(tool: str, parameter: Parameter) -> frozenset[str]:
    """As the parser sees them."""
    schema = parameter.schema if isinstance(parameter.schema, Mapping) else {}
    shared = {word: schema[word] for word in _DEFINITIONS if word in schema}
    one = {"name": tool, "parameters": {**shared, "properties": {parameter.name: schema}}}
    return SchemaValues([one]).types(tool, parameter.name)


def _leaves(tool: str, parameter: Parameter) -> list[Mapping[str, Any]]:
    """The schema's alternatives, references followed."""
    root = parameter.schema if isinstance(parameter.schema, Mapping) else {}
    leaves: list[Mapping[str, Any]] = []
    waiting: list[Any] = [root]
    for _ in range(_MAX_STEPS):
        if not waiting:
            return leaves
        part = waiting.pop(0)
        if not isinstance(part, Mapping):
            leaves.append({})
            continue
        said = part.keys() - _ANNOTATIONS - set(_DEFINITIONS)
        if said == {"$ref"}:
            waiting.append(_target(str(part["$ref"]), root))
        elif said == {"anyOf"}:
            if not isinstance(part["anyOf"], list) or not part["anyOf"]:
                not_strict(
                    tool, parameter.pointer, "'anyOf': must be a list of at least one schema"
                )
            waiting += part["anyOf"]
        elif isinstance(part.get("type"), list) and said == {"type"}:
            leaves += [{"type": kind} for kind in part["type"]]
        else:
            leaves.append(part)
    not_strict(tool, parameter.pointer, "too many alternatives")


def _target(reference: str, root: Mapping[str, Any]) -> Any:
    part: Any = root
    for step in reference.removeprefix("#/").split("/"):
        part = (
            part.get(step.replace("~1", "/").replace("~0", "~"), {})
            if isinstance(part, Mapping)
            else {}
        )
    return part


def says_nothing(leaf: Mapping[str, Any]) -> bool:
    """True if every text that reads as one of its type satisfies it."""
    said = leaf.keys() - _ANNOTATIONS - set(_DEFINITIONS)
    return not said or (said == {"type"} and isinstance(leaf["type"], str))
