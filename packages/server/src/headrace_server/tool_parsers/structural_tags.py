"""Forms of answers whose calls hold to their tools' schemas: the parts of a structural tag.

An answer is free text up to a tag that opens calls, and from there what the format says. Every
tag with which a format opens calls must be a trigger: text behind another one would be free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from headrace_core.errors import UnsupportedFeature

StructuralTag = Mapping[str, Any]
Tools = Mapping[str, Mapping[str, Any] | None]
"""Name -> schema of the arguments; None: any object."""

FORCING = (
    "a tool_choice that forces a call: 'required' or one function (in messages, 'any' or 'tool')"
)
"""Choices for which every format serves every schema, as errors on any wire name them."""
FREE: StructuralTag = {"type": "any_text"}


def const(text: str) -> StructuralTag:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> StructuralTag:
    """A text that the whole pattern matches."""
    return {"type": "regex", "pattern": pattern}


def escaped(character: str) -> str:
    """A character as a regex, also within square brackets."""
    return "\\" + character if character in r"\^$.|?*+()[]{}-" else character


def json_schema(schema: Mapping[str, Any] | bool | None) -> StructuralTag:
    """JSON by a schema; None: any object."""
    return {"type": "json_schema", "json_schema": {"type": "object"} if schema is None else schema}


def sequence(*parts: StructuralTag) -> StructuralTag:
    """One after the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(*parts: StructuralTag) -> StructuralTag:
    """One of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def tag(begin: str, content: StructuralTag, end: str | list[str] = "") -> StructuralTag:
    """A content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(tags: Sequence[StructuralTag], separator: str | None) -> StructuralTag:
    """One call or several; ``separator`` None: one."""
    if separator is None:
        return either(*tags)
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
    }


def free_text(
    triggers: Iterable[str], tags: Sequence[StructuralTag], *, ends: bool = False
) -> StructuralTag:
    """Free text in which each of the triggers begins one of the tags.

    Args:
        ends: nothing comes behind the first tag.
    """
    return {
        "type": "triggered_tags",
        "triggers": list(triggers),
        "tags": list(tags),
        "stop_after_first": ends,
    }


SPACE = regex(r"[ \t\r\n]{0,8}")
"""White space between tags, as the model likes it: a new line and its indent at most."""


def may_begin(
    bare: StructuralTag, first: str, opening: str, tagged: StructuralTag, *, ends: bool
) -> StructuralTag:
    """Free text in which calls stand behind a tag, or begin the answer without one.

    Args:
        bare: calls without the tag.
        first: the character with which these begin, and other answers do not.
        opening: the tag.
        tagged: a tag that begins with it.
        ends: nothing comes behind calls.
    """
    rest = [] if ends else [free_text([opening], [tagged])]
    space = r"[ \t\r\n]*"
    start, second = escaped(opening[0]), escaped(opening[1])
    # Other answers begin like neither of them: so much of the tag is enough to tell.
    other = f"{space}([^{escaped(first)}{start} \\t\\r\\n]|{start}[^{second}])"
    return either(
        sequence(regex(space), bare, *rest),
        sequence(regex(space), tagged, *rest),
        sequence(regex(other), free_text([opening], [tagged], ends=ends)),
        regex(f"{space}{start}?"),
    )


def up_to(one: StructuralTag, most: int, between: StructuralTag | None = None) -> StructuralTag:
    """One of a form, up to ``most`` of them.

    Args:
        between: separates two of them; None: nothing but white space does, which may also follow
            the last. A separator makes the schemas in the form appear twice.
    """
    if most == 1:
        return one
    if between is None:
        return repeat(1, most, sequence(one, SPACE))
    return sequence(one, repeat(0, most - 1, sequence(between, one)))


def repeat(least: int, most: int, content: StructuralTag) -> StructuralTag:
    """So many of a form, one after the other."""
    return {"type": "repeat", "min": least, "max": most, "content": content}


def answer(*parts: StructuralTag) -> StructuralTag:
    """An answer that is nothing but these parts, in order, behind at most a little white space."""
    return sequence(SPACE, *parts)


def loose(text: str) -> list[StructuralTag]:
    """A text whose white space at either end is the model's to choose."""
    inner = [const(text.strip())] if text.strip() else []
    before = [SPACE] if text[:1].isspace() else []
    after = [SPACE] if inner and text[-1:].isspace() else []
    return [*before, *inner, *after]


class NotStrict(UnsupportedFeature):
    """A format cannot hold calls of a tool to its schema.

    Args:
        tool: its name.
        pointer: JSON pointer of the part of the schema that is to blame; "" = the whole.
        reason: why.
    """

    def __init__(self, tool: str, pointer: str, reason: str) -> None:
        super().__init__(
            f"{tool[:64]!r} cannot be strict with this server's tool-call parser: {reason}; send "
            f"strict false, or {FORCING}",
            param="tools",
        )
        self.tool = tool
        self.pointer = pointer


def not_strict(tool: str, pointer: str, reason: str) -> NoReturn:
    """Refuse a strict tool.

    Raises:
        NotStrict: always.
    """
    raise NotStrict(tool, pointer, reason)
