"""Requests that are under way in several engines: the engine of each, and each engine's load."""

from __future__ import annotations

import threading
from collections.abc import Iterable, Sequence
from typing import NamedTuple

from headrace_core.request import CoreRequest
from headrace_engine.clients.balancing import LoadBalancer
from headrace_engine.messages import CoreOutput


class Placed(NamedTuple):
    """A request that is under way."""

    engine: int
    num_prompt_tokens: int
    num_tokens: list[int]
    """One number: tokens of its output so far."""


class Placements:
    """Where requests run. Belongs to one thread at a time: to the one that holds the group's lock.

    Args:
        num_engines: numbered from 0.
        follows_prefixes: engines keep the blocks of prompts that have ended.
    """

    def __init__(self, num_engines: int, *, follows_prefixes: bool) -> None:
        self.balancer = LoadBalancer(num_engines, follows_prefixes=follows_prefixes)
        self.requests: dict[str, Placed] = {}
        """By id."""
        self._waiting: dict[int, threading.Event] = {}
        """Engines that somebody waits for, until they have no requests."""

    def place(self, request: CoreRequest, engines: Sequence[int]) -> int:
        """Choose one of these engines for a request, and note it."""
        engine = self.balancer.choose(request, engines)
        self.requests[request.request_id] = Placed(engine, len(request.prompt_token_ids), [0])
        return engine

    def forget(self, request_id: str) -> Placed | None:
        """A request is under way no more; returns where it was."""
        placed = self.requests.pop(request_id, None)
        if placed is not None:
            count = placed.num_prompt_tokens + placed.num_tokens[0]
            self.balancer.add_tokens(placed.engine, -count)
            if placed.engine in self._waiting:
                self._tell_if_empty(placed.engine)
        return placed

    def when_empty(self, engine: int) -> threading.Event:
        """An event that is set once an engine has no requests. It must be given none meanwhile."""
        self._waiting[engine] = event = threading.Event()
        self._tell_if_empty(engine)
        return event

    def wake_waiting(self) -> None:
        """Set the events of :meth:`when_empty`, whatever engines have."""
        for event in self._waiting.values():
            event.set()

    def _tell_if_empty(self, engine: int) -> None:
        if not any(at.engine == engine for at in self.requests.values()):
            self._waiting.pop(engine).set()

    def by_engine(
        self, request_ids: Sequence[str], *, forget: bool = False
    ) -> dict[int, list[str]]:
        """Those of the requests that are under way, by their engine."""
        groups: dict[int, list[str]] = {}
        for request_id in request_ids:
            placed = self.forget(request_id) if forget else self.requests.get(request_id)
            if placed is not None:
                groups.setdefault(placed.engine, []).append(request_id)
        return groups

    def note(self, output: CoreOutput) -> None:
        """Note how far a request is."""
        placed = self.requests.get(output.request_id)
        if placed is None:
            return
        if output.finish_reason is not None:
            self.forget(output.request_id)
            return
        count = len(output.new_token_ids)
        placed.num_tokens[0] += count
        self.balancer.add_tokens(placed.engine, count)

    def note_tokens(self, request_ids: Iterable[str]) -> None:
        """Each of these requests is one token further."""
        added = [0] * len(self.balancer.loads)
        for placed in map(self.requests.get, request_ids):  # thousands
            if placed is not None:
                placed.num_tokens[0] += 1
                added[placed.engine] += 1
        for engine, count in enumerate(added):
            self.balancer.add_tokens(engine, count)

    def lose(self, engine: int) -> list[str]:
        """An engine has ended, with its cache; returns the requests that it had."""
        lost = [key for key, at in self.requests.items() if at.engine == engine]
        for request_id in lost:
            self.forget(request_id)
        self.balancer.forget(engine)
        return lost
