"""Write the predictions into ``docs/scaling-model.md``: ``python tools/scaling_tables.py``.

They are those of :mod:`headrace.planning.scaling` for a machine that nobody here has; a test compares.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from headrace.planning.machine import Machine
from headrace.planning.model_shape import QWEN3_06B, QWEN3_8B, DecoderSizes
from headrace.planning.scaling import Overhead, Prediction, ScalingRow, table_of

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "scaling-model.md"
BEGIN, END = "<!-- predictions: begin -->", "<!-- predictions: end -->"
MACHINE = Machine(
    nodes=2, cores=32, core_read=14e9, node_read=200e9, far_core_read=8e9, link=60e9,
    core_products=400e9, core_few_products=280e9, start=2e-6, line=5e-8, far_line=2e-7,
)  # fmt: skip
"""Two sockets as servers of 2023 have them, by data sheets and by what two cores do (docs/performance.md)."""
PYTHON = Overhead(step=6e-4, request=1.5e-5)
THREADS = (1, 2, 4, 8, 16, 32, 48, 64)
BATCHES = (1, 8, 32)
MODELS = {"Qwen3-0.6B's shape, bfloat16": QWEN3_06B, "Qwen3-8B's shape, bfloat16": QWEN3_8B}


def page(text: str) -> str:
    """The page with its tables anew."""
    before, _, rest = text.partition(BEGIN)
    after = rest.partition(END)[2]
    tables = "\n\n".join(table(name, sizes) for name, sizes in MODELS.items())
    return f"{before}{BEGIN}\n{tables}\n{END}{after}"


def table(name: str, sizes: DecoderSizes) -> str:
    """One model's."""
    heads = ["threads", "layout", *(f"{batch} at once" for batch in BATCHES), "prompt of 2,048"]
    lines = [f"**PREDICTED, never measured:** {name}, 2 x 32 cores, ms (what takes the most)", ""]
    lines += [_row(heads), _row(["---"] * len(heads))]
    rows = table_of(sizes.shape, MACHINE, THREADS, PYTHON, batches=BATCHES)
    lines += [_row(list(_cells(row))) for row in rows]
    return "\n".join(lines)


def _cells(row: ScalingRow) -> Iterator[str]:
    yield str(row.threads)
    yield f"`{row.layout.value}`" if row.layout.value.startswith("-") else row.layout.value
    for each in (*row.decode.values(), row.prefill):
        yield _cell(each)


def _cell(prediction: Prediction) -> str:
    number = 1e3 * prediction.seconds
    figure = f"{number:,.0f}" if number >= 100 else f"{number:.3g}"
    return f"{figure} ({prediction.binds})"


def _row(cells: list[str]) -> str:
    return f"| {' | '.join(cells)} |"


if __name__ == "__main__":
    PAGE.write_text(page(PAGE.read_text(encoding="utf-8")), encoding="utf-8")
