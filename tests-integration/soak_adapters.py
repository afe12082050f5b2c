"""Adapters that come, go and are replaced under load, every answer checked.

``python tests-integration/soak_adapters.py --seconds 600`` serves the demo model with two slots, asks the
base model and six adapters all the time, and loads, unloads and replaces adapters meanwhile. A name that
is not loaded is a 404; every other answer must be that of a version that the name stood for while the
request was under way. At the end it prints what was done, and the server's memory before and after; it
fails if an answer was wrong or the memory grew by more than 2 %.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import random
import sys
import tempfile
import time
from dataclasses import dataclass, field
from pathlib import Path

import httpx
from lora_adapters import demo_adapter, demo_folder
from servers import RunningServer, serving

from headrace import LLM, SamplingParams
from headrace.lora import LoRARequest

KEY = "operators-key"
BASE, PROMPTS = "headrace-demo", ("What is 12 + 7?", "Hello! What can you do?", "One, two,")
NAMES = tuple(f"adapter-{number}" for number in range(6))
FOLDERS = 9
"""Adapters on disk: names stand for one after the other."""
TOKENS = 12
TOLERANCE = 0.02


@dataclass
class Tally:
    """What a soak came to."""

    versions: dict[str, list[tuple[float, int | None]]] = field(default_factory=dict)
    """By name: since when it stands, or may stand, for which folder; None: for none."""
    done: collections.Counter[str] = field(default_factory=collections.Counter)
    wrong: list[str] = field(default_factory=list)

    def change(self, name: str, folder: int | None) -> None:
        self.versions.setdefault(name, [(0.0, None)]).append((time.monotonic(), folder))

    def possible(self, name: str, begin: float) -> set[int | None]:
        """What a name has stood for since then."""
        history = self.versions.get(name, [(0.0, None)])
        before = [folder for since, folder in history if since <= begin][-2:]
        return {*before, *(folder for since, folder in history if since > begin)}


def expected(folder: Path) -> dict[int | None, list[str]]:
    """Texts of the base model (None) and of each adapter."""
    params = SamplingParams(temperature=0, max_tokens=TOKENS)
    found: dict[int | None, list[str]] = {}
    with LLM(demo_folder(), dtype="float32", enable_lora=True) as llm:
        for number in (None, *range(FOLDERS)):
            lora = None
            if number is not None:
                path = demo_adapter(folder / str(number), number)
                lora = LoRARequest(str(number), number + 1, path)
            outputs = llm.generate(list(PROMPTS), params, lora_request=lora, use_tqdm=False)
            found[number] = [output.outputs[0].text for output in outputs]
    return found


async def keep_asking(
    client: httpx.AsyncClient, tally: Tally, texts: dict[int | None, list[str]], until: float
) -> None:
    while time.monotonic() < until:
        name, prompt = random.choice((BASE, *NAMES)), random.randrange(len(PROMPTS))
        begin = time.monotonic()
        body = {"model": name, "prompt": PROMPTS[prompt], "max_tokens": TOKENS, "temperature": 0}
        answer = await client.post("/v1/completions", json=body)
        folders = {None} if name == BASE else tally.possible(name, begin)
        right = {texts[one][prompt] for one in folders if one is not None or name == BASE}
        if answer.status_code == 404 and None in folders and name != BASE:
            tally.done["refused as unknown"] += 1
        elif answer.status_code != 200:
            tally.wrong.append(f"{name}: {answer.status_code} {answer.text[:200]}")
        elif answer.json()["choices"][0]["text"] in right:
            tally.done["answered"] += 1
        else:
            tally.wrong.append(f"{name} {folders}: {answer.text[:200]}")


async def keep_changing(
    client: httpx.AsyncClient, tally: Tally, folder: Path, until: float
) -> None:
    """Load, replace and unload, one name at a time."""
    loaded: set[str] = set()
    while time.monotonic() < until:
        name = random.choice(NAMES)
        if name in loaded and random.random() < 0.5:
            tally.change(name, None)
            answer = await client.post("/v1/unload_lora_adapter", json={"lora_name": name})
            loaded.discard(name)
            tally.done["unloaded"] += 1
        else:
            number = random.randrange(FOLDERS)
            tally.change(name, number)
            body = {"lora_name": name, "lora_path": str(folder / str(number)), "load_inplace": True}
            answer = await client.post("/v1/load_lora_adapter", json=body)
            tally.done["replaced" if name in loaded else "loaded"] += 1
            loaded.add(name)
        if answer.status_code != 200:
            tally.wrong.append(f"{name}: {answer.text[:300]}")
        await asyncio.sleep(0.1)


def resident(server: RunningServer) -> int:
    """Bytes of the server's process."""
    fields = Path(f"/proc/{server.process.pid}/statm").read_text().split()
    return int(fields[1]) * 4096


async def soak(server: RunningServer, folder: Path, seconds: float, streams: int) -> int:
    texts, tally = expected(folder), Tally()
    headers = {"Authorization": f"Bearer {KEY}"}
    async with httpx.AsyncClient(
        base_url=server.url, headers=headers, timeout=120, trust_env=False
    ) as client:
        before, began = 0, time.monotonic()
        for end in (min(15.0, seconds / 4), seconds):  # what is made once and kept is there before
            before = resident(server)
            until = began + end
            await asyncio.gather(
                keep_changing(client, tally, folder, until),
                *(keep_asking(client, tally, texts, until) for _ in range(streams)),
            )
    after = resident(server)
    growth = after / before - 1
    print(", ".join(f"{count} {what}" for what, count in tally.done.items()))
    print(f"memory: {before / 2**20:.1f} MiB before, {after / 2**20:.1f} MiB after ({growth:+.2%})")
    print(f"{seconds:.0f} s, {len(tally.wrong)} wrong")
    for line in tally.wrong[:10]:
        print(line)
    if tally.wrong:
        print("the server said:", *server.log[-100:], sep="\n")
    return 1 if tally.wrong or growth > TOLERANCE else 0


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--seconds", type=float, default=60.0)
    parser.add_argument("--streams", type=int, default=8, help="requests at once")
    arguments = parser.parse_args()
    with (
        tempfile.TemporaryDirectory() as folder,
        serving(
            "--dtype", "float32", "--enable-lora", "--max-loras", "2", "--max-cpu-loras", "4",
            "--allow-runtime-lora-updating", "--api-key", KEY, "--disable-uvicorn-access-log",
        ) as server,
    ):  # fmt: skip
        return asyncio.run(soak(server, Path(folder), arguments.seconds, arguments.streams))


if __name__ == "__main__":
    sys.exit(main())
