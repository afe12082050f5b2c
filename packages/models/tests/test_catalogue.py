"""The catalogue is what is installed, and nothing is in it that is not tested."""

from __future__ import annotations

import importlib
from importlib.metadata import entry_points
from pathlib import Path

from model_families_conformance import FamilyConformance

from headrace_models.catalogue import ARCHITECTURES, CACHES


def test_the_entry_points_are_the_rows() -> None:
    entries = entry_points(group="headrace.models")
    own = {e.name: e.value for e in entries if e.value.startswith("headrace_models.")}
    assert own == {row.name: row.entry for row in ARCHITECTURES.values()}


def test_kinds_of_cache_are_known() -> None:
    for row in ARCHITECTURES.values():
        assert row.caches == tuple(kind for kind in CACHES if kind in row.caches), row.name


def test_aliases_lead_to_rows_of_the_same_class() -> None:
    for row in ARCHITECTURES.values():
        if row.alias_of:
            assert ARCHITECTURES[row.alias_of].target == row.target, row.name


def test_every_architecture_that_generates_has_a_test_of_parity() -> None:
    wanted = {
        row.name for row in ARCHITECTURES.values() if row.task == "generate" and not row.alias_of
    }
    assert wanted - _tested() == set()


def _tested() -> set[str]:
    """Architectures of all classes of the suite in this folder."""
    for path in sorted(Path(__file__).parent.glob("test_*.py")):
        importlib.import_module(path.stem)
    found, classes = set(), [FamilyConformance]
    while classes:
        children = classes.pop().__subclasses__()
        classes += children
        found |= {child().architecture() for child in children if child.__name__.startswith("Test")}
    return found
