"""The process that ``headrace bench startup`` starts: ``first_token SETTINGS STARTED``.

Loads the engine, generates one token, prints the seconds of each phase as JSON. ``STARTED`` is the reading
of ``time.monotonic`` at which the parent started this process; on one machine both read the same clock.
"""

from __future__ import annotations

import time

BEGUN = time.monotonic()

import json  # noqa: E402 - the clock is read first
import os  # noqa: E402
import sys  # noqa: E402


def main(settings: str, started: str) -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)  # whatever else is printed is not the answer
    phases = {"start Python": BEGUN - float(started)}
    from headrace.llm import LLM
    from headrace.sampling_params import SamplingParams

    imported = time.monotonic()
    phases["import headrace"] = imported - BEGUN
    with LLM(**json.loads(settings)) as llm:
        built = time.monotonic()
        # The engine's own account of what it did, and what that leaves unexplained.
        phases |= llm.engine.client.timeline.seconds
        phases["other"] = max(
            0.0, built - imported - sum(llm.engine.client.timeline.seconds.values())
        )
        params = SamplingParams(max_tokens=1, temperature=0.0, detokenize=False)
        llm.generate([3, 4, 5], params, use_tqdm=False)
        phases["first token"] = time.monotonic() - built
    print(json.dumps(phases), file=answers)


if __name__ == "__main__":
    main(*sys.argv[1:3])
