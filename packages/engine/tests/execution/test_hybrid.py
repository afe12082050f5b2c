"""A model of layers of every kind gives one answer, however its requests are computed."""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import pytest
import torch
from hybrid_model import VOCAB, AttendingLayer, Engine, HybridLM, make_worker

from headrace_core.errors import ConfigError
from headrace_core.kv import KVCacheConfig, RecurrentSpec
from headrace_engine.kv.grouping import plan_groups

COUNT = 14


def prompt(length: int, seed: int) -> list[int]:
    return random.Random(seed).choices(range(VOCAB), k=length)


PROMPTS = {name: prompt(length, seed) for seed, (name, length) in enumerate(
    {"one": 1, "short": 7, "block": 8, "long": 43, "longer": 52}.items()
)}  # fmt: skip


@pytest.fixture
def model(tiny: Any) -> HybridLM:
    return HybridLM(tiny.PagedBackend)


@pytest.fixture
def expected(model: HybridLM) -> Mapping[str, Sequence[int]]:
    """What the model says without any of this."""
    return {name: model.dense_greedy(tokens, COUNT) for name, tokens in PROMPTS.items()}


def test_the_pools_are_what_pages_say(model: HybridLM) -> None:
    config = Engine(model).config
    kinds = [(type(g.spec).__name__, g.layer_names, g.pool) for g in config.groups]
    assert kinds == [
        ("FullAttentionSpec", ("layers.0",), 0),
        ("SlidingWindowSpec", ("layers.2",), 0),
        ("FullAttentionSpec", ("layers.4",), 1),
        ("ChunkedLocalSpec", ("layers.5",), 0),
        ("RecurrentSpec", ("layers.1",), 2),
        ("RecurrentSpec", ("layers.3",), 3),
    ]


def test_states_lie_in_aligned_parts_of_a_page(model: HybridLM) -> None:
    Engine(model, num_states=6)
    layer = model.layers[3]
    assert isinstance(layer.kv_spec, RecurrentSpec)
    assert layer.states is not None
    assert [tuple(state.shape) for state in layer.states] == [(7, 2, 8), (7, 3), (7, 16)]
    assert layer.kv_spec.page_bytes == 192
    starts = [state.data_ptr() for state in layer.states]
    assert [start - starts[0] for start in starts] == [0, 64, 128]
    assert starts[0] % 64 == 0
    assert all(state.stride(0) * 4 == 192 and state[0].is_contiguous() for state in layer.states)


@pytest.mark.parametrize("caching", [True, False])
@pytest.mark.parametrize("overlapped", [False, True])
def test_alone_and_together(
    model: HybridLM, expected: Mapping[str, Sequence[int]], caching: bool, overlapped: bool
) -> None:
    """Prompts are longer than a step: their chunks mix with others' tokens."""
    engine = Engine(model, caching=caching, overlapped=overlapped)
    for name in ("short", "long"):
        assert engine.generate({name: PROMPTS[name]}, COUNT) == {name: expected[name]}
    engine = Engine(model, caching=caching, overlapped=overlapped)
    assert engine.generate(PROMPTS, COUNT) == expected
    assert engine.kv.num_free_blocks == engine.kv.num_blocks


@pytest.mark.parametrize("overlapped", [False, True])
def test_preempted(
    model: HybridLM, expected: Mapping[str, Sequence[int]], overlapped: bool
) -> None:
    engine = Engine(model, num_blocks=48, num_states=6, overlapped=overlapped)
    assert engine.generate(PROMPTS, COUNT) == expected
    assert engine.num_preemptions > 0


@pytest.mark.parametrize("overlapped", [False, True])
def test_states_that_are_too_few_make_requests_wait(
    model: HybridLM, expected: Mapping[str, Sequence[int]], overlapped: bool
) -> None:
    engine = Engine(model, num_states=2, overlapped=overlapped)
    assert engine.generate(PROMPTS, COUNT) == expected


