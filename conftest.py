"""Plug-in of all tests of the repository: a run may ask for samples of long tails; and what every property
test leaves to the machine."""

from __future__ import annotations

import os

from hypothesis import HealthCheck, settings

pytest_plugins = ["headrace_testing.sampling"]


def pytest_configure() -> None:
    """No property test fails because the machine is slow; ``CI`` alone has hypothesis say so. No engine finds
    what another run's measured.

    The first text of a process without hypothesis' table of characters takes seconds of processor time to
    draw, and most of a minute where several processes do so on two cores.
    """
    os.environ.setdefault("HEADRACE_CACHE_ROOT", "")
    settings.register_profile("patient", settings(), suppress_health_check=[HealthCheck.too_slow])
    settings.load_profile("patient")
