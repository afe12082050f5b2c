"""Figures for the terminal and for files."""

from __future__ import annotations

import json
import sys
import tempfile
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from headrace.bench.metrics import NAMES
from headrace_core.errors import ConfigError

BLOCKS = " ▁▂▃▄▅▆▇█"
WIDTH = 58


class Bar(Protocol):
    """As much of a progress bar as is used here."""

    def update(self, n: float = 1) -> object: ...


@contextmanager
def progress(total: int, what: str, unit: str, *, enabled: bool) -> Iterator[Bar]:
    """A bar on standard error, if somebody looks there; drawn twice a second at most."""
    from tqdm import tqdm

    with tqdm(
        total=total, desc=what, unit=unit, mininterval=0.5, dynamic_ncols=True, leave=False,
        disable=None if enabled else True,
    ) as bar:  # fmt: skip
        yield bar


def table(title: str, rows: Sequence[tuple[str, str] | str]) -> str:
    """Names on the left, figures on the right; a lone text is a heading.

    >>> print(table("Run", [("Requests", "20")]))
    """
    lines = [f"{f' {title} ':=^{WIDTH}}"]
    for row in rows:
        if isinstance(row, str):
            lines.append(f"{f' {row} ':-^{WIDTH}}")
        else:
            name, value = row
            lines.append(f"{name}{value:>{max(1, WIDTH - len(name))}}")
    return "\n".join([*lines, "=" * WIDTH])


def grid(head: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """Columns under a heading: the first to the left, the others to the right."""
    widths = [max(len(line[i]) for line in (head, *rows)) for i in range(len(head))]

    def line(cells: Sequence[str]) -> str:
        first, *others = (cell.ljust(w) if i == 0 else cell.rjust(w)
                          for i, (cell, w) in enumerate(zip(cells, widths)))  # fmt: skip
        return "  ".join([first, *others]).rstrip()

    return "\n".join([line(head), "  ".join("-" * width for width in widths), *map(line, rows)])


def sparkline(values: Sequence[float], width: int = 24) -> str:
    """Distribution of values from the lowest to the highest, as a row of blocks."""
    if not values:
        return ""
    low, high = min(values), max(values)
    counts = [0] * width
    for value in values:
        share = (value - low) / (high - low) if high > low else 0.0
        counts[min(width - 1, int(share * width))] += 1
    most = max(counts)
    return "".join(BLOCKS[-(-count * (len(BLOCKS) - 1) // most)] for count in counts)


def latency_rows(
    figures: Mapping[str, Any], measures: Sequence[str], percentiles: Sequence[float]
) -> list[tuple[str, str] | str]:
    """The rows of :func:`table` for the measures of a report."""
    rows: list[tuple[str, str] | str] = []
    for name in measures:
        short = name.upper()
        rows.append(NAMES[name])
        rows += [
            (f"Mean {short}, ms", f"{figures[f'mean_{name}_ms']:.2f}"),
            (f"Median {short}, ms", f"{figures[f'median_{name}_ms']:.2f}"),
            (f"Standard deviation {short}, ms", f"{figures[f'std_{name}_ms']:.2f}"),
        ]
        rows += [
            (f"P{p:g} {short}, ms", f"{figures[f'p{p:g}_{name}_ms']:.2f}") for p in percentiles
        ]
    return rows


def write_json(path: str | Path, content: Any, *, append: bool = False) -> None:
    """Write indented JSON, or append one line of it.

    Raises:
        ConfigError: the file cannot be written.
    """
    try:
        if append:
            with Path(path).open("a", encoding="utf-8") as file:
                file.write(json.dumps(content) + "\n")
        else:
            Path(path).write_text(json.dumps(content, indent=1) + "\n", encoding="utf-8")
    except OSError as error:
        raise ConfigError(f"{str(path)!r} cannot be written: {error}", field="output") from error


def check_output(path: str | Path, field: str) -> None:
    """Refuse a file that could not be written, before anything is measured. Nothing is changed.

    Args:
        field: option that names it.

    Raises:
        ConfigError: it is a folder, its folder does not exist, or the system does not allow it.
    """
    name, path = str(path), Path(path)
    if path.is_dir():
        raise ConfigError(f"{field} = {name!r}: is a folder; must be a file", field=field)
    if not path.parent.is_dir():
        raise ConfigError(f"{field} = {name!r}: its folder does not exist", field=field)
    try:
        if path.is_file():
            path.open("ab").close()
        elif not path.exists():  # devices and pipes are left alone
            tempfile.TemporaryFile(dir=path.parent).close()
    except OSError as error:
        raise ConfigError(
            f"{field} = {name!r}: cannot be written: {error.strerror}", field=field
        ) from error


def make_folder(path: str | Path, field: str) -> Path:
    """The folder of results, made if it is not there, and writable.

    Raises:
        ConfigError: it is not.
    """
    folder = Path(path)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"{field} = {str(path)!r}: cannot be written into: {error.strerror}", field=field
        ) from error
    return folder


def say(text: str = "") -> None:
    """A line for whoever watches; results alone go to standard output."""
    print(text, file=sys.stderr, flush=True)


def pairs(words: Sequence[str], flag: str, between: str = "=") -> dict[str, str]:
    """``["a=1", "b=2"]`` as a mapping.

    Raises:
        ConfigError: a word has no ``between``.
    """
    for word in words:
        if between not in word:
            raise ConfigError(f"{flag} {word!r}: must be NAME{between}VALUE", field=flag[2:])
    return {name: value for name, _, value in (word.partition(between) for word in words)}
