"""Places of what validation found wrong, as the client wrote its request.

Validators name the members of unions and their own steps within a location
(``input``, ``list[...]``, 0, ``message``, ``content``). Here a location is followed through the
request itself: what is not there was not written by the client, and is left out
(``input[0].content``).
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Mapping, Sequence
from typing import Any, TypeAlias

Location: TypeAlias = Sequence[str | int]
Place: TypeAlias = tuple[str | int, ...]

MOST = 256
"""Problems of one request that are looked at."""
_MAX_KEY = 64
"""Characters of one key, as messages show it."""
_NEAR = 0.6
"""Names at least so alike are near (:class:`difflib.SequenceMatcher`, ratio)."""
_QUOTED = re.compile(r"'([^']*)'")
_MEMBERS = frozenset({"str", "int", "float", "bool", "list", "dict"})
_BEGIN = "Input should be "


def place_in(body: Any, location: Location, kind: str) -> Place:
    """Names and positions that lead to a problem.

    Args:
        body: the request as it was decoded.
        location: of the problem, from the body on.
        kind: type of the problem; ``missing``: the last name is that of a key that should be there.
    """
    place: list[str | int] = []
    at = body
    for index, part in enumerate(location):
        if isinstance(at, dict) and isinstance(part, str):
            if part in at:
                at = at[part]
            elif kind != "missing" or index + 1 < len(location):
                continue
        elif isinstance(at, list) and isinstance(part, int) and part < len(at):
            at = at[part]
        else:
            continue
        place.append(part)
    return tuple(place)


def plain_place(location: Location) -> Place:
    """The same where the request is not at hand, of a form say: names of union members are left out. A
    form's field that may be sent several times, ``temperature[]``, is named as it is sent."""
    place: list[str | int] = []
    for part in location:
        if isinstance(part, int):
            if place and str(place[-1]).endswith("[]"):
                continue
        elif not part.removesuffix("[]").isidentifier() or part in _MEMBERS:
            continue
        place.append(part)
    return tuple(place)


def written(place: Place) -> str:
    """A place as messages name it: ``messages[0].content``."""
    parts = [f"[{part}]" if isinstance(part, int) else f".{part[:_MAX_KEY]}" for part in place]
    return "".join(parts).removeprefix(".")


def told(problems: Sequence[Mapping[str, Any]], body: Any = None) -> list[tuple[str, str]]:
    """Places and messages, each place once, of the first :data:`MOST` problems.

    A value that fits no member of a union is a problem of each. Members of another JSON type say nothing
    where the fault lies deeper in the value; where it does not, one message has what all accept.

    Args:
        problems: pydantic's, whose locations begin with where the value came from (``body``).
        body: the request as it was decoded; None: not at hand.
    """
    found: list[tuple[Place, str, str]] = []
    hinted: list[tuple[Place, str]] = []
    for problem in problems[:MOST]:
        location, kind = problem["loc"][1:], str(problem["type"])
        place = plain_place(location) if body is None else place_in(body, location, kind)
        found.append((place, kind, str(problem["msg"])))
        hinted.append((place, _hint(problem)))
    inner = {place[:end] for place, _, _ in found for end in range(len(place))}
    hints = {place: hint for place, hint in hinted if hint}
    messages: dict[Place, list[str]] = {}
    for place, kind, message in found:
        if not (kind.endswith("_type") and place in inner):
            messages.setdefault(place, []).append(message)
    return [
        (written(place), _joined(all_) + hints.get(place, "")) for place, all_ in messages.items()
    ]


def _hint(problem: Mapping[str, Any]) -> str:
    """The name that a misspelled one is near to, where only some names are accepted."""
    given = problem.get("input")
    if problem["type"] != "literal_error" or not isinstance(given, str) or len(given) > _MAX_KEY:
        return ""
    names = _QUOTED.findall(problem["ctx"]["expected"])
    near = difflib.get_close_matches(given.strip().lower(), names, n=1, cutoff=_NEAR)
    return f"; did you mean {near[0]!r}?" if near else ""


def _joined(messages: Sequence[str]) -> str:
    """Messages on one value: what it should be, for each member of a union."""
    distinct = list(dict.fromkeys(messages))
    if not all(message.startswith(_BEGIN) for message in distinct):
        return ", or: ".join(distinct)
    return _BEGIN + " or ".join(message.removeprefix(_BEGIN) for message in distinct)
