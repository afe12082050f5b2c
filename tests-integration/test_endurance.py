"""The runs of ``endurance.py`` in a small size: every answer is checked, no speed is."""

from __future__ import annotations

import asyncio
import os

import pytest
from endurance import (
    BURST,
    KEPT_MOST,
    QUIET,
    READ,
    SIM,
    blocks_are_free,
    resident,
    run_burst,
    run_equal,
    run_half_open,
    run_readers,
    run_soak,
)
from servers import SLACK, serving
from soak import quantile

from headrace_testing.waiting import wait_until

FULL = os.environ.get("HEADRACE_ENDURANCE") == "full"
pytestmark = pytest.mark.timeout(3600 if FULL else 300)


@pytest.mark.req("L2")
@pytest.mark.req("REL-15")
def test_many_at_once_say_what_each_says_alone():
    with serving("--max-num-seqs", "32", *QUIET) as server:
        found = asyncio.run(run_equal(server.url, 1800 if FULL else 6, kinds=64 if FULL else 24))
    assert found.num_answers > 32
    assert found.wrong == []


@pytest.mark.req("L3")
@pytest.mark.req("REL-07")
def test_a_burst_is_answered_or_refused():
    """1,280 within a second, of which the queue holds 256."""
    with serving(*BURST) as server:
        before = resident(server.process.pid)
        found = asyncio.run(run_burst(server.url, 1280))
        assert set(found.statuses) == {200, 429}
        assert found.statuses[200] >= 256
        assert found.unhelpful == 0
        assert quantile(found.livez, 0.5) < 1.0 * SLACK
        wait_until(lambda: blocks_are_free(server), what="work goes on")
        wait_until(lambda: resident(server.process.pid) < before + KEPT_MOST, what="memory stays")


@pytest.mark.req("L4")
@pytest.mark.req("REL-10")
@pytest.mark.req("SEC-16")
def test_a_soak_of_mixed_requests():
    """Whole, streamed, left, wrong, slowly read, with new names of everything."""
    with serving(*SIM, "--max-num-seqs", "64") as server:
        found = asyncio.run(run_soak(server, 100_000 if FULL else 2000))
        print(found.describe())
        assert found.wrong == []
        grown, slope = found.growth()
        assert slope < 1.0 if FULL else grown < 20.0
        wait_until(lambda: blocks_are_free(server), what="blocks are not free at idle")
        assert server.stop() == 0


@pytest.mark.req("F4")
@pytest.mark.req("REL-06")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("logprobs", [False, True], ids=["text", "logprobs"])
def test_slow_readers_cost_little(logprobs):
    number, seconds, rounds = (100, 30.0, 5) if FULL else (40, 1.0, 1)
    with serving(*READ) as server:
        asyncio.run(run_readers(server, number, 0.5, rounds=1))  # what is made once is there before
        found = asyncio.run(run_readers(server, number, seconds, logprobs=logprobs, rounds=rounds))
        print(found.describe())
    assert found.wrong == []
    assert found.bytes_each <= 64 * 1024


@pytest.mark.req("F14")
@pytest.mark.req("SEC-20")
def test_half_open_connections_cost_little():
    with serving(*SIM, "--header-timeout", "60") as server:
        found = asyncio.run(run_half_open(server, 1000))
        print(found.describe())
        assert found.wrong == []
        assert found.bytes_each <= 64 * 1024
        assert server.status("/livez") == 200
