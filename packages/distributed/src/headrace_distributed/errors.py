"""What goes wrong between ranks.

GroupError (EngineError)
├── PeerLost         a rank died, left, or gave up; carries its number
├── PeerTimeout      a rank did not come in time; carries its number
└── CallMismatch     two ranks called different operations, or with different sizes

A group that has raised one of these is of no further use: the ranks no longer agree on which call is next.
"""

from __future__ import annotations

from headrace_core.errors import EngineError


class GroupError(EngineError):
    """The ranks of a group cannot go on together."""


class PeerLost(GroupError):
    """A rank is gone.

    Args:
        message: names the rank and what became of it.
        rank: the number of that rank; None: it could not be found out.
    """

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class PeerTimeout(GroupError):
    """A rank that is alive, as far as is known, did not come in time.

    Args:
        message: names the rank, the operation and the time.
        rank: the number of that rank; None: it could not be found out.
    """

    def __init__(self, message: str, *, rank: int | None) -> None:
        super().__init__(message)
        self.rank = rank


class CallMismatch(GroupError):
    """Ranks called different operations at the same place in their sequence."""
