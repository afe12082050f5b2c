"""Log lines: as text for people, as JSON for whatever collects logs; and written by a thread, so that
nobody waits.

Here, and not with the command line, because processes of the engine's own write such lines too.
"""

from __future__ import annotations

import datetime
import io
import json
import logging
import os
import queue
import threading
import time
from typing import TextIO

from headrace_core.context import MODEL

MAX_WAITING = 10_000
"""Lines that may wait for whoever reads the log."""
LAST_LINES = 1.0
"""Seconds that the end of a process waits for them."""

EXTRA = ("request_id",)
"""Attributes of a record that become fields of their own, where they are set."""

COLOURS = {"DEBUG": 2, "WARNING": 33, "ERROR": 31, "CRITICAL": 31}
"""Level -> code of ECMA-48's SGR; INFO is left alone."""


class LineFormatter(logging.Formatter):
    """Level, time, the model if a process has several, place, message; continuation lines get the
    prefix, too.

    Args:
        colour: mark levels, for a terminal.
        process: named in each line; empty: there is one process only.
    """

    def __init__(self, colour: bool = False, process: str = "") -> None:
        which = f"({process}) " if process else ""
        super().__init__(
            f"%(levelname)s %(asctime)s {which}%(of_model)s[%(name)s:%(lineno)d] %(message)s",
            "%m-%d %H:%M:%S",
        )
        self.colour = colour

    def format(self, record: logging.LogRecord) -> str:
        record.of_model = f"({MODEL.get()}) " if MODEL.get() else ""
        text = super().format(record)
        first, *rest = text.split("\n")
        prefix = first[: first.find("] ") + 2]
        lines = [first, *(prefix + line for line in rest)]
        code = COLOURS.get(record.levelname) if self.colour else None
        if code is not None:
            size = len(record.levelname)
            lines = [f"\x1b[{code}m{line[:size]}\x1b[0m{line[size:]}" for line in lines]
        return "\n".join(lines)


def log_block(logger: logging.Logger, title: str, block: str, short: str | None = None) -> None:
    """Log, at INFO, several lines as one; as they are if the logger is enabled for DEBUG.

    Args:
        title: what the block is.
        short: in place of the block's lines, joined.
    """
    if logger.isEnabledFor(logging.DEBUG):
        logger.info("%s:\n%s", title, block, stacklevel=2)
    else:
        logger.info("%s: %s", title, short or one_line(block), stacklevel=2)


def one_line(block: str) -> str:
    """The lines of a block joined by semicolons, each without the spaces that align it."""
    return "; ".join(" ".join(line.split()) for line in block.splitlines())


