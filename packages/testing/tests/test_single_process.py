from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_testing.engine.communicators import CommunicatorConformance


class TestSingleProcess(CommunicatorConformance):
    def on_every_rank(self, function: Callable[..., Any], *arguments: Any) -> list[Any]:
        group = plugins.load("headrace.communicators", "single")(0, 1, "")
        return [function(group, *arguments)]


def test_a_single_process_is_rank_0_of_1() -> None:
    with pytest.raises(ConfigError, match="got 1 of 2"):
        plugins.load("headrace.communicators", "single")(1, 2, "tcp://127.0.0.1:1/tp")
