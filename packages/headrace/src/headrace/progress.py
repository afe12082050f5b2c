"""Progress bars for long work, fed by callbacks that know nothing of bars."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress


@contextmanager
def progress_bars(enabled: bool) -> Iterator[ProgressCallback]:
    """A callback that shows one tqdm bar per phase; nothing is shown where nobody looks.

    Args:
        enabled: False gives a callback that shows nothing.
    """
    if not enabled:
        yield ignore_progress
        return
    from tqdm import tqdm

    bars: dict[str, Any] = {}

    def show(progress: LoadProgress) -> None:
        bar = bars.get(progress.phase)
        if bar is None:
            scaled = progress.unit == "B"
            bar = bars[progress.phase] = tqdm(
                total=progress.total,
                desc=progress.phase,
                unit=progress.unit,
                unit_scale=scaled,
                unit_divisor=1024 if scaled else 1000,
                disable=None,  # off unless standard error is a terminal
                leave=False,
            )
        if progress.detail:
            bar.set_postfix_str(progress.detail, refresh=False)
        bar.update(progress.done - bar.n)

    try:
        yield show
    finally:
        for bar in bars.values():
            bar.close()
