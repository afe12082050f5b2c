"""Request ids that callers name: one or several."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_core.errors import RequestError


def as_request_ids(given: object, name: str = "request_ids") -> list[str]:
    """Request ids as a list. Unknown ids are not refused.

    Args:
        given: one id, or an iterable of ids.
        name: the argument's, for messages.

    Raises:
        RequestError: it is neither.
    """
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Iterable) or isinstance(given, bytes | bytearray | memoryview):
        raise _refused(name, name, given)
    ids = list(given)
    for index, one in enumerate(ids):
        if not isinstance(one, str):
            raise _refused(name, f"{name}[{index}]", one)
    return ids


def _refused(name: str, place: str, given: object) -> RequestError:
    return RequestError(
        f"{place} = {given!r:.100}: must be text, or a list of request ids, each text", param=name
    )
