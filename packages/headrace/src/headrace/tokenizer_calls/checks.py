"""Checks of what scripts hand to a tokenizer; each names the argument."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from headrace_core.arrays import own_value
from headrace_core.errors import RequestError

LARGEST_ID = 2**32 - 1
"""Ids up to this may be asked for; those beyond the vocabulary have no text."""
SIDES = ("right", "left")


def need_text(name: str, given: object) -> str:
    """A text that can be written as UTF-8.

    Raises:
        RequestError: it is not one.
    """
    if not isinstance(given, str):
        raise RequestError(f"{name} = {given!r:.100}: must be text", param=name.partition("[")[0])
    from headrace_engine.input_processing.tokens import check_text

    check_text(name, given)
    return given


def need_texts(name: str, given: object) -> list[str]:
    """One text or several, as a list.

    Raises:
        RequestError: they are not texts.
    """
    if isinstance(given, str):
        return [need_text(name, given)]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise RequestError(f"{name} = {given!r:.100}: must be text or a list of texts", param=name)
    return [need_text(f"{name}[{index}]", one) for index, one in enumerate(given)]


def several(name: str, given: object, accepted: str) -> list[Any]:
    """The elements of a list, an array or another collection.

    Raises:
        RequestError: there are none to be had; says what is ``accepted``.
    """
    found = own_value(given)
    if not isinstance(found, Iterable) or isinstance(found, str | bytes | bytearray | Mapping):
        raise RequestError(
            f"{name} = {given!r:.100}: must be {accepted}", param=name.partition("[")[0]
        )
    return [own_value(one) for one in found]


def need_ids(name: str, ids: Iterable[object]) -> list[int]:
    """Token ids; those outside the vocabulary are taken, too.

    Raises:
        RequestError: one is not an integer from 0 to :data:`LARGEST_ID`.
    """
    found: list[int] = []
    for index, one in enumerate(ids):
        if not isinstance(one, int) or not 0 <= one <= LARGEST_ID:
            raise RequestError(
                f"{name}[{index}] = {one!r:.100}: must be a token id, an integer from 0 to {LARGEST_ID}",
                param=name.partition("[")[0],
            )
        found.append(one)
    return found


def need_length(name: str, given: Any) -> int | None:
    """A number of tokens, or None.

    Raises:
        RequestError: it is not an integer of at least 1.
    """
    length = own_value(given)
    if length is None:
        return None
    if not isinstance(length, int) or isinstance(length, bool) or length < 1:
        raise RequestError(f"{name} = {given!r:.100}: must be at least 1, or None", param=name)
    return length


def need_side(name: str, side: str) -> str:
    """A side where texts are cut or filled up.

    Raises:
        RequestError: there is no such side.
    """
    if side not in SIDES:
        raise RequestError(f"{name} = {side!r:.100}: must be 'right' or 'left'", param=name)
    return side


def need_flag(name: str, given: object) -> bool:
    """True or False.

    Raises:
        RequestError: it is neither.
    """
    if own_value(given) not in (True, False):
        raise RequestError(f"{name} = {given!r:.100}: must be True or False", param=name)
    return bool(given)
