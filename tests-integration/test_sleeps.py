"""Tests hold the clock or the step: none sleeps, and none asserts how long something took.

To wait for a condition there is ``headrace_testing.waiting``, whose limit only ends a hang.
"""

from __future__ import annotations

import ast
from collections import Counter
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
FOLDERS = ("packages/*/tests", "tests-integration", "tests-clients")
SLEEPS: dict[str, tuple[int, str]] = {
    "tests-integration/chaos.py": (3, "a tool that kills: seconds apart, at random moments"),
    "packages/headrace/tests/bench/scripted.py": (
        1,
        "a server that answers after so many seconds, which a benchmark measures",
    ),
    "tests-integration/endurance.py": (1, "a tool that measures: it looks ten times a second"),
    "tests-integration/soak.py": (2, "a tool that measures: streams begin one after the other"),
    "tests-integration/soak_adapters.py": (1, "a tool that measures: ten changes a second"),
    "tests-integration/soak_several.py": (1, "a tool that measures: it looks each second"),
}
"""Files that sleep -> how often, and why."""
TIMES: dict[str, tuple[int, str]] = {
    "tests-integration/test_disturbed.py": (1, "how far a server's wall clock is from ours"),
}
"""Files that assert a time -> how often, and why."""
CLOCKS = frozenset({"monotonic", "perf_counter", "process_time", "time", "monotonic_ns",
                    "perf_counter_ns", "time_ns"})  # fmt: skip


def sleeps(tree: ast.AST) -> Iterator[int]:
    """Lines that sleep, but for ``sleep(0)``, which only lets others run."""
    for node in ast.walk(tree):
        if isinstance(node, ast.Call) and _name(node.func) == "sleep" and node.args:
            seconds = node.args[0]
            if not (isinstance(seconds, ast.Constant) and seconds.value == 0):
                yield node.lineno


def asserted_times(tree: ast.AST) -> Iterator[int]:
    """Lines that assert something of a clock, or of what the same function took from one."""
    for function in ast.walk(tree):
        if not isinstance(function, ast.FunctionDef | ast.AsyncFunctionDef):
            continue
        taken = {
            name.id
            for node in ast.walk(function)
            if isinstance(node, ast.Assign) and _reads_a_clock(node.value)
            for target in node.targets
            for name in ast.walk(target)
            if isinstance(name, ast.Name)
        }
        taken |= {
            node.func.value.id
            for node in ast.walk(function)
            if isinstance(node, ast.Call)
            and isinstance(node.func, ast.Attribute)
            and node.func.attr == "append"
            and isinstance(node.func.value, ast.Name)
            and any(map(_reads_a_clock, node.args))
        }
        for node in ast.walk(function):
            if isinstance(node, ast.Assert) and (
                _reads_a_clock(node.test)
                or any(isinstance(n, ast.Name) and n.id in taken for n in ast.walk(node.test))
            ):
                yield node.lineno


def _reads_a_clock(expression: ast.AST) -> bool:
    """``time.monotonic()`` or ``loop.time()``, say, in an expression that computes with it."""
    return any(
        isinstance(node, ast.Call)
        and isinstance(node.func, ast.Attribute)
        and node.func.attr in CLOCKS
        and not node.args
        for node in ast.walk(expression)
    )


def _name(function: ast.expr) -> str:
    return function.attr if isinstance(function, ast.Attribute) else getattr(function, "id", "")


def found(search, *words: str) -> dict[str, int]:
    """File -> how many lines a search finds in it; only files that have one of the words are parsed."""
    counts: Counter[str] = Counter()
    for folder in FOLDERS:
        for path in sorted(ROOT.glob(f"{folder}/**/*.py")):
            text = path.read_text(encoding="utf-8")
            if any(f"{word}(" in text for word in words):
                counts[path.relative_to(ROOT).as_posix()] += len(set(search(ast.parse(text))))
    return {name: count for name, count in counts.items() if count}


def test_the_searches_find_what_they_are_for() -> None:
    source = """
async def test():
    await asyncio.sleep(0.1)
    await asyncio.sleep(0)
    while not done():
        time.sleep(seconds)
    begin = time.monotonic()
    took.append(time.perf_counter() - begin)
    assert time.monotonic() - begin < 30
    assert min(took) < 0.1
    assert done()
    """
    tree = ast.parse(source)
    assert list(sleeps(tree)) == [3, 6]
    assert list(asserted_times(tree)) == [9, 10]


def test_no_test_sleeps() -> None:
    assert found(sleeps, "sleep") == {name: count for name, (count, _) in SLEEPS.items()}, (
        "wait for an event, hold the clock, or use headrace_testing.waiting"
    )


def test_no_test_asserts_a_time() -> None:
    assert found(asserted_times, *CLOCKS) == {name: count for name, (count, _) in TIMES.items()}, (
        "hold the clock or assert an order of events; a limit that ends a hang is a timeout"
    )
