"""Five models in one server, every answer checked, while guests come and go.

``python tests-integration/soak_several.py --seconds 600`` serves a chat model, two embedders, a
reranker and a Whisper-shaped model, asks each of them all the time, and loads and unloads a guest
meanwhile. Each answer is compared with the one that was given alone. At the end it prints requests,
wrong answers, how many guests came, and the server's memory before and after; it fails if an answer
was wrong or the memory did not come back to within 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from servers import serving
from several import GUEST, KEY, comparable, models_file, request

MODELS = ("chat", "small", "large", "rank", "ears")
SEEDS = 12
"""Different requests to each model."""
TOLERANCE = 0.02


@dataclass
class Tally:
    """What a soak came to."""

    expected: dict[tuple[str, int], Any] = field(default_factory=dict)
    answered: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)
    slowest: dict[str, float] = field(default_factory=dict)
    """Seconds."""
    guests: int = 0

    def note(self, name: str, seed: int, found: Any, seconds: float) -> None:
        self.answered[name] += 1
        self.slowest[name] = max(seconds, self.slowest.get(name, 0.0))
        if found != self.expected[name, seed]:
            self.wrong.append(f"{name} {seed}: {str(found)[:200]}")


async def ask(client: httpx.AsyncClient, name: str, seed: int) -> Any:
    path, arguments = request(name, seed)
    return comparable(await client.post(path, **arguments))


async def keep_asking(
    client: httpx.AsyncClient, tally: Tally, name: str, first: int, until: float
) -> None:
    seed = first
    while time.monotonic() < until:
        seed = (seed + 1) % SEEDS
        begin = time.monotonic()
        try:
            found = await ask(client, name, seed)
        except (httpx.HTTPError, AssertionError, KeyError) as error:
            found = repr(error)
        tally.note(name, seed, found, time.monotonic() - begin)


async def guests(client: httpx.AsyncClient, tally: Tally, until: float) -> None:
    """One after the other, each asked once."""
    while time.monotonic() < until:
        loaded = await client.post("/models/load", json=GUEST)
        if loaded.status_code != 200:
            tally.wrong.append(f"guest: {loaded.text[:300]}")
        elif await ask(client, "guest", 1) != tally.expected["chat", 1]:
            tally.wrong.append("guest: another answer than the same model's")
        gone = await client.post("/models/unload", json={"name": GUEST["name"]})
        if gone.status_code != 200:
            tally.wrong.append(f"guest: {gone.text[:300]}")
        tally.guests += 1
        await asyncio.sleep(1)


async def resident(client: httpx.AsyncClient) -> int:
    """Bytes that the server holds once nothing runs and a last guest has left."""
    await client.post("/models/load", json=GUEST)
    await client.post("/models/unload", json={"name": GUEST["name"]})
    budget = (await client.get("/models")).json()["budget"]
    return int(budget["resident"])


async def soak(url: str, seconds: float, streams: int) -> int:
    tally = Tally()
    limits = httpx.Limits(max_connections=200)
    async with httpx.AsyncClient(
        base_url=url, headers=KEY, timeout=120, limits=limits, trust_env=False
    ) as client:
        for name in MODELS:
            for seed in range(SEEDS):
                tally.expected[name, seed] = await ask(client, name, seed)
        # What is made once and kept (threads, buffers, a first guest's code) is there before.
        warm = time.monotonic() + min(10.0, seconds / 4)
        await _all(client, tally, warm, streams)
        before = await resident(client)
        began = time.monotonic()
        await _all(client, tally, began + seconds, streams)
        took = time.monotonic() - began
        after = await resident(client)
    for name in MODELS:
        print(f"{name:>6}: {tally.answered[name]} answers, slowest {tally.slowest[name]:.2f} s")
    print(f"guests: {tally.guests} loaded and unloaded")
    growth = after / before - 1
    print(f"memory: {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after ({growth:+.2%})")
    print(f"{sum(tally.answered.values())} answers in {took:.0f} s, {len(tally.wrong)} wrong")
    for line in tally.wrong[:10]:
        print(line)
    return 1 if tally.wrong or growth > TOLERANCE else 0


async def _all(client: httpx.AsyncClient, tally: Tally, until: float, streams: int) -> None:
    await asyncio.gather(
        guests(client, tally, until),
        *(
            keep_asking(client, tally, name, first, until)
            for name in MODELS
            for first in range(streams)
        ),
    )


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=2, help="at once, for each model")
    arguments = parser.parse_args()
    with tempfile.TemporaryDirectory() as folder:
        file = models_file(Path(folder), *MODELS)
        with serving(
            "--models-config", str(file), "--enable-control-routes",
            "--disable-uvicorn-access-log", environment={"HEADRACE_API_KEY": "several"},
        ) as server:  # fmt: skip
            return asyncio.run(soak(server.url, arguments.seconds, arguments.streams))


if __name__ == "__main__":
    sys.exit(main())
