"""Requirements and their tests: ``python tools/requirements.py`` lists both.

Reads ``docs/requirements.toml`` and every ``@pytest.mark.req(...)`` of the repository's tests (by
their syntax: nothing is imported). Ends with status 1 if a mark names what nobody requires, or if a
requirement that is said to be held has no test. ``--write`` renews the table of
``docs/reliability.md``.
"""

from __future__ import annotations

import ast
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parent.parent
STATES = ("held", "partly", "later")
BEGIN, END = "<!-- requirements: begin -->", "<!-- requirements: end -->"


class Requirement(NamedTuple):
    """One promise."""

    id: str
    text: str
    state: str
    note: str = ""


class Mark(NamedTuple):
    """A test that says what it proves."""

    id: str
    file: str
    line: int
    test: str


def requirements(root: Path = ROOT) -> list[Requirement]:
    """All promises, in the file's order.

    Raises:
        ValueError: two of one id, or an unknown state.
    """
    content = tomllib.loads((root / "docs" / "requirements.toml").read_text(encoding="utf-8"))
    found = [Requirement(**entry) for entry in content["requirement"]]
    if len({entry.id for entry in found}) < len(found):
        raise ValueError("docs/requirements.toml: an id is there twice")
    for entry in found:
        if entry.state not in STATES:
            raise ValueError(f"{entry.id}: state = {entry.state!r}: must be one of {STATES}")
        if entry.state != "held" and not entry.note:
            raise ValueError(f"{entry.id}: state {entry.state!r} needs a note that says why")
    return found


def marks(root: Path = ROOT) -> list[Mark]:
    """Every mark in the test folders."""
    folders = [*sorted(root.glob("packages/*/tests")), root / "tests-integration"]
    folders += sorted(root.glob("packages/*/src/*/testing"))  # suites that tests inherit
    files = [file for folder in folders for file in sorted(folder.rglob("*.py"))]
    return [mark for file in files for mark in marks_of(file, root)]


def marks_of(file: Path, root: Path = ROOT) -> Iterator[Mark]:
    """The marks of one file: on functions, on classes, and of a whole module (``pytestmark``)."""
    tree = ast.parse(file.read_text(encoding="utf-8"))
    name = str(file.relative_to(root))
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            for decorator in node.decorator_list:
                yield from _marks_in(decorator, name, node.name)
        elif isinstance(node, ast.Assign):
            targets = [target.id for target in node.targets if isinstance(target, ast.Name)]
            if "pytestmark" in targets:
                yield from _marks_in(node.value, name, "(the whole module)")


def _marks_in(node: ast.AST, file: str, test: str) -> Iterator[Mark]:
    for call in ast.walk(node):
        if (
            isinstance(call, ast.Call)
            and isinstance(call.func, ast.Attribute)
            and call.func.attr == "req"
        ):
            for argument in call.args:
                if isinstance(argument, ast.Constant) and isinstance(argument.value, str):
                    yield Mark(argument.value, file, call.lineno, test)


def problems(required: list[Requirement], found: list[Mark]) -> list[str]:
    """What is dishonest: unknown ids, promises said to be held or partly held without a test."""
    known = {entry.id for entry in required}
    tested = {mark.id for mark in found}
    wrong = [
        f"{mark.file}:{mark.line}: {mark.test} proves {mark.id!r}, which is no requirement"
        for mark in found
        if mark.id not in known
    ]
    wrong += [
        f"{entry.id} is said to be {entry.state}, but no test proves it"
        for entry in required
        if entry.state == "held" and entry.id not in tested
    ]
    return wrong


def table(required: list[Requirement]) -> str:
    """The documentation's table."""
    lines = ["| | promise | state |", "|---|---|---|"]
    for entry in required:
        state = f"**{entry.state}**" if entry.state == "held" else entry.state
        lines.append(f"| {entry.id} | {entry.text} | {state}{_note(entry)} |")
    return "\n".join(lines)


def _note(entry: Requirement) -> str:
    return f": {entry.note}" if entry.note else ""


def page_with_table(page: str, required: list[Requirement]) -> str:
    """The page with its table renewed.

    Raises:
        ValueError: the page has no place for it.
    """
    head, begin, rest = page.partition(BEGIN)
    _, end, tail = rest.partition(END)
    if not begin or not end:
        raise ValueError(f"the page lacks {BEGIN} or {END}")
    return f"{head}{BEGIN}\n{table(required)}\n{END}{tail}"


def describe(required: list[Requirement], found: list[Mark]) -> str:
    """The list for people."""
    lines = []
    for entry in required:
        tests = [mark for mark in found if mark.id == entry.id]
        lines.append(f"{entry.id:<7} {entry.state:<7} {len(tests):>3} tests  {entry.text}")
        lines += [f"{'':24}{mark.file}: {mark.test}" for mark in tests]
    without = [entry.id for entry in required if not any(m.id == entry.id for m in found)]
    lines.append(f"\nwithout a test ({len(without)}): {', '.join(without) or 'none'}")
    return "\n".join(lines)


def main() -> int:
    required, found = requirements(), marks()
    if "--write" in sys.argv[1:]:
        page = ROOT / "docs" / "reliability.md"
        text = page.read_text(encoding="utf-8")
        page.write_text(page_with_table(text, required), encoding="utf-8")
        return 0
    print(describe(required, found))
    wrong = problems(required, found)
    for line in wrong:
        print(f"wrong: {line}", file=sys.stderr)
    return 1 if wrong else 0


if __name__ == "__main__":
    sys.exit(main())
