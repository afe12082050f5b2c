"""A command in a terminal of its own: a pty, keys, and what is shown."""

from __future__ import annotations

import contextlib
import os
import pty
from collections.abc import Iterator
from pathlib import Path

from forks import READ_LATE, fork_server, own_variables
from servers import WatchedCommand

from headrace_testing.waiting import wait_until

CTRL_C, CTRL_D, CTRL_P = "\x03", "\x04", "\x10"


class Terminal(WatchedCommand):
    """``headrace WORDS`` in a pty."""

    def __init__(self, *words: str, **environment: str) -> None:
        self._keys, screen = pty.openpty()
        own = own_variables({"TERM": "xterm", **environment})
        assert own.keys() <= READ_LATE, own
        streams = [screen, screen, screen]
        process = fork_server(os.getpid()).start(words, streams, own, has_terminal=True)
        os.close(screen)
        self._seen = 0
        super().__init__(process, _shown_on(self._keys))

    def __exit__(self, *reason):
        super().__exit__(*reason)
        os.close(self._keys)

    def press(self, keys: str) -> None:
        """Type; a line ends with a line break."""
        os.write(self._keys, keys.encode())

    def waits(self) -> None:
        """Wait until the command sleeps, for a key after the prompt that was shown.

        A prompt is on the screen before ``select`` listens for keys and signals: a Ctrl-C in between
        would be seen with the next key only.
        """
        stat = Path(f"/proc/{self.process.pid}/stat")
        wait_until(lambda: self.has_ended or stat.read_text().rpartition(")")[2].split()[0] == "S")

    def shows(self, text: str) -> str:
        """Wait until a text is shown, after the one waited for before; returns all that came up to it."""
        wait_until(
            lambda: text in self.text[self._seen :] or self.has_ended,
            what=f"{text!r} is not in {self.text[self._seen :]!r}",
        )
        new = self.text[self._seen :]
        assert text in new, new
        end = new.index(text) + len(text)
        self._seen += end
        return new[:end]


def _shown_on(screen: int) -> Iterator[str]:
    with contextlib.suppress(OSError):  # the other end is closed
        while data := os.read(screen, 4096):
            yield data.decode(errors="replace").replace("\r\n", "\n")
