"""``headrace chat``: a conversation in the terminal."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from typing import Any

from headrace import demo
from headrace.batch.prompts import check_text
from headrace.cli.attachments import Attachment, attachment, dropped_files
from headrace.cli.chat_commands import QUIT, attach_files, run_command
from headrace.cli.conversation import AnswerReport, Conversation
from headrace.cli.line_input import LineReader, history_file
from headrace.cli.terminal import (
    TerminalModel,
    connect_model,
    is_terminal,
    note,
    piped_lines,
    sampling_options,
    terminal_parser,
)
from headrace.logs import configure
from headrace_core.errors import GenerateError, PromptTooLong, QueueFull, RequestError

PROMPT = "> "
ROOM = 8
"""An answer should find at least the context's length divided by this many tokens free."""

_PLACE = re.compile(r"messages\[(\d+)\]\.content\[(\d+)\][.\w]*( = '\w+')?")
"""The place of a content part in an error's message."""
_TYPE = re.compile(
    r"messages\[(\d+)\]\.content\[(\d+)\](?:\.type = '\w+':|: parts of type '\w+' are not supported;).*"
)
"""What an engine or a server says of a part that its model does not take."""
_KINDS = {"image": "pictures", "audio": "recordings", "video": "clips"}


def main(argv: Sequence[str]) -> int:
    parser = terminal_parser(
        "chat",
        "Talk to a model in this terminal: the demo model, a checkpoint, or (with --url) a server.",
        "In a terminal /help lists the commands; Ctrl-C stops an answer, Ctrl-D ends the chat.\n"
        "Lines may also be piped in: one question a line, and no commands; --attach goes with the first.",
    )
    parser.add_argument("--system-prompt", metavar="TEXT", help="first message, in the system role")
    parser.add_argument(
        "--thinking", action="store_true", help="ask the template to let the model reason first"
    )
    parser.add_argument(
        "--attach", metavar="FILE", action="append", default=[],
        help="a picture, a recording or a clip that goes with the first question; may be repeated",
    )  # fmt: skip
    args = parser.parse_args(argv)
    configure("WARNING")
    options = sampling_options(args)
    attached = [attachment(name) for name in args.attach]
    for flag, text in (("--quick", args.quick), ("--system-prompt", args.system_prompt)):
        if text is not None:
            check_text(flag, text)
    if args.thinking:
        options["chat_template_kwargs"] = {"enable_thinking": True}
    model = connect_model(args)
    conversation = Conversation(args.system_prompt, model.context, attached=attached)
    chat = Chat(model, conversation, options)
    try:
        if args.quick is not None:
            chat.ask(args.quick)
        elif is_terminal():
            talk(chat)
        else:
            for question in piped_lines():
                chat.ask(question)
    finally:
        model.close()
    return 0


class Chat:
    """Asks a model and shows its answers.

    Args:
        options: sampling fields and template keywords of every question.
    """

    def __init__(
        self, model: TerminalModel, conversation: Conversation, options: dict[str, Any]
    ) -> None:
        self.model = model
        self.conversation = conversation
        self._options = options

    def ask(self, question: str) -> None:
        """Show the answer as it comes, and keep both; the oldest turns go if the context is full.

        Raises:
            KeyboardInterrupt: Ctrl-C; what came of the answer is kept.
            RequestError: the model refuses.
        """
        report, pieces = AnswerReport(), list[str]()
        try:
            for piece in self._begin(question, report):
                print(piece, end="", flush=True)
                pieces.append(piece)
        finally:
            if pieces:
                print(flush=True)
                self.conversation.add(question, "".join(pieces), report)
        if not pieces:
            print(flush=True)
            self.conversation.add(question, "", report)
        if report.finish_reason == "length" and "max_tokens" not in self._options:
            note("[the answer was cut: the context is full]")

    def _begin(self, question: str, report: AnswerReport) -> Any:
        """The answer's pieces, once its first one has come."""
        conversation = self.conversation
        context = conversation.context or 0
        dropped = conversation.make_room(self._options.get("max_tokens") or context // ROOM)
        while True:
            messages = conversation.messages(question)
            pieces = self.model.chat(messages, report, **self._options)
            try:
                first = next(pieces, "")
            except PromptTooLong:
                if not conversation.drop_oldest():
                    raise
                dropped += 1
                continue
            except RequestError as error:
                name_files(error, conversation, self.model.name)
                raise
            break
        if dropped:
            turns = "turn was" if dropped == 1 else f"{dropped} turns were"
            note(f"[the context is full: the oldest {turns} dropped]")
        return itertools.chain((first,), pieces)


def name_files(error: RequestError, conversation: Conversation, model: str) -> None:
    """Have an error name an attached file in place of a request's field, and say which demo model sees."""

    def file_at(place: re.Match[str]) -> Attachment | None:
        return conversation.attachment_at(int(place[1]), int(place[2]))

    def refused(place: re.Match[str]) -> str:
        found = file_at(place)
        return (
            place[0] if found is None else f"{found.name}: this model takes no {_KINDS[found.kind]}"
        )

    def named(place: re.Match[str]) -> str:
        found = file_at(place)
        return place[0] if found is None else found.name

    told = _PLACE.sub(named, _TYPE.sub(refused, str(error)))
    if told != str(error) and model == demo.NAME:
        told = f"{told}; headrace chat --demo vision sees pictures"
    error.args = (told,)


def talk(chat: Chat) -> None:
    """Read lines from the terminal and answer them until the user ends the chat."""
    note(banner(chat.model))
    reader = LineReader(history_file())
    interrupted = False
    while True:
        try:
            line = reader.read(PROMPT)
            if line.strip() == QUIT:
                return
            _take(chat, line)
            interrupted = False
        except EOFError:
            print()
            return
        except KeyboardInterrupt:
            print()
            if interrupted:
                return
            interrupted = True
            note("[stopped; Ctrl-C again or Ctrl-D ends the chat]")
        except UnicodeDecodeError:
            note("[the line is not UTF-8]")


def _take(chat: Chat, line: str) -> None:
    if not line.strip():
        return
    if dropped := dropped_files(line):
        note(attach_files(chat.conversation, dropped))
        return
    if line.startswith("/"):
        note(run_command(chat.conversation, line))
        return
    try:
        chat.ask(line)
    except (RequestError, QueueFull, GenerateError) as error:
        note(f"[{error}]")
        if chat.conversation.attached:  # what the model refuses would be refused again
            names = ", ".join(each.name for each in chat.conversation.attached)
            note(f"[sent with it, and no longer attached: {names}]")
            chat.conversation.attached.clear()


def banner(model: TerminalModel) -> str:
    """The first lines of a chat: the model, where it runs, and the keys."""
    from headrace import __version__

    context = f"context {model.context} tokens, " if model.context else ""
    lines = [
        f"headrace {__version__}: {model.name} ({context}{model.place})",
        "/help lists the commands; Ctrl-C stops an answer; Ctrl-D ends the chat.",
    ]
    if (skills := demo.skills(model.name)) is not None:
        lines.insert(1, f"{skills} Your own: headrace chat /path/to/checkpoint")
    return "\n".join(lines)
