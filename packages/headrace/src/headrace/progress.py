"""Progress bars for long work, fed by callbacks that know nothing of bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_core.output import PoolingRequestOutput, RequestOutput

Output = RequestOutput | PoolingRequestOutput[Any]


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


@contextmanager
def prompt_bar(
    total: int, use_tqdm: bool | Callable[..., Any]
) -> Iterator[Callable[[int, Output], None] | None]:
    """A callback for finished outputs that shows their number and the token rates.

    Args:
        total: prompts.
        use_tqdm: False: no bar; or a callable that makes one (tqdm's signature).
    """
    if not use_tqdm:
        yield None
        return
    if callable(use_tqdm):
        bar = use_tqdm(total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True)
    else:
        from tqdm import tqdm

        bar = tqdm(
            total=total, desc="Processed prompts", unit="prompt", dynamic_ncols=True, disable=None
        )
    counts: dict[str, int] = {"input": 0}

    def show(_: int, output: Output) -> None:
        if not output.finished:
            return
        counts["input"] += len(output.prompt_token_ids)
        if isinstance(output, RequestOutput):
            generated = sum(len(completion.token_ids) for completion in output.outputs)
            counts["output"] = counts.get("output", 0) + generated
        elapsed = getattr(bar, "format_dict", {}).get("elapsed") or 0.0
        if elapsed > 0:
            rates = ", ".join(f"{k} {v / elapsed:.1f} tok/s" for k, v in counts.items())
            bar.set_postfix_str(rates, refresh=False)
        bar.update(1)

    try:
        yield show
    finally:
        bar.close()
