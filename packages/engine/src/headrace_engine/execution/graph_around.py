"""A step graph around another one, whose recordings it has replayed in a way of its own."""

from __future__ import annotations

from headrace_core.graph import GraphNeed, Step, StepGraph


class GraphAround(StepGraph):
    """Everything but ``fits`` and ``replay`` is the inner graph's.

    Args:
        graph: it has the recordings.
    """

    def __init__(self, graph: StepGraph) -> None:
        self._graph = graph

    @property
    def buckets(self) -> tuple[int, ...]:
        return self._graph.buckets

    @property
    def num_bytes(self) -> int:
        return self._graph.num_bytes

    @property
    def num_calls(self) -> int:
        return self._graph.num_calls

    def capture(self, step: Step, need: GraphNeed) -> None:
        """See :meth:`headrace_core.graph.StepGraph.capture`."""
        self._graph.capture(step, need)

    def close(self) -> None:
        """See :meth:`headrace_core.graph.StepGraph.close`."""
        self._graph.close()
