"""``headrace chat``: a conversation in the terminal."""

from __future__ import annotations

import sys
from argparse import Namespace
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace.cli.remote import RemoteServer
from headrace.engine_args import EngineArgs
from headrace.logs import configure

if TYPE_CHECKING:
    from headrace.cli.local import LocalModel


def main(words: Sequence[str]) -> int:
    parser = terminal_parser(
        "chat",
        "Talk to a model in this terminal: the demo model, a checkpoint, or (with --url) a server.",
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message, in the system role")
    parser.add_argument(
        "--thinking", action="store_true", help="ask the template to let the model reason first"
    )
    args = parser.parse_args(words)
    configure("WARNING")
    model = connect_model(args)
    options = sampling_options(args)
    if args.thinking:
        options["chat_template_kwargs"] = {"enable_thinking": True}
    messages: list[dict[str, Any]] = []
    if args.system_prompt:
        messages.append({"role": "system", "content": args.system_prompt})
    try:
        for question in questions(args.quick):
            messages.append({"role": "user", "content": question})
            answer = show(model.chat(messages, **options))
            messages.append({"role": "assistant", "content": answer})
    finally:
        model.close()
    return 0


class _Remote(RemoteServer):
    """A server as the terminal uses it."""

    def close(self) -> None:
        """Nothing is held open between requests."""


def terminal_parser(name: str, description: str) -> Parser:
    """What ``chat`` and ``complete`` have in common."""
    parser = Parser(
        prog=f"headrace {name}",
        description=description,
        epilog="End with Ctrl-D. Lines may also be piped in: one question a line.",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; the command line wins"
    )
    parser.add_argument("-q", "--quick", metavar="TEXT", help="one exchange, then exit")
    parser.add_argument("--url", help="use a running server, e.g. http://localhost:8000/v1")
    parser.add_argument("--model-name", help="with --url: which model (default: its first)")
    parser.add_argument("--api-key", help="with --url: its key (default: OPENAI_API_KEY)")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an answer")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    return EngineArgs.add_cli_args(parser)


def connect_model(args: Namespace) -> _Remote | LocalModel:
    """A server if one was named, else a model in this process."""
    if args.url:
        key = {"api_key": args.api_key} if args.api_key else {}
        return _Remote(args.url, args.model_name, **key)
    from headrace.cli.local import LocalModel

    if args.model_tag is not None:
        args.model = args.model_tag
    return LocalModel(EngineArgs.from_cli_args(args))


def sampling_options(args: Namespace) -> dict[str, Any]:
    """The sampling fields that were given."""
    given = {"max_tokens": args.max_tokens, "temperature": args.temperature}
    return {name: value for name, value in given.items() if value is not None}


def questions(quick: str | None) -> Iterable[str]:
    """The one question, or lines from the terminal or a pipe until they end."""
    if quick is not None:
        yield quick
        return
    interactive = sys.stdin.isatty()
    while True:
        if interactive:
            print("> ", end="", file=sys.stderr, flush=True)
        line = sys.stdin.readline()
        if not line:
            return
        if line.strip():
            yield line.rstrip("\n")


def show(pieces: Iterable[str]) -> str:
    """Print text as it comes; returns the whole."""
    whole = []
    for piece in pieces:
        print(piece, end="", flush=True)
        whole.append(piece)
    print(flush=True)
    return "".join(whole)
