"""``headrace``: find the sub-command, import only its module, run it.

Importing this module, and ``headrace --help``, import neither torch nor any other package of
headrace, so that help is there at once.
"""

from __future__ import annotations

import contextlib
import importlib
import os
import sys
from collections.abc import Sequence
from typing import NoReturn, Protocol

from headrace.interrupts import INTERRUPTED, leave_interrupted

COMMANDS = {
    "serve": "Serve a model over the OpenAI API (default: the demo model).",
    "route": "Serve several servers at one address; requests go where their prefix is cached.",
    "chat": "Talk to a model, or to a running server, in the terminal.",
    "complete": "Complete text, line by line or once.",
    "generate": "Complete many prompts offline, from a file or the command line.",
    "run-batch": "Answer a file of requests (JSON lines), resumable after a crash.",
    "bench": "Measure latency, throughput, serving and start-up.",
    "models": "List the supported architectures and their features.",
    "quantize": "Write a checkpoint again in fewer bits, and measure what that costs.",
    "plan": "Compare ways to spread a model over devices, and recommend one.",
    "inspect": "Show how a model would be served, and what is missing.",
    "collect-env": "Print the facts about this machine for a bug report.",
    "schema": "Show which grammar backends can serve a JSON schema, regex or grammar.",
    "plugins": "List the installed plug-ins by role.",
}


class Command(Protocol):
    """A module of a sub-command."""

    def main(self, argv: Sequence[str]) -> int: ...


def main(argv: Sequence[str] | None = None) -> NoReturn:
    """Run the command line and exit with its status."""
    argv = list(sys.argv[1:] if argv is None else argv)
    if not argv or argv[0] in ("-h", "--help"):
        print(usage())
        sys.exit(0)
    if argv[0] in ("-v", "--version"):
        from headrace import __version__

        print(f"headrace {__version__}")
        sys.exit(0)
    status = run(argv[0], argv[1:])
    if status == INTERRUPTED:
        leave_interrupted()
    sys.exit(status)


def run(name: str, argv: Sequence[str]) -> int:
    """Run one sub-command. An error ends in a hint, a line with its code and cause, and a status
    that tells its class; one that nobody foresaw shows its traceback before."""
    if name not in COMMANDS:
        from headrace.suggestions import near_names

        near = near_names(name, COMMANDS, 1)
        meant = f" Did you mean {near[0]!r}?" if near else ""
        print(
            "hint: headrace --help lists the commands (docs/errors/HR-CFG-002.md)", file=sys.stderr
        )
        print(f"headrace: HR-CFG-002: unknown command {name!r}.{meant}", file=sys.stderr)
        return 2
    from headrace_core.errors import HeadraceError

    try:
        module: Command = importlib.import_module("headrace.cli." + name.replace("-", "_"))
        status = module.main(argv)
        if sys.stdout is not None:
            sys.stdout.flush()  # here its failure can be told
        return status
    except HeadraceError as error:
        return report_error(name, error)
    except KeyboardInterrupt:
        return INTERRUPTED
    except BrokenPipeError:
        # The reader of our output has gone (`headrace ... | head`): nothing is wrong here.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return 0
    except Exception as error:
        from headrace_core.errors import BUG, entry_of

        if entry_of(error) is BUG:
            import traceback

            traceback.print_exc()
        return report_error(name, error)


def report_error(name: str, error: Exception) -> int:
    """Tell what ended a command, the cause last; returns the exit status."""
    from headrace.disk import FULL
    from headrace.error_catalogue import BY_CODE
    from headrace.logs import flush
    from headrace_core.errors import HeadraceError, entry_of

    flush()  # nobody looks for the cause above the log's lines
    entry = entry_of(error)
    cause = " ".join(str(error).split())
    if isinstance(error, OSError) and error.strerror and not isinstance(error, HeadraceError):
        place = error.filename or ("standard output" if error.errno in FULL else None)
        cause = f"{place}: {error.strerror}" if place else error.strerror
        if error.filename is None and error.errno in FULL:
            _leave_output()
    elif not isinstance(error, HeadraceError):
        cause = f"{type(error).__name__}: {cause}"
    print(f"hint: {BY_CODE[entry.code].hint} (docs/errors/{entry.code}.md)", file=sys.stderr)
    print(f"headrace {name}: {entry.code}: {cause}", file=sys.stderr)
    return status_of(error)


def _leave_output() -> None:
    """Write what standard output still holds to nowhere, or the interpreter's end would fail of it."""
    with contextlib.suppress(OSError, ValueError):  # it is closed, or not a file
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def status_of(error: BaseException) -> int:
    """The exit status that tells what kind of failure it was."""
    from headrace_core.errors import BUG, entry_of

    return entry_of(error).exit_status or BUG.exit_status or 70


def usage() -> str:
    """The text of ``headrace --help``."""
    width = max(map(len, COMMANDS))
    lines = [f"  {name:<{width}}  {text}" for name, text in COMMANDS.items()]
    return "\n".join(
        [
            "usage: headrace <command> [flags]     (headrace <command> --help for its flags)",
            "",
            "Run and serve language models.",
            "",
            *lines,
            "",
            "Start here:",
            "  headrace serve                      serve the demo model on http://127.0.0.1:8000",
            "  headrace chat                       talk to the demo model in this terminal",
            "  headrace serve /path/to/checkpoint  serve your own",
        ]
    )
