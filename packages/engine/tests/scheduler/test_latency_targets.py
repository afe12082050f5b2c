"""Targets for tails of latency, in simulated time: what they promise, and that they change nothing else."""

from __future__ import annotations

import random
from collections.abc import Callable
from hashlib import sha256
from typing import Any

import pytest
from simulated_time import Arrival, StepCost, Tails, median, quantile, simulate

Make = Callable[..., Any]

COST = StepCost()
PLAIN = COST.step + 8 * COST.decoding
"""Seconds of a step in which eight requests decode."""


def mixed_load(number: int = 40, every: float = 0.8) -> list[Arrival]:
    """Prompts of 20 to 600 tokens, most of them short, with outputs of 30 to 60."""
    draw = random.Random(3)
    return [
        Arrival(
            at=every * index * (0.5 + draw.random()),
            name=f"r{index}",
            prompt=int(20 + 580 * draw.random() ** 3),
            output=int(30 + 30 * draw.random()),
        )
        for index in range(number)
    ]


def served(make_world: Make, arrivals: list[Arrival], **settings: Any) -> Tails:
    settings = {"budget": 512, "max_num_seqs": 16, "max_model_len": 2100, **settings}
    return simulate(make_world(6000, **settings), arrivals, COST)


@pytest.mark.parametrize("overlapped", [False, True])
def test_gaps_between_tokens_keep_to_the_target(make_world: Make, overlapped: bool) -> None:
    """The 99th percentile is at most three times the median; without a target it is not."""
    load = mixed_load()
    free = served(make_world, load, overlapped=overlapped)
    held = served(make_world, load, overlapped=overlapped, target_itl=2 * PLAIN)
    assert quantile(free.itls, 0.99) > 3 * median(free.itls)
    assert quantile(held.itls, 0.99) <= 3 * median(held.itls)
    assert quantile(held.itls, 0.99) <= 1.2 * 2 * PLAIN
    assert held.outputs == free.outputs
    assert held.throughput > 0.9 * free.throughput


@pytest.mark.parametrize("overlapped", [False, True])
def test_short_prompts_overtake_long_ones(make_world: Make, overlapped: bool) -> None:
    load = [
        Arrival(0.0, "stream", 30, 400),
        *(Arrival(0.5 + 0.01 * i, f"long{i}", 1500, 20) for i in range(4)),
        *(Arrival(1.0 + 0.9 * i, f"short{i}", 40, 20) for i in range(6)),
    ]
    free = served(make_world, load, overlapped=overlapped)
    held = served(make_world, load, overlapped=overlapped, target_itl=2 * PLAIN, target_ttft=20.0)
    shorts = [f"short{i}" for i in range(6)]
    assert max(map(held.ttft, shorts)) < min(map(free.ttft, shorts))
    assert max(map(held.ttft, shorts)) < 5 * 2 * PLAIN
    assert min(held.ttft(f"long{i}") for i in range(4)) > max(map(held.ttft, shorts))
    assert quantile(held.itls, 0.99) <= 3 * median(held.itls)
    assert held.outputs == free.outputs


@pytest.mark.parametrize("target_itl", [None, 2 * PLAIN])
@pytest.mark.parametrize("overlapped", [False, True])
def test_who_has_waited_for_the_target_waits_only_for_those_that_had_before(
    make_world: Make, overlapped: bool, target_itl: float | None
) -> None:
    """From then on no other prompt is computed, but for what a step has room for behind it."""
    bound = 1.5
    draw = random.Random(8)
    load = [
        Arrival(3.5 * draw.random(), f"r{i}", int(10 + 500 * draw.random() ** 2), 4)
        for i in range(60)
    ]
    tails = served(
        make_world,
        load,
        overlapped=overlapped,
        target_itl=target_itl,
        target_ttft=bound,
        max_num_seqs=64,
    )
    num_overdue = 0
    for one in load:
        for parts in tails.parts:
            completes = any(part.name == one.name and part.completes for part in parts)
            if parts and parts[0].at > one.at + bound:
                num_overdue += 1
                later = [part.name for part in parts if tails.arrivals[part.name].at > one.at]
                assert completes or not later, (one, later)
            if completes:
                break
    assert num_overdue > 100, "the load is one in which some wait for long"


def test_long_prompts_come_to_their_turn_under_a_flood_of_short_ones(make_world: Make) -> None:
    flood = [Arrival(0.02 * i, f"s{i}", 40, 2) for i in range(150)]
    load = [*flood, Arrival(0.5, "long", 600, 2)]
    patient = served(make_world, load, target_ttft=100.0)
    bounded = served(make_world, load, target_ttft=2.0)
    assert patient.ttft("long") > 5.0, "after all others"
    assert bounded.ttft("long") < 2.0 + 600 * COST.prompt_token * 2 + 1.0


# -- without targets ---------------------------------------------------------------------------

SETTINGS: tuple[dict[str, Any], ...] = (
    {},
    {"overlapped": True},
    {"policy": "priority", "overlapped": True},
    {"policy": "fair", "max_num_shared_tokens": 24},
    {
        "max_num_partial_prefills": 3,
        "max_long_partial_prefills": 2,
        "long_prefill_token_threshold": 8,
    },
    {"num_blocks": 45, "overlapped": True},
    {"num_blocks": 45, "caching": False, "policy": "priority"},
    {"enable_chunked_prefill": False, "budget": 100},
    {"overlapped": True, "steps_beside": 2},
)
BEFORE = "10f28694b68822d27a30b1c003dee773b0e9f4878b196ba77ba9786192313204"
"""Digest of the steps below, as they were before there were targets."""


def random_steps(make_world: Make, settings: dict[str, Any]) -> list[Any]:
    """Steps of random traffic: who computes how many tokens, in which blocks."""
    draw = random.Random(5)
    world = make_world(
        **{"num_blocks": 300, "budget": 32, "max_model_len": 80, "max_num_seqs": 8, **settings}
    )
    steps = []
    for turn in range(600):
        if draw.random() < 0.15 and turn < 500:
            shared = int(draw.random() * 3)
            prompt = [shared * 100 + i for i in range(int(draw.random() * 20))]
            prompt += [1000 + turn * 50 + i for i in range(1 + int(draw.random() * 40))]
            world.add(
                f"r{turn}", prompt[:70], 1 + int(draw.random() * 12),
                priority=int(draw.random() * 3), owner="ab"[int(draw.random() * 2)],
            )  # fmt: skip
        if draw.random() < 0.02 and world.scheduler.num_running:
            world.scheduler.preempt_all()
        if draw.random() < 0.55 or not world.in_flight:
            step = world.scheduler.schedule()
            if step is not None:
                world.in_flight.append(step)
                blocks = [(new.request_id, new.block_ids) for new in step.new_requests]
                steps.append(
                    (list(step.num_scheduled_tokens.items()), blocks,
                     list(step.new_block_ids.items()), step.gone_request_ids)
                )  # fmt: skip
        elif world.in_flight:
            world.land()
        world.now += 0.25
    return steps


def test_without_targets_steps_are_as_they_were(make_world: Make) -> None:
    """If they are to be others, say so in the change log, and put their digest here."""
    digest = sha256()
    for settings in SETTINGS:
        steps = random_steps(make_world, settings)
        assert len(steps) > 100
        digest.update(repr(steps).encode())
    assert digest.hexdigest() == BEFORE
