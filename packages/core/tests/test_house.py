"""Core stays small: its size, the order of its modules, and what it may import."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import headrace_core

ROOT = Path(headrace_core.__file__).parent
MOST_LINES = 9_500
HEAVY = ("torch", "numpy", "transformers")


def modules() -> dict[str, Path]:
    """Dotted name -> file."""
    found = {}
    for path in sorted(ROOT.rglob("*.py")):
        parts = ("headrace_core", *path.relative_to(ROOT).with_suffix("").parts)
        found[".".join(parts).removesuffix(".__init__")] = path
    return found


def imports(path: Path) -> Iterator[tuple[int, str, str]]:
    """(line, module, name) of every import statement of a file, wherever it stands: in functions and
    behind ``TYPE_CHECKING`` too. The name is empty in ``import module``."""
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: imports are absolute"
            yield from ((node.lineno, str(node.module), alias.name) for alias in node.names)


def graph() -> dict[str, set[str]]:
    """Module -> modules of core that it imports."""
    known = modules()
    found = {}
    for name, path in known.items():
        targets = {f"{m}.{n}" if f"{m}.{n}" in known else m for _, m, n in imports(path)}
        found[name] = (targets & set(known)) - {name}
    return found


def behind_type_checking(path: Path) -> set[int]:
    """Numbers of the lines that only type checkers see."""
    found: set[int] = set()
    for node in ast.walk(ast.parse(path.read_text(encoding="utf-8"))):
        if isinstance(node, ast.If) and ast.unparse(node.test) == "TYPE_CHECKING":
            for child in node.body:
                found |= set(range(child.lineno, (child.end_lineno or child.lineno) + 1))
    return found


def test_core_is_small() -> None:
    lines = sum(len(path.read_text(encoding="utf-8").splitlines()) for path in modules().values())
    assert lines <= MOST_LINES, (
        f"core has {lines} lines: must be at most {MOST_LINES}; what two packages need not agree on "
        "belongs to the one that uses it"
    )


def test_modules_of_core_import_each_other_in_one_direction() -> None:
    circle: list[str] = []
    try:
        TopologicalSorter(graph()).prepare()
    except CycleError as error:
        circle = error.args[1]
    assert not circle, f"modules of core import each other: {' <- '.join(circle)}"


def test_core_imports_nothing_heavy() -> None:
    """Tensors in annotations come from behind ``TYPE_CHECKING``."""
    found = set()
    for name, path in modules().items():
        hidden = behind_type_checking(path)
        if any(m.partition(".")[0] in HEAVY and n not in hidden for n, m, _ in imports(path)):
            found.add(name)
    assert not found
