"""A folder of sources stays small enough to be read by its names."""

from __future__ import annotations

import re
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
MOST_MODULES = 25
"""Modules of one folder, without ``__init__``."""
LISTS = ("formats", "headrace_reference")
"""Folders that hold one module for each format, or for each op; and those within models/families, one for
each model."""


def modules() -> dict[str, int]:
    """``package/folder`` -> its modules, of folders with any."""
    found: dict[str, int] = {}
    for path in (ROOT / "packages").glob("*/src/**/*.py"):
        if path.name != "__init__.py":
            package, _, *folders = path.parent.relative_to(ROOT / "packages").parts
            name = "/".join((package, *folders))
            found[name] = found.get(name, 0) + 1
    return found


def is_list(name: str) -> bool:
    """True for a folder whose modules are entries of a list."""
    return name.rpartition("/")[2] in LISTS or "/families/" in name


def test_no_folder_is_large() -> None:
    large = {
        name: count
        for name, count in modules().items()
        if count > MOST_MODULES and not is_list(name)
    }
    assert not large, f"more than {MOST_MODULES} modules: divide {large}"


def test_commits_are_checked_by_the_ruff_of_ci() -> None:
    ours = re.findall(r"ruff==[\d.]+", (ROOT / "noxfile.py").read_text(encoding="utf-8"))
    hooks = re.findall(
        r"ruff==[\d.]+", (ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8")
    )
    assert len(ours) == 1
    assert set(hooks) == set(ours)
