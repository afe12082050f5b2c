"""Processes of servers behind a router are killed at random moments; ``nox -s chaos``: for ten minutes."""

from __future__ import annotations

import os

import pytest
from chaos import chaos, parser

FULL = os.environ.get("HEADRACE_TESTS") == "full"
SHORT = ("--sim", "--minutes", "0.1", "--pause", "1.2", "--clients", "6", "--questions", "4")
LONG = ("--minutes", "10")
SLOW = "20"
"""Seconds in place of five: other tests may keep the machine busy."""


@pytest.mark.req("REL-03")
def test_no_request_is_lost_and_nothing_is_left_behind() -> None:
    args = parser().parse_args([*(LONG if FULL else SHORT), "--limit", SLOW])
    args.progress = False
    assert chaos(args) == []
