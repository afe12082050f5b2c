"""Prompts, lengths, and what times mean. Standard library only: it runs in every engine's environment."""

from __future__ import annotations

import random
from typing import NamedTuple

LOW_ID, HIGH_ID = 300, 8000
"""Token ids that every checkpoint here has, and that are no special tokens."""


class Request(NamedTuple):
    """A prompt and how many tokens to generate, end tokens ignored."""

    prompt: list[int]
    num_tokens: int


class Serving(NamedTuple):
    """A closed loop of random requests."""

    concurrency: int
    num_requests: int
    input_len: int = 256
    output_len: int = 128


BATCHES = {"batch8": 8, "batch32": 32}
"""Workload -> requests that decode together."""
OFFLINE = ("decode", "prefill", *BATCHES, "mixed", "prefix")
SERVING = {
    "serve1": Serving(1, 4),
    "serve8": Serving(8, 24),
    "serve32": Serving(32, 64),
    "serve64": Serving(64, 256),
}
"""Workload -> its load."""


def prompt(length: int, *seed: object) -> list[int]:
    """Random ids; equal seeds give equal prompts."""
    draw = random.Random(repr(seed))
    return [draw.randrange(LOW_ID, HIGH_ID) for _ in range(length)]


def requests_of(workload: str, salt: int, *, scale: float = 1.0) -> list[list[Request]]:
    """The batches of an offline workload; each batch is submitted at once and timed.

    Args:
        salt: new in each round, the same for all engines: no prefix cache answers.
        scale: shrinks lengths, for a quick look.
    """

    def sized(length: float) -> int:
        return max(1, round(length * scale))

    def draw(length: float, *seed: object) -> list[int]:
        return prompt(sized(length), workload, salt, *seed)

    if workload == "decode":
        return [[Request(draw(128, 0), 1)], [Request(draw(128, 1), 1 + sized(128))]]
    if workload == "prefill":
        return [[Request(draw(2048), 1)]]
    if workload in BATCHES:
        places = range(BATCHES[workload])
        return [
            [Request(draw(32, turn, place), 1 + turn * sized(64)) for place in places]
            for turn in (0, 1)
        ]
    if workload == "mixed":
        lengths = random.Random(7)
        sizes = [(lengths.randint(32, 512), lengths.randint(16, 256)) for _ in range(64)]
        return [[Request(draw(n, i), sized(out)) for i, (n, out) in enumerate(sizes)]]
    if workload == "prefix":
        shared = draw(1024, "shared")
        return [[Request(shared + draw(64, i), sized(32)) for i in range(32)]]
    raise ValueError(f"no workload {workload!r}: must be one of {', '.join(OFFLINE)}")


def figures(workload: str, seconds: list[float], batches: list[list[Request]]) -> dict[str, float]:
    """What an offline workload's times mean."""
    if workload == "decode":
        tokens = batches[1][0].num_tokens - batches[0][0].num_tokens
        return {"ms_per_token": 1e3 * (seconds[1] - seconds[0]) / tokens}
    if workload in BATCHES:
        tokens = sum(r.num_tokens - 1 for r in batches[1])
        return {"output_tok_s": tokens / (seconds[1] - seconds[0])}
    if workload == "mixed":
        out = sum(r.num_tokens for r in batches[0])
        total = out + sum(len(r.prompt) for r in batches[0])
        return {"output_tok_s": out / seconds[0], "total_tok_s": total / seconds[0]}
    return {"seconds": seconds[0]}
