"""The README's picture of the comparison: ``python benchmarks/chart.py``.

Reads the tables of docs/performance.md between their markers, so that picture and tables say the same, and
writes docs/images/comparison.svg. Each bar is an engine's speed in a workload, headrace's being 1.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple
from xml.sax.saxutils import escape

from render import BEGIN, END

ROOT = Path(__file__).parents[1]
PAGE, PICTURE = ROOT / "docs" / "performance.md", ROOT / "docs" / "images" / "comparison.svg"
MODEL = "qwen06, bf16"
TITLE = "Qwen3-0.6B's shape in bfloat16 on two cores of a CPU: speed, headrace = 1"
ROWS: Mapping[tuple[str, str], str] = {
    ("decode, 128 in, 128 out", "ms/token"): "one request: tokens",
    ("prefill of 2,048", "s"): "a prompt of 2,048 tokens",
    ("64 mixed requests, offline", "output tok/s"): "64 requests, offline",
    ("32 requests sharing 1,024 tokens", "s"): "32 requests, one prefix",
    ("serving at 8", "output tok/s"): "serving 8 clients",
    ("serving at 32", "output tok/s"): "serving 32 clients",
}
"""Workload and unit of a row of the tables -> what the picture calls it."""
NAMES = {"llama-bench": "llama.cpp", "vllm": "vLLM", "openvino": "OpenVINO"}
COLOURS = {
    "headrace": "#0b6e99",
    "vllm": "#e0a030",
    "openvino": "#8c6bb1",
    "llama-bench": "#7f8c8d",
}
WIDTH, LEFT, BAR, GAP, TOP, UNIT = 760, 200, 13, 16, 64, 480


class Row(NamedTuple):
    """A workload's speeds."""

    label: str
    speeds: Mapping[str, float]
    """Engine -> speed as a multiple of headrace's; engines without a figure are left out."""


def rows(page: str) -> Iterator[Row]:
    """The rows of the picture, from the page's table of :data:`MODEL`.

    Raises:
        ValueError: the page has no such table, or a row is not in it.
    """
    tables = page[page.index(BEGIN) : page.index(END)]
    table = tables.split(f"### {MODEL}\n")[1].split("\n### ")[0]
    lines = [
        [cell.strip() for cell in line.strip("| ").split("|")]
        for line in table.splitlines()
        if line.startswith("|")
    ]
    engines = lines[0][2 : lines[0].index("headrace is")]
    figures = {(line[0], line[1]): line[2 : 2 + len(engines)] for line in lines[2:]}
    for (workload, unit), label in ROWS.items():
        if (workload, unit) not in figures:
            raise ValueError(f"{PAGE} has no row {workload!r} in {unit!r} of {MODEL!r}")
        found = {
            engine: float(number[0])
            for engine, cell in zip(engines, figures[workload, unit])
            if (number := re.match(r"[\d.]+", cell))
        }
        ours, faster = found["headrace"], unit.endswith("tok/s")
        yield Row(label, {name: v / ours if faster else ours / v for name, v in found.items()})


def picture(table: Sequence[Row]) -> str:
    """The SVG, in colours that can be read on white and on black."""
    parts: list[str] = []
    y = TOP
    for row in table:
        middle = y + BAR * len(row.speeds) / 2
        parts.append(_text(LEFT - 12, middle + 4, row.label, anchor="end"))
        for engine, speed in row.speeds.items():
            length = speed * UNIT
            parts.append(
                f'<rect x="{LEFT}" y="{y}" width="{length:.0f}" height="{BAR - 2}" fill="{COLOURS[engine]}"/>'
            )
            parts.append(_text(LEFT + length + 5, y + 10, f"{speed:.2f}", size=10))
            y += BAR
        y += GAP
    x = LEFT
    for engine in max((row.speeds for row in table), key=len):
        name = NAMES.get(engine, engine)
        parts.append(f'<rect x="{x}" y="36" width="11" height="11" fill="{COLOURS[engine]}"/>')
        parts.append(_text(x + 16, 46, name))
        x += 40 + 8 * len(name)
    head = _text(LEFT, 22, TITLE, weight="bold")
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {y}" width="{WIDTH}" height="{y}" '
        f'font-family="sans-serif" role="img" aria-label="{escape(TITLE)}">\n'
        f"<title>{escape(TITLE)}</title>\n" + "\n".join([head, *parts]) + "\n</svg>\n"
    )


def _text(
    x: float, y: float, text: str, *, anchor: str = "start", size: int = 12, weight: str = "normal"
) -> str:
    return (
        f'<text x="{x:.0f}" y="{y:.0f}" font-size="{size}" font-weight="{weight}" text-anchor="{anchor}" '
        f'fill="#777">{escape(text)}</text>'
    )


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--print", action="store_true", help="print the picture, write no file")
    args = parser.parse_args()
    drawn = picture(list(rows(PAGE.read_text(encoding="utf-8"))))
    if args.print:
        print(drawn, end="")
        return
    PICTURE.parent.mkdir(exist_ok=True)
    PICTURE.write_text(drawn, encoding="utf-8")
    print(f"wrote {PICTURE}")


if __name__ == "__main__":
    main()
