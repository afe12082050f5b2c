"""The decision to capture a worker's steps, and how."""

from __future__ import annotations

import logging
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import CaptureRefused
from headrace_core.graph import GraphNeed, RecordsCalls, Step, StepGraph, StepGraphFactory

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Capture:
    """Steps to be captured, and what captures them."""

    factory: Callable[[], StepGraphFactory | None]
    """Asked once the model is built; None if its kernels cannot be recorded."""
    sizes: tuple[int, ...]
    """See :attr:`headrace_core.graph.GraphNeed.capture_sizes`."""
    enforce_eager: bool = False
    recorders: Callable[[], tuple[RecordsCalls, ...]] = tuple
    """Asked once the model is built; see :attr:`headrace_core.graph.GraphNeed.recorders`."""

    @property
    def largest(self) -> int:
        """Tokens of the largest captured step; 0 if none is wanted."""
        return 0 if self.enforce_eager or not self.sizes else self.sizes[-1]


def capture_steps(
    capture: Capture, step: Step, *, kind: str = "steps", **need: Any
) -> StepGraph | None:
    """A graph of the step, or None if it is to run eagerly; logs which, in one line.

    Args:
        kind: of steps, for the log.
        need: fields of :class:`~headrace_core.graph.GraphNeed` beside the sizes.
    """
    if not capture.largest:
        logger.info("%s run eagerly: enforce_eager", kind)
        return None
    factory = capture.factory()
    if factory is None:
        logger.info("%s run eagerly: the kernels in use cannot be recorded", kind)
        return None
    graph = factory()
    start = time.perf_counter()
    try:
        graph.capture(step, GraphNeed(capture.sizes, recorders=capture.recorders(), **need))
    except CaptureRefused as error:
        logger.info("%s run eagerly: %s", kind, error)
        return None
    logger.info(
        "captured %s of up to %s tokens: %d kernel calls, %.3f s, %.1f MiB",
        kind,
        ", ".join(map(str, graph.buckets)),
        graph.num_calls,
        time.perf_counter() - start,
        graph.num_bytes / 2**20,
    )
    return graph
