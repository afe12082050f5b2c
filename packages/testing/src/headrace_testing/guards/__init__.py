"""Guards: context managers that fail a test in which something forbidden happens.

Each has a fixture of the same name in :mod:`headrace_testing.guards.fixtures`; a ``conftest``
imports those it wants::

    from headrace_testing.guards.fixtures import no_leaks, no_network  # noqa: F401
"""

from headrace_testing.guards.lag import LoopLag, guarded_loop
from headrace_testing.guards.leaks import Holdings, guarded_resources
from headrace_testing.guards.pickles import guarded_pickles
from headrace_testing.guards.sockets import guarded_sockets

__all__ = [
    "Holdings",
    "LoopLag",
    "guarded_loop",
    "guarded_pickles",
    "guarded_resources",
    "guarded_sockets",
]
