"""Flags and models of the commands that talk in a terminal: ``chat`` and ``complete``."""

from __future__ import annotations

import io
import itertools
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any, Protocol

from headrace.arguments import Parser
from headrace.batch.prompts import check_text
from headrace.cli.conversation import AnswerReport
from headrace.engine_args import EngineArgs
from headrace.interrupts import ending_at_once
from headrace_core.errors import ConfigError


class TerminalModel(Protocol):
    """A model in this process or on a server, as the terminal uses it."""

    @property
    def name(self) -> str:
        """The model's served name."""
        ...

    @property
    def context(self) -> int | None:
        """Tokens that its context holds; None: unknown."""
        ...

    @property
    def place(self) -> str:
        """The place where it runs, for the user."""
        ...

    def chat(
        self,
        messages: Sequence[Mapping[str, Any]],
        report: AnswerReport | None = None,
        **options: Any,
    ) -> Iterator[str]:
        """Stream the answer's text."""
        ...

    def complete(self, prompt: str, **options: Any) -> Iterator[str]:
        """Stream the completion's text."""
        ...

    def close(self) -> None:
        """Free everything."""
        ...


def terminal_parser(name: str, description: str, epilog: str) -> Parser:
    """A parser with the flags that ``chat`` and ``complete`` have in common."""
    parser = Parser(prog=f"headrace {name}", description=description, epilog=epilog)
    parser.add_model()
    parser.add_argument("-q", "--quick", metavar="TEXT", help="one exchange, then exit")
    parser.add_argument("--url", help="use a running server, e.g. http://localhost:8000/v1")
    parser.add_argument("--model-name", help="with --url: which model (default: its first)")
    parser.add_argument("--api-key", help="with --url: its key (default: OPENAI_API_KEY)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return EngineArgs.add_cli_args(parser)


def connect_model(args: Namespace) -> TerminalModel:
    """A server if one was named, else a model in this process.

    Raises:
        ConfigError: ``--url`` and ``--demo`` are given.
    """
    if args.url is not None and args.demo is not None:
        raise ConfigError(
            f"--demo {args.demo} cannot be given together with --url: the server has its own model",
            field="demo",
        )
    if args.url is not None:
        from headrace.cli.remote import connect_server

        return connect_server(args.url, args.model_name, args.api_key)
    if is_terminal():
        print("loading the model; Ctrl-C ends it", file=sys.stderr)
    with ending_at_once():
        from headrace.cli.local import LocalModel

        return LocalModel(EngineArgs.from_cli_args(args))


def sampling_options(args: Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in given.items() if value is not None}


def is_terminal() -> bool:
    """True if a person types and reads; else lines come from a pipe or go to a file."""
    return sys.stdin.isatty() and sys.stdout.isatty()


def piped_lines() -> Iterator[str]:
    """Lines of standard input that are not blank, until they end.

    Raises:
        RequestError: a line is not UTF-8; those before it have come.
    """
    is_typed = sys.stdin.isatty()
    if isinstance(sys.stdin, io.TextIOWrapper):
        sys.stdin.reconfigure(encoding="utf-8", errors="surrogateescape")  # see check_text
    for number in itertools.count(1):
        if is_typed:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield check_text(f"standard input, line {number}", line.rstrip("\n"))


def show(pieces: Iterable[str]) -> str:
    """Print text as it comes; returns the whole."""
    whole = []
    for piece in pieces:
        print(piece, end="", flush=True)
        whole.append(piece)
    print(flush=True)
    return "".join(whole)


def note(text: str) -> None:
    """Tell the user something that is not part of an answer."""
    print(text, file=sys.stderr, flush=True)
