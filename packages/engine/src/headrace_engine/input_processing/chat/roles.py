"""Roles of messages. A template may define any, so only what cannot be meant is refused: a misspelled role
that every template knows, and a role whose messages the template leaves out."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.errors import RequestError

ROLES = ("assistant", "developer", "function", "system", "tool", "user")
"""Roles that clients and templates agree on."""
NEAR = 0.8
"""Roles at least so alike are near (:class:`difflib.SequenceMatcher`, ratio): ``usr`` and ``user`` (0.86)
are, ``model`` and ``tool`` (0.44) are not."""

Message = Mapping[str, Any]


def own_roles(messages: Sequence[Message], template: str) -> dict[str, int]:
    """Roles that are neither common nor quoted in the template -> index of the first message of each.

    Args:
        messages: of a chat; each has a ``role``.
        template: its source.

    Raises:
        RequestError: one of them is a common role but for a letter, its case or the space around it.
    """
    found: dict[str, int] = {}
    for index, message in enumerate(messages):
        role = message.get("role")
        if not isinstance(role, str) or role in ROLES or role in found:
            continue
        if f"'{role}'" in template or f'"{role}"' in template:
            continue
        if near := _near(role):
            place = f"messages[{index}].role"
            raise RequestError(
                f"{place} = {role[:64]!r}: did you mean {near!r}? Common roles are "
                f"{', '.join(map(repr, ROLES))}; the chat template does not name this one",
                param=place,
            )
        found[role] = index
    return found


def without_contents(messages: Sequence[Message], roles: Mapping[str, int]) -> list[Message] | None:
    """The messages with nothing in those of some roles; None: there was nothing in them."""
    emptied: list[Message] = [
        {**one, "content": type(one["content"])()}
        if one["role"] in roles and one.get("content")
        else one
        for one in messages
    ]
    return None if emptied == list(messages) else emptied


def left_out(roles: Mapping[str, int]) -> RequestError:
    """The error for roles whose messages do not change the prompt."""
    role, index = next(iter(roles.items()))
    place = f"messages[{index}].role"
    return RequestError(
        f"{place} = {role[:64]!r}: the chat template leaves messages of this role out; common roles are "
        f"{', '.join(map(repr, ROLES))}",
        param=place,
    )


def _near(role: str) -> str:
    """The common role that a word misspells, or ""."""
    word = role.strip().lower()
    if word in ROLES:
        return word
    if not word.isalpha():  # user2, tool_response
        return ""
    near = difflib.get_close_matches(word, ROLES, n=1, cutoff=NEAR)
    return near[0] if near else ""
