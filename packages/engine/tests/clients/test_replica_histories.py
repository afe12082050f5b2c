"""Any order of requests, outputs, ends and replacements of engines: each request ends exactly once."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Callable
from typing import cast

from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from replica_fakes import FakeProcess, request

from headrace_core.errors import EngineDead, GenerateError
from headrace_engine.clients.process import ProcessClient
from headrace_engine.clients.replica import Replica
from headrace_engine.clients.replicas import ReplicatedClient
from headrace_engine.messages import CoreOutput, CoreOutputs

NUM_ENGINES = 3


class SteppedClient(ReplicatedClient):
    """Replacements start when the test says so."""

    def __init__(self, make: Callable[[int], ProcessClient]) -> None:
        self.waiting: list[Callable[[], None]] = []
        super().__init__(make, NUM_ENGINES)
        self._group.thread, self._own_thread = self._thread, self._group.thread

    def _thread(self, work: Callable[[Replica], None], replica: Replica) -> threading.Thread:
        if work != self._replacer.replace:
            return self._own_thread(work, replica)
        self.waiting.append(lambda: work(replica))
        return threading.Thread()


class Histories(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.processes: list[FakeProcess] = []
        self.start_errors: list[BaseException | None] = []
        self.client = SteppedClient(lambda i: cast(ProcessClient, self._make(i)))
        self.client.start(self)
        self.ends: Counter[str] = Counter()
        self.num_requests = 0

    def _make(self, index: int) -> FakeProcess:
        made = FakeProcess(index)
        made.start_error = self.start_errors.pop() if self.start_errors else None
        self.processes.append(made)
        return made

    # What the front end hears.

    def on_outputs(self, outputs: CoreOutputs) -> None:
        for output in outputs.outputs:
            assert not self.ends[output.request_id], "an output after the end"
            if output.finish_reason is not None:
                self.ends[output.request_id] += 1

    def on_death(self, error: BaseException) -> None:
        assert not self.client.waiting, "given up while a replacement is on its way"

    # What happens.

    def _running(self) -> list[tuple[FakeProcess, str]]:
        """Requests that engines compute."""
        return [
            (process, name) for process in self.processes if process.failure is None
            for name in process.added if not self.ends[name] and name not in process.aborted
        ]  # fmt: skip

    @rule(ranks=st.lists(st.one_of(st.none(), st.integers(0, NUM_ENGINES - 1)), min_size=1, max_size=4),
          stuck=st.sets(st.integers(0, NUM_ENGINES - 1)))  # fmt: skip
    def add(self, ranks: list[int | None], stuck: set[int]) -> None:
        """Some engines have just ended, and nobody knows yet."""
        for process in self.processes:
            process.add_error = EngineDead("no commands") if process.index in stuck else None
        names = [f"r{self.num_requests + i}" for i in range(len(ranks))]
        self.num_requests += len(ranks)
        try:
            self.client.add([request(n, rank) for n, rank in zip(names, ranks, strict=True)])
        except (GenerateError, EngineDead):
            assert not {name for _, name in self._running()} & set(names), "refused, and computed"
            self.ends.update(names)

    @precondition(lambda self: self._running())
    @rule(data=st.data(), ends=st.booleans())
    def output(self, data: st.DataObject, ends: bool) -> None:
        process, name = data.draw(st.sampled_from(self._running()))
        reason = "stop" if ends else None
        process.sink.on_outputs(CoreOutputs([CoreOutput(name, [1], finish_reason=reason)], 0.0))

    @precondition(lambda self: self._running())
    @rule(data=st.data())
    def abort(self, data: st.DataObject) -> None:
        _, name = data.draw(st.sampled_from(self._running()))
        self.client.abort([name])
        self.ends[name] += 1

    @rule(index=st.integers(0, NUM_ENGINES - 1))
    def end(self, index: int) -> None:
        for process in self.processes:
            if process.index == index and process.failure is None and process.has_started:
                process.end()

    @precondition(lambda self: self.client.waiting)
    @rule(num_failures=st.integers(0, 4))
    def replace(self, num_failures: int) -> None:
        self.start_errors = [None, *[EngineDead("killed while starting")] * num_failures]
        self.client.waiting.pop(0)()

    # What must hold.

    @invariant()
    def every_request_runs_once_or_has_ended(self) -> None:
        running = Counter(name for _, name in self._running())
        assert not running or max(running.values()) == 1
        for number in range(self.num_requests):
            name = f"r{number}"
            assert running[name] + self.ends[name] == 1, name

    @invariant()
    def loads_are_those_of_what_runs(self) -> None:
        loads, placed = (
            self.client._group.placements.balancer.loads,
            self.client._group.placements.requests,
        )
        for index in range(NUM_ENGINES):
            there = [at for at in placed.values() if at.engine == index]
            assert loads[index] == sum(at.num_prompt_tokens + at.num_tokens[0] for at in there)
        assert len(placed) == len(self._running())


Histories.TestCase.settings = settings(max_examples=60, stateful_step_count=30, deadline=None)
TestHistories = Histories.TestCase
