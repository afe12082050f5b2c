"""Adapters that are known, and those that the host's memory holds."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import SimpleNamespace

import pytest

from headrace_core.errors import RequestError, WeightsError
from headrace_core.lora import LoRARequest
from headrace_engine.lora.store import AdapterStore

sys.path.insert(0, str(Path(__file__).parents[1] / "scheduler"))
from stepwise_store import StepwiseStore

FIRST, SECOND, THIRD = (LoRARequest(f"a{n}", n, f"/{n}") for n in (1, 2, 3))


class Reader:
    """A model's slots, as far as adapters are read: waits to be let go on."""

    def __init__(self):
        self.go = threading.Event()
        self.paths = []

    def read(self, path):
        self.paths.append(path)
        assert self.go.wait(60)
        if path == "/bad":
            raise WeightsError("/bad: no adapter_config.json")
        return SimpleNamespace(digest=path, changes_media=False)


@pytest.fixture
def reader():
    return Reader()


@pytest.fixture
def store(reader):
    made = AdapterStore(2)
    made.bind(reader)
    yield made
    reader.go.set()
    made.close()


def test_two_requests_at_once_read_once(store, reader):
    first, again = store.add(FIRST), store.add(LoRARequest("another name", 1, "/1"))
    assert first is again
    assert store.known() == []
    reader.go.set()
    assert first.first_read.result(10).digest == "/1"
    assert (reader.paths, store.known()) == (["/1"], [FIRST])


def test_another_path_under_an_id_is_refused(store):
    store.add(FIRST)
    with pytest.raises(RequestError, match=r"lora_int_id = 1: must be another one for '/2'.*'/1'"):
        store.add(LoRARequest("b", 1, "/2"))


def test_what_the_reader_says_reaches_the_caller_and_nothing_is_known(store, reader):
    reader.go.set()
    bad = LoRARequest("bad", 4, "/bad")
    for _ in range(2):
        with pytest.raises(RequestError, match=r"adapter 'bad': /bad: no adapter_config.json"):
            store.add(bad).first_read.result(10)
    assert reader.paths == ["/bad", "/bad"]
    assert store.find(4) is None


def test_the_least_recently_used_goes_out_of_memory_and_is_read_again():
    store = StepwiseStore(2, at_once=True)
    first, second = store.add(FIRST), store.add(SECOND)
    store.enter(first)
    third = store.add(THIRD)
    assert [one.content is not None for one in (first, second, third)] == [True, False, True]
    assert store.known() == [FIRST, SECOND, THIRD]
    assert store.ready(second)
    assert store.num_read == 4


def test_what_is_in_a_slot_stays():
    store = StepwiseStore(1, at_once=True)
    first = store.add(FIRST)
    store.hold(first)
    second = store.add(SECOND)
    assert (first.content is None, second.content is None) == (False, True)
    store.let_go(first)
    store.hold(second)
    assert store.ready(second)
    assert (first.content is None, second.content is None) == (True, False)


def test_a_removed_adapter_is_kept_for_those_under_way():
    store = StepwiseStore(1, at_once=True)
    first = store.add(FIRST)
    store.enter(first)
    store.add(SECOND)
    store._at_once = False
    removed = store.remove(1)
    assert not removed.done(), "its files may not go before it is in memory"
    store.go_on()
    assert removed.result(0)
    assert store.known() == [SECOND]
    assert store.content(1).digest == "/1"
    store.leave(first)
    assert store.find(1) is None
    assert not store.remove(1).result(0)


def test_slots_get_the_removed_adapter_while_it_is_read_again():
    """A request that came late has it read anew; those under way do not wait for that."""
    store = StepwiseStore(1, at_once=True)
    first = store.add(FIRST)
    store.enter(first)
    store.remove(1)
    store._at_once = False
    again = store.add(FIRST)
    assert store.ready(first)
    assert store.content(1) is first.content
    store.go_on()
    assert again.first_read.result(0) is store.find(1) is first


def test_other_content_under_an_id_in_use_is_refused():
    store = StepwiseStore(2, at_once=True)
    store.enter(store.add(FIRST))
    store.remove(1)
    again = store.add(LoRARequest("b", 1, "/other"))
    with pytest.raises(RequestError, match=r"lora_int_id = 1.*another id"):
        again.first_read.result(0)
    assert store.add(FIRST).first_read.result(0) is store.find(1)
    assert store.find(1).num_users == 1


def test_another_model_reads_anew(store, reader):
    reader.go.set()
    first = store.add(FIRST).first_read.result(10)
    other = Reader()
    other.go.set()
    store.bind(other)
    assert not store.ready(first)
    first.reading and first.reading.exception(10)
    assert store.ready(first)
    assert other.paths == ["/1"]


@pytest.mark.parametrize("under_way", [False, True])
def test_what_was_read_goes_with_the_adapter_and_its_last_request(store, reader, under_way):
    """At once: nothing waits for Python to collect cycles, as slots of other ranks hear of it."""
    reader.go.set()
    adapter = store.add(FIRST).first_read.result(10)
    if under_way:
        store.enter(adapter)
    assert store.remove(1).result(0)
    if under_way:
        assert adapter.content is not None
        store.leave(adapter)
    assert adapter.content is None
