"""A process that imports ``headrace`` once and runs each command line in a forked child.

Reads a JSON object a line: ``words`` of the command, ``errors`` (file for its stderr) and ``seconds`` until
it is ended. Answers each with a line: the child's exit status.
"""

from __future__ import annotations

import gc
import importlib
import json
import os
import signal
import sys

from headrace.cli import main

IMPORTED = (
    "headrace.assembly.inspection", "headrace.bench.serve", "headrace.cli.bench",
    "headrace.cli.chat", "headrace.cli.complete", "headrace.cli.inspect", "headrace.cli.plugins",
    "headrace.cli.run_batch", "headrace.cli.serve", "headrace_demo", "headrace_engine.engine",
    "headrace_models.resolve", "headrace_server.app", "headrace_server.preflight",
)  # fmt: skip
"""Modules that most commands import; a child imports the rest."""


def _become_the_command(errors: str, seconds: int) -> None:
    signal.alarm(seconds)
    os.dup2(os.open(os.devnull, os.O_RDWR), 0)
    os.dup2(0, 1)
    os.dup2(os.open(errors, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o600), 2)


for name in IMPORTED:
    importlib.import_module(name)
gc.freeze()  # a child that ends does not walk what it shares
for line in sys.stdin:
    call = json.loads(line)
    child = os.fork()
    if child == 0:
        _become_the_command(call["errors"], call["seconds"])
        main.main(call["words"])
    status = os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    print(status, flush=True)
