"""Text streams beside prompts with images: ``python benchmarks/media_streams.py --help``.

A real server, real sockets. Text streams run alone, then while as many prompts come, each with an image
that nobody has seen before, then alone again. The program prints the times between two tokens of the text
streams, and the images' times to the first token.
"""

from __future__ import annotations

import argparse
import asyncio
import base64
import io
import itertools
import json
import random
import statistics
import time
from typing import Any

import httpx2
from images import make

Times = list[float]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument(
        "models", nargs="?", help="folder of images.py's checkpoint, made if absent"
    )
    parser.add_argument(
        "--url", help="a server that runs, e.g. http://127.0.0.1:8000; its first model is asked"
    )
    parser.add_argument("--streams", type=int, default=20, help="of text")
    parser.add_argument("--images", type=int, default=20, help="prompts with an image")
    parser.add_argument("--size", type=int, default=448, help="pixels of an image's sides")
    parser.add_argument(
        "--seconds", type=float, default=15, help="alone, before and after the images"
    )
    return parser.parse_args()


def picture(size: int, seed: int) -> str:
    """A ``data:`` URL of noise: no two are alike."""
    from PIL import Image

    pixels = random.Random(seed).randbytes(size * size * 3 // 64)
    image = Image.frombytes("RGB", (size // 8, size // 8), pixels).resize((size, size))
    buffer = io.BytesIO()
    image.save(buffer, "JPEG")
    return "data:image/jpeg;base64," + base64.b64encode(buffer.getvalue()).decode()


async def stream(
    client: httpx2.AsyncClient, body: dict[str, Any], end: asyncio.Event | None
) -> Times:
    """The moments at which tokens came; the stream is dropped when ``end`` is set."""
    times: Times = []
    async with client.stream(
        "POST", "/v1/chat/completions", json={**body, "stream": True}
    ) as answer:
        answer.raise_for_status()
        async for line in answer.aiter_lines():
            if line.startswith("data: {") and json.loads(line[6:])["choices"]:
                times.append(time.perf_counter())
            if end is not None and end.is_set():
                break
    return times


def text_body(model: str, number: int, tokens: int) -> dict[str, Any]:
    words = f"{number} " + "one two three four five six seven eight " * 4
    message = {"role": "user", "content": words}
    return {
        "model": model,
        "messages": [message],
        "max_tokens": tokens,
        "ignore_eos": True,
        "temperature": 0,
    }


def image_body(model: str, number: int, size: int) -> dict[str, Any]:
    parts = [
        {"type": "image_url", "image_url": {"url": picture(size, number)}},
        {"type": "text", "text": "What is it?"},
    ]
    message = {"role": "user", "content": parts}
    return {
        "model": model,
        "messages": [message],
        "max_tokens": 8,
        "ignore_eos": True,
        "temperature": 0,
    }


async def asked(client: httpx2.AsyncClient, body: dict[str, Any]) -> float:
    """Seconds to the first token."""
    begin = time.perf_counter()
    return (await stream(client, body, None))[0] - begin


async def measure(url: str, options: argparse.Namespace) -> dict[str, Any]:
    """The streams alone, beside the images, and alone again: as they grow, what is before and after the
    images stands for their length meanwhile."""
    async with httpx2.AsyncClient(base_url=url, timeout=600) as client:
        model = (await client.get("/v1/models")).json()["data"][0]["id"]
        await asked(client, image_body(model, 10**6, options.size))  # what comes first is slower
        end = asyncio.Event()
        streams = [
            asyncio.create_task(stream(client, text_body(model, i, 6000), end))
            for i in range(options.streams)
        ]
        await asyncio.sleep(3)
        begin = time.perf_counter()
        await asyncio.sleep(options.seconds)
        came = time.perf_counter()
        firsts = await asyncio.gather(
            *(asked(client, image_body(model, i, options.size)) for i in range(options.images))
        )
        gone = time.perf_counter()
        await asyncio.sleep(options.seconds)
        last = time.perf_counter()
        end.set()
        times = await asyncio.gather(*streams)
    alone = [between(own, begin, came) for own in times] + [
        between(own, gone, last) for own in times
    ]
    return {
        "alone_ms": summary(alone),
        "beside_ms": summary([between(own, came, gone) for own in times]),
        "images_seconds": gone - came,
        "image_first_token_s": {"median": statistics.median(firsts), "most": max(firsts)},
    }


def between(times: Times, begin: float, end: float) -> Times:
    """Those within a span of time."""
    return [moment for moment in times if begin <= moment <= end]


def summary(streams: list[Times]) -> dict[str, float]:
    """Mean, median, 95th and 99th percentile and longest time between two tokens, over all streams, in ms."""
    gaps = sorted(1000 * (b - a) for times in streams for a, b in itertools.pairwise(times))
    return {
        "mean": statistics.fmean(gaps),
        "median": statistics.median(gaps),
        "p95": gaps[int(0.95 * len(gaps))],
        "p99": gaps[int(0.99 * len(gaps))],
        "most": gaps[-1],
    }


def main() -> None:
    options = parse()
    if options.url is None:
        from pathlib import Path

        print(
            f"headrace serve {make(Path(options.models))} --max-model-len 8K, then again with --url"
        )
        return
    found = asyncio.run(measure(options.url, options))
    found["ratio"] = {
        name: found["beside_ms"][name] / found["alone_ms"][name] for name in found["alone_ms"]
    }
    print(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
