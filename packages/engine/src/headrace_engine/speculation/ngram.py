"""Guesses by the latest earlier occurrence of the last few tokens (prompt lookup decoding).

Source: Saxena 2023, https://github.com/apoorvumang/prompt-lookup-decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace_core.speculation import DraftProposer, DraftTask
from headrace_engine.speculation.matching import earlier_ends


class NgramProposer(DraftProposer):
    """Proposes what followed the longest matching n-gram, where it came last.

    Args:
        settings: ``prompt_lookup_max`` and ``prompt_lookup_min``, checked.
    """

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._longest = int(settings["prompt_lookup_max"])
        self._shortest = int(settings.get("prompt_lookup_min") or 1)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        """See :class:`headrace_core.speculation.DraftProposer`."""
        return [self._after_match(task) for task in tasks]

    def _after_match(self, task: DraftTask) -> Sequence[int]:
        found = earlier_ends(task.token_ids, self._longest, self._shortest)
        if not found.length:
            return []
        place = int(found.places[-1])
        following: list[int] = task.token_ids[place : place + task.most].tolist()
        return following