class JsonLines(logging.Formatter):
    """``{"time": RFC 3339 in UTC, "level", "logger", "line", "message"}``, and ``request_id``,
    ``model_name``, ``error`` (a stack) where there is one. Line breaks within stay within the line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "line": record.lineno,
            "process": record.process,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        if MODEL.get():
            fields["model_name"] = MODEL.get()
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


class ThreadedHandler(logging.Handler):
    """Writes lines in a thread of its own. A log that nobody reads (a full pipe, a slow disk) stops
    neither requests nor steps: lines are dropped then, and counted; the count is the next line.

    Args:
        stream: where lines go.
        max_waiting: lines kept for it.
    """

    def __init__(self, stream: TextIO, max_waiting: int = MAX_WAITING) -> None:
        super().__init__()
        self.num_dropped = 0
        """Since the start."""
        self.stream = stream
        self._file = _own_file(stream)
        """Descriptor that lines go to if the stream is a file: past its buffer, whose lock would be held by
        a write that hangs, and which Python flushes before a process may end."""
        self._lines: queue.Queue[str | None] = queue.Queue(max_waiting)
        self._told = 0
        self._thread = threading.Thread(target=self._write_all, name="headrace-log", daemon=True)
        self._thread.start()

    def emit(self, record: logging.LogRecord) -> None:
        """Queue a line, or drop it."""
        try:
            self.put(self.format(record) + "\n")
        except Exception:
            self.handleError(record)

    def put(self, text: str) -> None:
        """Queue text as it is, or drop it."""
        try:
            self._lines.put_nowait(text)
        except queue.Full:
            self.num_dropped += 1

    def flush(self) -> None:
        """Wait until what was logged is written; not longer than :data:`LAST_LINES`."""
        deadline = time.monotonic() + LAST_LINES
        while self._lines.unfinished_tasks and time.monotonic() < deadline:
            time.sleep(0.001)

    def close(self) -> None:
        """Write what waits, for a moment, and end the thread."""
        self.flush()
        try:
            self._lines.put_nowait(None)
        except queue.Full:  # it hangs in a write, and ends with the process
            pass
        else:
            self._thread.join(LAST_LINES)
        if self._file is not None and not self._thread.is_alive():
            os.close(self._file)
            self._file = None
        super().close()

    def _write_all(self) -> None:
        while (text := self._lines.get()) is not None:
            self._write(text)
            self._lines.task_done()
        self._lines.task_done()

    def _write(self, text: str) -> None:
        try:
            if self.num_dropped > self._told:
                missing, self._told = self.num_dropped - self._told, self.num_dropped
                record = logging.LogRecord(
                    __name__, logging.WARNING, __file__, 0,
                    "%d log lines were dropped: nobody read the log", (missing,), None,
                )  # fmt: skip
                text = f"{self.format(record)}\n{text}"
            self._put(text)
        except (OSError, ValueError):  # the disk is full, or the stream closed
            self.num_dropped += 1

    def _put(self, text: str) -> None:
        if self._file is None:
            self.stream.write(text)
            self.stream.flush()
            return
        data = text.encode(self.stream.encoding or "utf-8", "backslashreplace")
        while data:
            data = data[os.write(self._file, data) :]


class QueuedText(io.TextIOBase):
    """Stands for ``sys.stdout`` or ``sys.stderr``: what is printed goes the way of a handler's lines.

    A print, a warning or a traceback to a pipe that nobody reads would hold its thread for ever;
    and with it the stream's lock, for which Python waits before a process may end.

    Args:
        stream: the one that it stands for.
        handler: writes to that stream.
    """

    def __init__(self, stream: TextIO, handler: ThreadedHandler) -> None:
        self._stands_for = stream
        self._handler = handler

    @property
    def encoding(self) -> str:  # type: ignore[override]
        return self._stands_for.encoding

    @property
    def errors(self) -> str | None:  # type: ignore[override]
        return self._stands_for.errors

    def write(self, text: str) -> int:
        self._handler.put(text)
        return len(text)

    def flush(self) -> None:
        """Nothing waits; the process writes at its end what is left, for a moment."""

    def writable(self) -> bool:
        return True

    def isatty(self) -> bool:
        return self._stands_for.isatty()

    def fileno(self) -> int:
        return self._stands_for.fileno()

    def close(self) -> None:
        """Stays open, as its stream does."""


def _own_file(stream: TextIO) -> int | None:
    """A descriptor of our own for a stream's file; None: it has none."""
    try:
        stream.flush()
        return os.dup(stream.fileno())
    except (OSError, ValueError, AttributeError):
        return None


def writes_json(name: str) -> bool:
    """True if lines of this logger come out as JSON now."""
    return any(isinstance(each, JsonLines) for each in _formatters(name))


def writes_colours(name: str) -> bool:
    """True if this logger's lines are written with colours at present."""
    return any(isinstance(each, LineFormatter) and each.colour for each in _formatters(name))


def _formatters(name: str) -> list[logging.Formatter | None]:
    """Formatters of the nearest handlers that a logger's lines reach."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if logger.handlers:
            return [handler.formatter for handler in logger.handlers]
        logger = logger.parent if logger.propagate else None
    return []
