"""The simulated device under load: every token of every stream, liveness, fair shares."""

from __future__ import annotations

import asyncio
from collections import Counter

import pytest
from servers import serving
from soak import Stream, quantile, run_stream, soak

from headrace_testing.waiting import until, wait_until

SIM = ("--device", "sim", "--sim-token-us", "0", "--disable-uvicorn-access-log")


@pytest.mark.req("L1")
@pytest.mark.req("REL-21")
@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize(
    "words", [(), ("--engine-process",)], ids=["one-process", "engine-process"]
)
def test_every_token_of_every_stream(words):
    """A few seconds of what ``soak.py`` does for a minute."""
    with serving(*SIM, "--sim-step-ms", "20", "--max-num-seqs", "64", *words) as server:
        report = asyncio.run(soak(server.url, 60, 4.0, 100))
        assert report.wrong == []
        assert report.num_tokens > 75 * len(report.streams) >= 4500
        # No figure of speed: the machine is shared. A loop that streams held up would show in most.
        assert quantile(report.livez, 0.5) < 1.0
        assert report.livez
        wait_until(lambda: server.metric("num_requests_running") == 0)
        assert server.metric("kv_cache_usage_perc") == 0
        assert server.stop() == 0


@pytest.mark.req("REL-08")
@pytest.mark.req("F6")
def test_fifty_requests_in_a_pool_for_hardly_more_than_one():
    """All of them are preempted again and again, and each gets its tokens."""
    words = ("--sim-step-ms", "0.2", "--max-model-len", "256", "--num-gpu-blocks-override", "20")
    with serving(*SIM, *words) as server:
        streams = [Stream(seed, 200) for seed in range(50)]

        async def all_at_once():
            await asyncio.gather(*(run_stream(server.url, stream) for stream in streams))

        asyncio.run(all_at_once())
        assert [s.wrong for s in streams if s.wrong] == []
        assert server.metric("num_preemptions_total") > 0


@pytest.mark.req("REL-22")
@pytest.mark.req("L5")
def test_a_flood_does_not_take_more_than_its_share(tmp_path):
    """320 requests of one key against 128 of another, 16 at once: equal shares within 10 %.

    The few are still so many that some wait while the client is busy or not run at all: who asks
    for less than its share gets less. Tokens are counted, not seconds.
    """
    keys = tmp_path / "keys"
    keys.write_text("flood flood-key\nquiet quiet-key\n")
    words = ("--api-key-file", str(keys), "--scheduling-policy", "fair", "--max-num-seqs", "16")
    with serving(*SIM, "--sim-step-ms", "20", *words) as server:
        counts = asyncio.run(_compete(server.url, {"flood": 320, "quiet": 128}))
    print(counts)
    shares = counts["quiet"] / (counts["quiet"] + counts["flood"])
    assert 0.45 <= shares <= 0.55, counts


async def _compete(url, crowds):
    """Keep so many requests of each key open; 4000 tokens by key, once each had some."""
    streams = {name: [] for name in crowds}

    async def keep_asking(name, seed):
        while True:
            stream = Stream(seed, 10)
            streams[name].append(stream)
            await run_stream(url, stream, headers=f"Authorization: Bearer {name}-key\r\n")

    def counts():
        return Counter({n: sum(len(s.token_ids) for s in kept) for n, kept in streams.items()})

    tasks = [
        asyncio.create_task(keep_asking(name, i)) for name, n in crowds.items() for i in range(n)
    ]
    await until(lambda: min(counts().values()) >= 500)
    before = counts()
    await until(lambda: counts().total() >= before.total() + 4000)
    now = counts()
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    return now - before
