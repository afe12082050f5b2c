"""Wrong requests get a 4xx that tells nothing, quickly, and harm nobody (F5).

Bounded here to half a minute, to more by ``HEADRACE_TESTS=full``; ``nox -s fuzz`` sends them all, and 10,000
generated ones.
"""

from __future__ import annotations

import json
import os
import random
import urllib.request

import pytest
from fuzz import SERVER, Fuzz
from malformed import RAW, Client, bodies, exchange, mutations
from mutated import BODIES
from mutated import SERVER as WITH_TOOLS
from servers import serving

from headrace_testing.waiting import wait_until

ALL = os.environ.get("HEADRACE_FUZZ") == "all"
SAMPLED = os.environ.get("HEADRACE_TESTS", "full") == "sampled"
NUM_BODIES, NUM_MUTATIONS, NUM_GENERATED = (10**9, 10_000, 10_000) if ALL else (5000, 500, 300)
NUM_MUTANTS = 20_000 if ALL else 4500
"""10,000 of all kinds together with every change."""
if SAMPLED and not ALL:
    NUM_GENERATED = 60
pytestmark = [pytest.mark.req("F5"), pytest.mark.req("SEC-09"), pytest.mark.timeout(1800)]


@pytest.fixture(scope="module")
def server():
    with serving(*SERVER) as running:
        yield running
        assert running.process.poll() is None
        assert running.status("/health") == 200
        wait_until(lambda: running.metric("num_requests_running") == 0)
        assert running.metric("kv_cache_usage_perc") == 0


def _some(items, count):
    """So many of them, always the same."""
    items = list(items)
    return items if count >= len(items) else random.Random(1).sample(items, count)


@pytest.mark.req("SEC-11")
@pytest.mark.req("SEC-13")
def test_wrong_bodies(server):
    with urllib.request.urlopen(server.url + "/openapi.json", timeout=30) as answer:
        document = json.load(answer)
    client, problems = Client(server.url), []
    chosen = _some(bodies(document), NUM_BODIES)
    for path, body in chosen:
        answer = client.post(path, body)
        if answer.seconds > 1.0:
            answer = client.post(path, body)  # the machine may have been busy
        problem = answer.problem(body) or ("no answer" if answer.status == 0 else "")
        if problem:
            problems.append(f"{path}: {problem}; sent {body[:300]!r}")
    client.close()
    assert len(chosen) > 1000
    assert not problems, f"{len(problems)} of {len(chosen)}:\n" + "\n".join(problems[:20])


@pytest.mark.req("SEC-20")
def test_wrong_http(server):
    problems = []
    for data in (*RAW, *mutations(NUM_MUTATIONS, seed=1)):
        answer = exchange(server.url, data)
        if answer.seconds > 1.0:
            answer = exchange(server.url, data)
        problem = answer.problem(data)
        if problem:
            problems.append(f"{problem}; sent {data[:200]!r}")
    assert not problems, f"{len(problems)}:\n" + "\n".join(problems[:20])


def test_generated_requests(server):
    fuzz = Fuzz(server.url)
    fuzz.run(NUM_GENERATED, log=lambda line: None)
    assert fuzz.num_requests >= NUM_GENERATED
    assert not fuzz.problems, f"{len(fuzz.problems)}:\n" + "\n".join(fuzz.problems[:20])


@pytest.fixture(scope="module")
def with_tools():
    with serving(*WITH_TOOLS) as running:
        yield running
        assert running.process.poll() is None
        wait_until(lambda: running.metric("num_requests_running") == 0)


def test_bodies_that_are_nearly_right(with_tools):
    fuzz = Fuzz(with_tools.url)
    for path, body in BODIES:
        answer = Client(with_tools.url).post(path, json.dumps(body).encode())
        assert answer.status == 200, f"{path}: {answer.body!r}"
    fuzz.run_mutants(NUM_MUTANTS, number=17)
    assert not fuzz.problems, f"{len(fuzz.problems)}:\n" + "\n".join(fuzz.problems[:20])
    assert (
        sum(count for (_, status), count in fuzz.statuses.items() if status == 200)
        > NUM_MUTANTS / 20
    )
