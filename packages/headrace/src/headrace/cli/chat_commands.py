"""The commands of a chat in the terminal: lines that begin with a slash."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

from headrace.cli.attachments import attachment, split
from headrace.cli.conversation import Conversation
from headrace.suggestions import near_names
from headrace_core.errors import RequestError

QUIT = "/quit"
HELP = "/help"


class Command(NamedTuple):
    """A command of the chat, such as ``/help``."""

    argument: str
    """Name of its argument, empty if it takes none."""
    description: str
    run: Callable[[Conversation, str], str]
    """Runs the command; returns the text to show."""


def run_command(conversation: Conversation, line: str) -> str:
    """Run the command of a line that begins with a slash; returns the text to show."""
    name, _, argument = line.strip().partition(" ")
    argument = argument.strip()
    if name == HELP:
        return help_text()
    command = COMMANDS.get(name)
    if command is None:
        near = near_names(name, [*COMMANDS, HELP, QUIT], 1)
        hint = f"; did you mean {near[0]}?" if near else ""
        if "/" in name[1:]:
            return (
                f"{name} is neither a command nor a file that can be attached.\n"
                "A message that begins with a slash needs a space in front."
            )
        names = ", ".join([HELP, *COMMANDS, QUIT])
        return (
            f"unknown command {name}{hint}\ncommands: {names}\n"
            "A message that begins with a slash needs a space in front."
        )
    if argument and not command.argument:
        return f"{name} takes no argument"
    return command.run(conversation, argument)


def help_text() -> str:
    """All commands and keys."""
    rows = [(HELP, "show this list")]
    rows += [(f"{n} {c.argument}".rstrip(), c.description) for n, c in COMMANDS.items()]
    rows += [
        (QUIT, "end the chat"),
        ("Ctrl-C", "stop the answer; twice: end the chat"),
        ("Ctrl-D", "end the chat"),
        ("Up, Down", "earlier lines"),
        ("a file's name", "attach it: drop a picture on the terminal"),
    ]
    width = max(len(name) for name, _ in rows)
    return "\n".join(f"  {name:<{width}}  {text}" for name, text in rows)


def _clear(conversation: Conversation, argument: str) -> str:
    conversation.clear()
    return "the conversation begins anew" + (
        "; the system prompt stays" if conversation.system else ""
    )


def _system(conversation: Conversation, argument: str) -> str:
    conversation.system = argument or None
    return "the system prompt is set" if argument else "the system prompt is removed"


def _save(conversation: Conversation, argument: str) -> str:
    if not argument:
        return "/save needs the name of a file that does not exist yet"
    path = Path(argument).expanduser()
    try:
        conversation.save(path)
    except OSError as error:
        return f"{path} was not written: {error.strerror}"
    return f"saved to {path}"


def attach(conversation: Conversation, argument: str) -> str:
    """Attach files to the next question; returns the text to show."""
    if not argument:
        return "/attach needs the name of a picture, a recording or a clip"
    return attach_files(conversation, split(argument))


def attach_files(conversation: Conversation, names: Sequence[str]) -> str:
    """Attach each file that can be; returns the text to show."""
    told = []
    for name in names:
        try:
            found = attachment(name)
        except RequestError as error:
            told.append(str(error))
            continue
        conversation.attached.append(found)
        told.append(f"{found.name} goes with your next question")
    return "\n".join(told)


COMMANDS: Mapping[str, Command] = {
    "/attach": Command(
        "FILE", "send a picture, a recording or a clip with the next question", attach
    ),
    "/clear": Command("", "forget the conversation; the system prompt stays", _clear),
    "/system": Command("TEXT", "set the system prompt; without TEXT: remove it", _system),
    "/save": Command("FILE", "write the messages to a new file, as JSON", _save),
}
"""Commands that work on the conversation."""
