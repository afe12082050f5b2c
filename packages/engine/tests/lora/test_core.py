"""A request whose adapter is still read waits in the core; nobody else does."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.core import EngineCore

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
from stepwise_store import StepwiseStore

FRENCH = LoRARequest("french", 1, "/french")


class Scheduler:
    has_unfinished = False

    def __init__(self):
        self.added = []

    def add(self, request):
        self.added.append(request.request_id)

    def abort(self, request_ids):
        return []

    def update(self, step, result, told=None):
        raise AssertionError("no step is made")

    def stats(self, *, drain=False):
        return SimpleNamespace(num_requests_waiting=0, block_size=0, waiting_loras={})


@pytest.fixture
def core():
    executor = SimpleNamespace(shutdown=lambda: None)
    return EngineCore(Scheduler(), executor, adapters=StepwiseStore(1))


def request(name, lora=None):
    return CoreRequest(name, [1], SamplingParams(), frozenset([1]), 5, 0.0, lora_request=lora)


def test_it_waits_until_its_adapter_is_read(core):
    core.add(request("a", FRENCH))
    core.add(request("base"))
    core.add(request("b", FRENCH))
    assert core.scheduler.added == ["base"]
    assert core.ready() == []
    assert core.stats().waiting_loras == {"french": 2}
    assert core.has_unfinished
    core.adapters.go_on()
    for one in core.ready():
        core.add(one, again=True)
    assert core.scheduler.added == ["base", "a", "b"]
    assert core.adapters.num_read == 1
    assert core.adapters.find(1).num_users == 0


def test_a_reading_that_fails_ends_those_that_wait_for_it(core):
    core.add(request("a", FRENCH))
    core.adapters.go_on(RequestError("french: rank 64"))
    [one] = core.ready()
    core.adapters._read = lambda adapter: pytest.fail("read again")
    with pytest.raises(RequestError, match="rank 64"):
        core.add(one, again=True)
    assert core.list_loras() == ()


def test_one_that_waits_can_be_aborted(core):
    core.add(request("a", FRENCH))
    [output] = core.abort(["a"])
    assert (output.request_id, output.finish_reason) == ("a", "abort")
    assert not core.has_unfinished
    core.adapters.go_on()
    assert core.ready() == []
    assert core.adapters.find(1).num_users == 0


def test_an_adapter_removed_while_it_is_read_serves_who_came_before(core):
    core.add(request("a", FRENCH))
    removed = core.remove_lora(1)
    assert not removed.done()
    core.adapters.go_on()
    assert removed.result(0)
    for one in core.ready():
        core.add(one, again=True)
    assert core.scheduler.added == ["a"]
    assert core.adapters.num_read == 1


def test_calls_say_what_was_known(core):
    first, again = core.add_lora(FRENCH), core.add_lora(FRENCH)
    core.adapters.go_on()
    assert (first.result(0), again.result(0)) == (True, True)
    assert core.add_lora(FRENCH).result(0) is False
    assert core.list_loras() == (FRENCH,)
    assert core.remove_lora(1).result(0)
    assert not core.remove_lora(1).result(0)


def test_an_engine_without_adapters_says_so():
    core = EngineCore(Scheduler(), SimpleNamespace(shutdown=lambda: None))
    for call in (lambda: core.add_lora(FRENCH), lambda: core.remove_lora(1)):
        with pytest.raises(UnsupportedFeature, match="enable_lora=True"):
            call()
    with pytest.raises(UnsupportedFeature, match="enable_lora=True"):
        core.add(request("a", FRENCH))
    assert core.list_loras() == ()
