"""Passes that are not replayed from recordings, as ranks divide their tokens, though they would fit."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from headrace_attention.prefill_context import DividedPass
    from headrace_core.batch import ForwardBatch
    from headrace_core.graph import StepGraph, StepGraphFactory
    from headrace_engine.multiproc.config import ParallelConfig


def undivided_graphs(
    factory: StepGraphFactory | None, divided: DividedPass | None, parallel: ParallelConfig
) -> StepGraphFactory | None:
    """Makes graphs that no pass fits which ranks divide; the factory itself, where they divide none.

    Args:
        divided: divides passes by prompts; None: nothing does.
    """
    if factory is None or (divided is None and not parallel.enable_sp):
        return factory
    least: float = float("inf")
    if parallel.enable_sp:
        from headrace_models.sequence_parallel import LEAST_TOKENS

        least = LEAST_TOKENS

    def is_divided(batch: ForwardBatch) -> bool:
        return batch.num_tokens >= least or (divided is not None and divided.divides(batch))

    def make() -> StepGraph:
        graph: Any = factory()
        fits = graph.fits

        def fits_whole(batch: ForwardBatch, num_logits: int | None = None) -> bool:
            return not is_divided(batch) and fits(batch, num_logits)

        graph.fits = fits_whole
        return graph  # type: ignore[no-any-return] # as the factory's

    return make
