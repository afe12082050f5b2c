"""Progress bars for long work, fed by callbacks that know nothing of bars."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from headrace_core.errors import RequestError
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
    total: int, use_tqdm: bool | Callable[..., Any], *, done: int = 0
) -> Iterator[Callable[[int, Output | None], None] | None]:
    """A callback for finished outputs (None: of a prompt that failed) that shows their number and the
    token rates.

    Args:
        total: prompts.
        use_tqdm: False: no bar; or a callable that makes one (tqdm's signature).
        done: prompts that an earlier run has answered.
    """
    if not wants_bar(use_tqdm):
        yield None
        return
    bar = _bar(total, use_tqdm, "Processed prompts", done)
    counts: dict[str, int] = {"input": 0}

    def show(_: int, output: Output | None) -> None:
        if output is None:
            bar.update(1)
            return
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


@contextmanager
def counting_bar(
    total: int, use_tqdm: bool | Callable[..., Any], title: str
) -> Iterator[Callable[[], None] | None]:
    """A callback that counts one more prompt each time.

    Args:
        total, use_tqdm: as :func:`prompt_bar`.
        title: stands before the bar.
    """
    if not wants_bar(use_tqdm):
        yield None
        return
    bar = _bar(total, use_tqdm, title)
    try:
        yield lambda: bar.update(1)
    finally:
        bar.close()


def wants_bar(use_tqdm: object) -> bool:
    """True if a bar is wanted.

    Raises:
        RequestError: the argument is neither a flag nor a callable.
    """
    if use_tqdm is None or isinstance(use_tqdm, bool):
        return bool(use_tqdm)
    if not callable(use_tqdm):
        raise RequestError(
            f"use_tqdm = {use_tqdm!r:.100}: must be True, False, or a callable that makes a bar",
            param="use_tqdm",
        )
    return True


def _bar(total: int, use_tqdm: bool | Callable[..., Any], title: str, done: int = 0) -> Any:
    options: dict[str, Any] = {
        "total": total, "desc": title, "unit": "prompt", "dynamic_ncols": True,
    }  # fmt: skip
    if done:
        options["initial"] = done
    if callable(use_tqdm):
        return use_tqdm(**options)
    from tqdm import tqdm

    return tqdm(**options, disable=None)


class AudioBar:
    """Shows how much of the recordings is transcribed, in seconds of sound; lengths come out one by one.

    Args:
        bar: of tqdm's kind; None: nothing is shown.
    """

    def __init__(self, bar: Any) -> None:
        self._bar = bar
        self._total = self._heard = 0.0

    def add(self, seconds: float) -> None:
        """Another recording is of this length."""
        self._total += seconds
        if self._bar is not None:
            self._bar.total = round(self._total)
            self._bar.refresh()

    def advance(self, seconds: float) -> None:
        """Count seconds that were transcribed."""
        shown, self._heard = round(self._heard), self._heard + seconds
        if self._bar is not None:
            self._bar.update(round(self._heard) - shown)


@contextmanager
def audio_bar(use_tqdm: bool | Callable[..., Any]) -> Iterator[AudioBar]:
    """A bar for recordings; its rate is how many seconds of sound are transcribed in one.

    Args:
        use_tqdm: False: none; or a callable that makes one (tqdm's signature).
    """
    if not wants_bar(use_tqdm):
        yield AudioBar(None)
        return
    options: dict[str, Any] = {"total": 0, "desc": "Heard", "unit": "s", "dynamic_ncols": True}
    if callable(use_tqdm):
        bar = use_tqdm(**options)
    else:
        from tqdm import tqdm

        bar = tqdm(**options, disable=None)
    try:
        yield AudioBar(bar)
    finally:
        bar.close()
