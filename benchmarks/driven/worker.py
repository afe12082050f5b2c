"""One engine behind lines of JSON: ``worker.py ENGINE SETTINGS``.

Settings are a JSON object for :mod:`engines`. A command is ``{"workload", "salt", "scale"}``; the answer has
the figures. Everything that the engine prints goes to standard error.
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
    engine = engines.make(sys.argv[1], json.loads(sys.argv[2]))
    engine.run([workloads.Request(workloads.prompt(16, "start"), 2)])
    ready = {"ready": time.perf_counter() - begin, "version": engine.version}
    print(json.dumps(ready), file=answers)
    for line in sys.stdin:
        command = json.loads(line)
        batches = workloads.requests_of(**command)
        seconds, wrong = [], 0
        for batch in batches:
            start = time.perf_counter()
            lengths = engine.run(batch)
            seconds.append(time.perf_counter() - start)
            wrong += sum(got != request.num_tokens for got, request in zip(lengths, batch))
        figures = workloads.figures(command["workload"], seconds, batches)
        print(json.dumps({"figures": figures, "wrong_lengths": wrong}), file=answers)


if __name__ == "__main__":
    main()
