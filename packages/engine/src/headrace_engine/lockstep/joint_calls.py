"""Calls that all engines with experts in common obey, or none does: those that take away what others need.

An engine says that it can obey, or why it cannot, and does so only if all can. Then it says how that went;
if one of them failed, all take back what they did. Whoever called gets the cause from each engine.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

import msgspec

from headrace_core.errors import EngineDead, EngineError, RequestError
from headrace_engine.clients.wire import RemoteError, as_data, as_exception

MOST_CHARACTERS, MOST_OF_CALL = 500, 200
"""Characters of a cause, and of a call, as other engines are told of them."""
_DETAILS = ("field", "param")
"""Attributes of a cause that they are told, too."""

Result = TypeVar("Result")
Agree = Callable[[str], Sequence[str]]
"""Says a word to all engines, and gives those of all, by engine."""


class _Word(msgspec.Struct, frozen=True):
    """An engine's word on a call."""

    call: str
    """The call as this engine got it."""
    error: RemoteError | None = None
    """Why it cannot obey, or could not."""


def obey_jointly(
    agree: Agree,
    call: str,
    *,
    check: Callable[[], None],
    obey: Callable[[], Result],
    take_back: Callable[[BaseException], None],
) -> Result:
    """Obey a call if all engines can, and give what that gives.

    Args:
        agree: see :data:`Agree`.
        call: its name and arguments, by which engines see that they were told the same.
        check: raises why this engine cannot obey now.
        obey: does as the call says.
        take_back: undoes that on every engine, given the cause: one could not obey after all.

    Raises:
        BaseException: this engine's own cause, else that of the first engine that has one, with its number.
        RequestError: engines were told to do different things.
    """
    call = call[:MOST_OF_CALL]
    _agreed(agree, call, check)
    try:
        return _agreed(agree, call, obey)
    except BaseException as error:
        take_back(error)
        raise


def _agreed(agree: Agree, call: str, do: Callable[[], Result]) -> Result:
    """Do something, say how that went, and give its result if it went well on all engines."""
    try:
        result = do()
    except BaseException as error:
        _say(agree, _Word(call, _told(error)))
        raise
    for engine, word in enumerate(_say(agree, _Word(call))):
        if word.error is not None:
            raise _of_engine(engine, word.error)
        if word.call != call:
            raise RequestError(
                f"{call}: engine {engine} was told something else at the same time ({word.call}): must be "
                "one call after the other",
                param="method",
            )
    return result


def _say(agree: Agree, word: _Word) -> list[_Word]:
    told = agree(msgspec.json.encode(word).decode())
    return [msgspec.json.decode(each, type=_Word) for each in told]


def _told(error: BaseException) -> RemoteError:
    data = as_data(error)
    details = {name: str(data.details[name])[:100] for name in _DETAILS if name in data.details}
    return RemoteError(data.kind, data.message[:MOST_CHARACTERS], details)


def _of_engine(engine: int, error: RemoteError) -> BaseException:
    """The error of another engine, as this one raises it."""
    told = f"engine {engine}: {error.message}"
    found = as_exception(msgspec.structs.replace(error, message=told))
    if isinstance(found, EngineDead):  # a class that is none of ours
        return EngineError(f"engine {engine}: {error.kind}: {error.message}")
    return found