@pytest.mark.parametrize("overlapped", [False, True])
def test_prefix_hits(model: HybridLM, overlapped: bool) -> None:
    """Of a prompt again, of a conversation that goes on, and of one that parts from it."""
    engine = Engine(model, overlapped=overlapped)
    first = PROMPTS["long"]
    answer = engine.generate({"a": first}, COUNT)["a"]
    turns = {"b": first, "c": [*first, *answer, 5, 6, 7], "d": [*first[:30], 1, 2, 3]}
    hits = {}
    for name, tokens in turns.items():
        before = engine.num_cached_tokens
        assert engine.generate({name: tokens}, COUNT)[name] == model.dense_greedy(tokens, COUNT)
        hits[name] = engine.num_cached_tokens - before
    # The last boundary of the prompt; that of all that was computed; a step's end by chance.
    assert hits == {"b": 40, "c": 56, "d": 16}
    tokens = [*first[:30], 4, 4]
    assert engine.generate({"e": tokens}, COUNT)["e"] == model.dense_greedy(tokens, COUNT)
    assert engine.num_cached_tokens - sum(hits.values()) == 28, "where two have parted before"


def test_hits_side_by_side(model: HybridLM) -> None:
    """Several begin from one state in the same step, and its owner goes on meanwhile."""
    engine = Engine(model)
    engine.generate({"a": PROMPTS["long"]}, 1)
    prompts = {f"r{i}": [*PROMPTS["long"][:40], i, 2 * i] for i in range(5)}
    answers = engine.generate(prompts, COUNT)
    assert answers == {name: model.dense_greedy(p, COUNT) for name, p in prompts.items()}
    assert engine.num_cached_tokens == 5 * 40


def test_a_worker_that_closes_takes_the_states_back(model: HybridLM) -> None:
    engine = Engine(model)
    assert all(layer.states is not None for layer in model.state_layers().values())
    engine.worker.close()
    assert all(layer.states is None for layer in model.state_layers().values())
    assert all(layer.cache is None for layer in model.attention_layers().values())


# -- layers that read another's cache ---------------------------------------------------------------


def test_a_sharing_layer_is_bound_to_its_targets_tensor_and_group(model: HybridLM) -> None:
    Engine(model)
    full, *_, sharing = model.layers
    assert isinstance(full, AttendingLayer)
    assert isinstance(sharing, AttendingLayer)
    assert sharing.cache is not None
    assert full.cache is not None
    assert sharing.cache.data_ptr() == full.cache.data_ptr()
    assert sharing.group == full.group


@pytest.mark.parametrize(
    ("target", "message"),
    [
        ("layers.6", "cannot be the same as the current layer"),
        ("layers.9", "must come before the current layer"),
        ("layers.1", "is not an attention layer of the model"),
        (
            "layers.2",
            r"must be the same type as the current layer \(decoder of 2 x 4\), not .*dow 6",
        ),
        ("layers.4", r"must be the same type .*not decoder of 2 x 8"),
    ],
)
def test_a_target_that_cannot_be_shared(model: HybridLM, target: str, message: str) -> None:
    sharing = model.layers[6]
    assert isinstance(sharing, AttendingLayer)
    object.__setattr__(sharing.spec, "kv_sharing_target", target)
    with pytest.raises(
        ConfigError, match=f"'layers.6' shares the KV cache of .*'{target}'.*{message}"
    ):
        Engine(model)


def test_a_worker_closes_after_a_target_that_cannot_be_shared(model: HybridLM) -> None:
    worker = make_worker(model)
    groups = plan_groups(worker.kv_specs())
    sharing = model.layers[6]
    assert isinstance(sharing, AttendingLayer)
    object.__setattr__(sharing.spec, "kv_sharing_target", "layers.2")
    with pytest.raises(ConfigError, match="must be the same type"):
        worker.allocate_cache(KVCacheConfig((9,) * 4, groups))
    worker.close()


def test_a_target_that_comes_later_or_shares_itself(model: HybridLM) -> None:
    full, sharing = model.layers[0], model.layers[6]
    assert isinstance(full, AttendingLayer)
    assert isinstance(sharing, AttendingLayer)
    model.layers = [sharing, *model.layers[:-1]]
    with pytest.raises(ConfigError, match="must come before the current layer"):
        Engine(model)
    another = AttendingLayer(
        7, full.backend, None, torch.Generator().manual_seed(1), target=sharing
    )
    model.layers = [full, sharing, another]
    with pytest.raises(ConfigError, match="has no cache of its own"):
        Engine(model)
