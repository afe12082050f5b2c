from __future__ import annotations

from collections.abc import Callable
from typing import Any

from headrace_core import plugins
from headrace_core.parallel import Communicator
from headrace_testing.engine.communicators import CommunicatorConformance


class TestSingleProcess(CommunicatorConformance):
    def on_every_rank(self, function: Callable[[Communicator], Any]) -> list[Any]:
        return [function(plugins.load("headrace.communicators", "single")())]
