"""One engine behind lines of JSON: ``worker.py ENGINE MODEL DTYPE``.

A command is ``{"workload", "salt", "high", "scale"}``; the answer has the batches' seconds. Everything else
that an engine prints goes to standard error.
"""

from __future__ import annotations

import json
import os
import sys
import time

import workloads


def main() -> None:
    answers = os.fdopen(os.dup(1), "w", buffering=1)
    os.dup2(2, 1)
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    import engines

    begin = time.perf_counter()
    engine = engines.make(*sys.argv[1:4])
    engine.run([workloads.Request(workloads.prompt(16, "start", high=400), 2)])
    print(json.dumps({"ready": time.perf_counter() - begin}), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        batches = workloads.requests_of(**command)
        seconds, wrong = [], 0
        for batch in batches:
            start = time.perf_counter()
            lengths = engine.run(batch)
            seconds.append(time.perf_counter() - start)
            wrong += sum(got != request.num_tokens for got, request in zip(lengths, batch))
        figures = workloads.figure(command["workload"], seconds, batches)
        print(json.dumps({"figures": figures, "wrong_lengths": wrong}), file=answers)


if __name__ == "__main__":
    main()
