"""Forms of answers whose calls hold to their tools' schemas: the parts of a structural tag.

An answer is free text up to a mark that opens calls, and from there what the format says. Every
mark with which a format opens calls must be a trigger: text behind another one would be free.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NoReturn

from headrace_core.errors import UnsupportedFeature

Form = Mapping[str, Any]
Tools = Mapping[str, Mapping[str, Any] | None]
"""Name -> schema of the arguments; None: any object."""

FREE: Form = {"type": "any_text"}


def const(text: str) -> Form:
    """Exactly this text."""
    return {"type": "const_string", "value": text}


def regex(pattern: str) -> Form:
    """A text that the whole pattern matches."""
    return {"type": "regex", "pattern": pattern}


def escaped(character: str) -> str:
    """A character as a regex, also within square brackets."""
    return "\\" + character if character in r"\^$.|?*+()[]{}-" else character


def schema_form(schema: Mapping[str, Any] | bool | None) -> Form:
    """JSON by a schema; None: any object."""
    return {"type": "json_schema", "json_schema": {"type": "object"} if schema is None else schema}


def sequence(*parts: Form) -> Form:
    """One after the other."""
    return parts[0] if len(parts) == 1 else {"type": "sequence", "elements": list(parts)}


def either(*parts: Form) -> Form:
    """One of them."""
    return parts[0] if len(parts) == 1 else {"type": "or", "elements": list(parts)}


def tag(begin: str, content: Form, end: str | list[str] = "") -> Form:
    """A content between two texts."""
    return {"type": "tag", "begin": begin, "content": content, "end": end}


def calls(tags: Sequence[Form], separator: str | None) -> Form:
    """One call or several; ``separator`` None: one."""
    if separator is None:
        return either(*tags)
    return {
        "type": "tags_with_separator",
        "tags": list(tags),
        "separator": separator,
        "at_least_one": True,
    }


def free_text(triggers: Iterable[str], tags: Sequence[Form], *, ends: bool = False) -> Form:
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
"""White space between marks, as the model likes it: a new line and its indent at most."""


def may_begin(bare: Form, first: str, mark: str, marked: Form, *, ends: bool) -> Form:
    """Free text in which calls stand behind a mark, or begin the answer without one.

    Args:
        bare: calls without the mark.
        first: the character with which these begin, and other answers do not.
        mark: the mark.
        marked: a tag that begins with it.
        ends: nothing comes behind calls.
    """
    rest = [] if ends else [free_text([mark], [marked])]
    space = r"[ \t\r\n]*"
    start, second = escaped(mark[0]), escaped(mark[1])
    # Other answers begin like neither of them: so much of the mark is enough to tell.
    other = f"{space}([^{escaped(first)}{start} \\t\\r\\n]|{start}[^{second}])"
    return either(
        sequence(regex(space), bare, *rest),
        sequence(regex(space), marked, *rest),
        sequence(regex(other), free_text([mark], [marked], ends=ends)),
        regex(f"{space}{start}?"),
    )


def several(one: Form, most: int, between: Form | None = None) -> Form:
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


def repeat(least: int, most: int, content: Form) -> Form:
    """So many of a form, one after the other."""
    return {"type": "repeat", "min": least, "max": most, "content": content}


def answer(*parts: Form) -> Form:
    """An answer that is nothing but these parts, in order, behind at most a little white space."""
    return sequence(SPACE, *parts)


def loose(text: str) -> list[Form]:
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
            "strict false, or tool_choice 'required' or one function",
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
