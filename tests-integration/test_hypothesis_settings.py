"""A property test fails for what it found, and for no slow machine."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

from hypothesis import HealthCheck, settings

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packages/*/tests", "packages/testing/src", "tests-integration")


def impatient(tree: ast.AST) -> Iterator[int]:
    """Lines that suppress some health checks, and so no longer what ``conftest.py`` in the root does."""
    for node in ast.walk(tree):
        if isinstance(node, ast.keyword) and node.arg == "suppress_health_check":
            words = {each.attr for each in ast.walk(node.value) if isinstance(each, ast.Attribute)}
            if isinstance(node.value, ast.List | ast.Tuple) and "too_slow" not in words:
                yield node.value.lineno


def test_health_checks_do_not_measure_the_machine() -> None:
    found = [
        f"{path.relative_to(ROOT)}:{line}"
        for folder in FOLDERS
        for path in sorted(ROOT.glob(f"{folder}/**/*.py"))
        for line in impatient(ast.parse(path.read_text(encoding="utf-8")))
    ]
    assert not found, f"name HealthCheck.too_slow, too: {found}"


def test_tests_without_settings_are_patient() -> None:
    assert HealthCheck.too_slow in settings().suppress_health_check


def test_the_rule_sees_what_it_forbids() -> None:
    for given, bad in (
        ("[HealthCheck.function_scoped_fixture]", True),
        ("[HealthCheck.function_scoped_fixture, HealthCheck.too_slow]", False),
        ("list(HealthCheck)", False),
    ):
        found = list(impatient(ast.parse(f"settings(suppress_health_check={given})")))
        assert bool(found) == bad
