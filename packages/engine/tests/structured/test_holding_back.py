"""A request whose grammar still compiles waits in the core; nobody else does."""

from __future__ import annotations

import asyncio
import threading
from types import SimpleNamespace

import pytest

from headrace_core.errors import QueueFull
from headrace_core.grammar import Constraint, GrammarSpec
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams, StructuredOutputsParams
from headrace_engine.core import EngineCore
from headrace_engine.input_processing import threads as threads_module
from headrace_engine.input_processing.threads import InputThreads
from headrace_engine.structured.store import Compiled, GrammarStore
from headrace_testing.waiting import until


class Scheduler:
    def __init__(self):
        self.added = []
        self.has_unfinished = False

    def add(self, request):
        self.added.append(request.request_id)

    def abort(self, request_ids):
        return []

    def update(self, step, result, told=None):
        raise AssertionError("no step is made")

    def stats(self, *, drain=False):
        return SimpleNamespace(num_requests_waiting=0, block_size=0)


class SlowStore(GrammarStore):
    """Compiles when it is told to."""

    def __init__(self):
        super().__init__(lambda: None, 1 << 20)
        self.go = threading.Event()
        self.fail = False

    def _compile(self, constraint):
        assert self.go.wait(60)
        if self.fail:
            raise ValueError("not now")
        return Compiled(None, SimpleNamespace(is_worn=lambda grammar: False))


@pytest.fixture
def core():
    executor = SimpleNamespace(shutdown=lambda: None)
    made = EngineCore(Scheduler(), executor, grammars=SlowStore())
    yield made
    made.grammars.go.set()
    made.shutdown()


def request(name, regex=None):
    spec = None if regex is None else Constraint(GrammarSpec("guidance", "regex", regex), (1,))
    return CoreRequest(name, [1], SamplingParams(), frozenset([1]), 5, 0.0, constraint=spec)


def ready(core, regex):
    core.grammars.request(request("", regex).constraint).exception(10)


def wait_for(core):
    """Until what is kept back has compiled, or failed to; nothing is asked for anew."""
    for _, compiled in core._held:
        compiled.exception(10)


@pytest.mark.req("REL-05")
def test_it_waits_alone_and_can_be_aborted(core):
    for one in (request("a", "x"), request("free"), request("b", "y")):
        core.add(one)
    assert core.scheduler.added == ["free"]
    assert core.has_unfinished
    assert core.stats().num_requests_waiting == 2
    assert core.ready() == []
    [ended] = core.abort(["b", "unknown"])
    assert (ended.request_id, ended.finish_reason) == ("b", "abort")
    core.grammars.go.set()
    wait_for(core)
    ready(core, "x")  # "y" may have driven it out of the cache
    for one in core.ready():
        core.add(one, again=True)
    assert core.scheduler.added == ["free", "a"]
    assert not core.has_unfinished


def test_a_failed_compilation_goes_on_to_the_worker_and_is_tried_anew(core):
    core.grammars.fail = True
    core.add(request("a", "x"))
    core.grammars.go.set()
    wait_for(core)
    [one] = core.ready()
    core.add(one, again=True)
    assert core.scheduler.added == ["a"]
    assert not core.ready()
    core.grammars.fail = False
    assert core.grammars.request(one.constraint).result(60) is not None


async def test_too_many_waiting_constraints_are_refused(monkeypatch):
    monkeypatch.setattr(threads_module, "MAX_COMPILING", 1)
    released = threading.Event()
    input_processor = SimpleNamespace(admit=lambda p: released.wait(60), known=lambda p: None)
    threads = InputThreads(input_processor, 2)
    params = SamplingParams(structured_outputs=StructuredOutputsParams(regex="a"))
    first = asyncio.create_task(threads.admit(params))
    await until(lambda: threads.num_compiling)
    with pytest.raises(QueueFull):
        await threads.admit(params)
    released.set()
    await first
    assert threads.num_compiling == 0
    threads.close()
