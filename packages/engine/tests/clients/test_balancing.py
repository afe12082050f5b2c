"""Which engine gets a request."""

from __future__ import annotations

import dataclasses
from typing import Any

from headrace_core.lora import LoRARequest
from headrace_core.request import CoreRequest
from headrace_core.sampling.params import SamplingParams
from headrace_engine.clients.balancing import CHUNK, LoadBalancer, PrefixIndex, prefix_keys
from headrace_engine.clients.placements import Placements

BOTH = (0, 1)


def request(tokens: list[int], **more: Any) -> CoreRequest:
    return CoreRequest("r", tokens, SamplingParams(), frozenset(), 1, 0.0, **more)


def prompt(seed: int, chunks: int = 4) -> list[int]:
    return [seed * 1000 + place for place in range(chunks * CHUNK)]


def test_idle_engines_take_turns() -> None:
    balancer = LoadBalancer(3)
    chosen = []
    for seed in range(6):
        one = request([seed])
        chosen.append(balancer.choose(one, range(3)))
        balancer.add_tokens(chosen[-1], -1)  # it ends
    assert chosen == [0, 1, 2, 0, 1, 2]


def test_engines_come_and_go() -> None:
    balancer = LoadBalancer(2)
    assert [balancer.choose(request(prompt(seed)), BOTH) for seed in range(2)] == [0, 1]
    balancer.resize(3)
    assert balancer.choose(request(prompt(2)), range(3)) == 2
    assert balancer.loads == [128, 128, 128]
    for engine in range(3):
        balancer.add_tokens(engine, -128)
    assert balancer.choose(request(prompt(2)), range(3)) == 2  # its prefix
    balancer.resize(1)
    balancer.resize(3)  # another engine of that number, which has no prefix
    assert balancer.loads == [0, 0, 0]
    assert balancer._index is not None
    assert balancer._index.matched(prefix_keys(request(prompt(2))), 3) == [0, 0, 0]
    assert balancer.choose(request(prompt(0)), range(3)) == 0  # the prefix that stayed


def test_the_engine_with_fewer_tokens_is_chosen() -> None:
    balancer = LoadBalancer(2)
    assert balancer.choose(request([1] * 10), BOTH) == 0
    assert [balancer.choose(request([2] * 3), BOTH) for _ in range(3)] == [1, 1, 1]
    balancer.add_tokens(1, 2)  # generated
    assert balancer.loads == [10, 11]
    assert balancer.choose(request([3]), BOTH) == 0


def test_a_prefix_is_followed_as_far_as_it_is_worth() -> None:
    balancer = LoadBalancer(2)
    first = prompt(1)
    engine = balancer.choose(request(first), BOTH)
    balancer.add_tokens(engine, -len(first))
    for _ in range(3):  # others, so that it would not be its turn
        balancer.choose(request([7]), (1 - engine,))
    assert balancer.choose(request([*first, 5, 6]), BOTH) == engine
    assert balancer.choose(request(first), BOTH) == engine  # 130 tokens more than the other, or 128
    assert balancer.choose(request(first), BOTH) == 1 - engine  # twice the prefix: no more


def test_other_salts_and_adapters_share_no_prefix() -> None:
    tokens = prompt(1)
    lora = LoRARequest("a", 1, "/nowhere")
    keys = [
        tuple(prefix_keys(one))
        for one in (request(tokens), request(tokens, cache_salt="x"), request(tokens, lora_request=lora))
    ]  # fmt: skip
    assert len(set(keys)) == 3
    assert len(keys[0]) == 4
    assert prefix_keys(request(tokens[: CHUNK - 1])) == []


def test_the_index_forgets_engines_and_its_oldest() -> None:
    index = PrefixIndex(capacity=3)
    index.add([1, 2, 3], 0)
    index.add([1], 1)
    assert index.matched([1, 2, 9], 2) == [2 * CHUNK, CHUNK]
    index.forget(0)
    assert index.matched([1, 2, 3], 2) == [0, CHUNK]
    index.add([4, 5, 6], 0)
    assert index.matched([1], 2) == [0, 0]
    index.add([7], 0)
    assert index.matched([4, 5, 6], 1) == [2 * CHUNK]  # the end of a prefix goes first
    index.clear()
    assert index.matched([4], 1) == [0]


def test_without_a_cache_nothing_is_followed() -> None:
    balancer = LoadBalancer(2, follows_prefixes=False)
    tokens = prompt(1)
    chosen = [balancer.choose(request(tokens), BOTH) for _ in range(4)]
    assert chosen == [0, 1, 0, 1]


def test_tokens_of_many_requests_are_each_ones_engines() -> None:
    placements = Placements(2, follows_prefixes=False)
    for index, length in enumerate((5, 3, 2)):
        placements.place(dataclasses.replace(request([1] * length), request_id=f"r{index}"), BOTH)
    placements.note_tokens({"r0": 7, "r1": 7, "gone": 7})
    placements.note_tokens(["r0", "r2"])
    assert placements.balancer.loads == [5 + 2, 3 + 2 + 1 + 1]
    placements.forget("r0")
    assert placements.balancer.loads == [0, 7]
