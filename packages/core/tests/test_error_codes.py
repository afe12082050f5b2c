"""The error codes are complete and stable."""

from __future__ import annotations

import inspect
import re
from collections import Counter

import pytest

import headrace_core.errors
from headrace_core.errors import BUG, ERROR_CODES, HeadraceError, QueueFull, entry_of

EXIT_BY_AREA = {
    "CFG": {2}, "FIL": {2, 8}, "MOD": {3}, "MEM": {4}, "DEV": {5}, "NET": {6, 8}, "PLG": {7}, "BUG": {70},
    "ENG": {70}, "REQ": {2, None}, "QUE": {None}, "SRV": {None},
}  # fmt: skip
INTERNAL = {"HeadraceError", "CaptureRefused", "ReplayFailed"}
"""Bases, and what the engine handles itself."""


@pytest.mark.req("REL-11")
def test_codes_are_well_formed_and_unique():
    assert max(Counter(entry.code for entry in ERROR_CODES).values()) == 1
    assert max(Counter(name for entry in ERROR_CODES for name in entry.classes).values()) == 1
    for entry in ERROR_CODES:
        found = re.fullmatch(r"HR-([A-Z]{3})-\d{3}", entry.code)
        assert found
        assert entry.exit_status in EXIT_BY_AREA[found[1]], entry.code


def test_every_exception_of_ours_has_a_code():
    ours = [
        kind
        for _, kind in inspect.getmembers(headrace_core.errors, inspect.isclass)
        if issubclass(kind, HeadraceError) and kind.__name__ not in INTERNAL
    ]
    assert len(ours) > 15
    for kind in ours:
        assert entry_of(kind.__new__(kind)) is not BUG, kind


def test_an_entry_is_the_nearest_class_s():
    class Special(QueueFull):
        pass

    assert entry_of(Special("x", retry_after=1)).code == "HR-QUE-001"
    assert entry_of(MemoryError()).code == "HR-MEM-002"
    assert entry_of(KeyError("x")) is BUG
