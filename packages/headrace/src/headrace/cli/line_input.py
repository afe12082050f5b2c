"""Lines from a terminal, with editing and a history that lasts."""

from __future__ import annotations

import contextlib
import os
import sys
from pathlib import Path
from typing import Any

MAX_HISTORY = 1000
"""Lines that the history file keeps."""


def history_file() -> Path:
    """File of the lines of earlier chats (XDG Base Directory Specification, state data)."""
    state = os.environ.get("XDG_STATE_HOME") or "~/.local/state"
    return Path(state).expanduser() / "headrace" / "chat-history"


class LineReader:
    """Reads lines that the user edits with the keys of GNU readline, where Python has it.

    Args:
        history: file of earlier lines, made with mode 0600; without it lines are not kept.
    """

    def __init__(self, history: Path | None) -> None:
        self._readline = _readline()
        self._history = history
        if self._readline is not None:
            self._readline.set_auto_history(False)
            if history is not None:
                self._open_history(history)

    def read(self, prompt: str) -> str:
        """One line.

        Raises:
            EOFError: Ctrl-D on an empty line, or the terminal is gone.
            KeyboardInterrupt: Ctrl-C.
        """
        line = input(prompt)
        if line.strip():
            self._keep(line)
        return line

    def _open_history(self, path: Path) -> None:
        try:
            path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
            with os.fdopen(os.open(path, os.O_RDONLY | os.O_CREAT, 0o600)) as file:
                os.fchmod(file.fileno(), 0o600)
            self._readline.read_history_file(path)
            self._readline.set_history_length(MAX_HISTORY)
        except OSError as error:
            print(f"[lines are not kept: {path}: {error.strerror}]", file=sys.stderr)
            self._history = None

    def _keep(self, line: str) -> None:
        if self._readline is None:
            return
        self._readline.add_history(line)
        if self._history is not None:
            with contextlib.suppress(OSError):  # a full disk ends no conversation
                self._readline.append_history_file(1, self._history)


def _readline() -> Any:
    """The module, None where this Python was built without it or on another library's calls."""
    try:
        import readline
    except ImportError:
        return None
    return readline if hasattr(readline, "append_history_file") else None
