"""What an unfinished batch has finished: one file that survives a crash at any moment.

Each answer is appended as one line as soon as it is there. A crash can leave half a line at the
end, which is cut off when the file is opened again; everything before it counts. The first line
says what the answers are for: another input or model is refused, not mixed in.
"""

from __future__ import annotations

import fcntl
import os
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from headrace.batch.lines import BatchInput, BatchOutput, encode
from headrace_core.errors import ConfigError

_Form = TypeVar("_Form")


class _Header(msgspec.Struct):
    headrace_batch: int
    """Version of this format."""
    input: str
    """SHA-256 of the input file."""
    model: str


class _Entry(msgspec.Struct):
    line: int
    output: msgspec.Raw


class Journal:
    """The answers so far. Use as a context manager.

    Args:
        path: of the journal; created if absent.
        source: the input that it must be about.
        model: served name and origin of the model.

    Raises:
        ConfigError: it is about something else, is no journal, or cannot be written.
    """

    def __init__(self, path: Path, source: BatchInput, model: str) -> None:
        self.path = path
        self._found: dict[int, tuple[int, int]] = {}
        """Line number of the input -> (offset, length) in the journal."""
        header = _Header(1, source.digest, model)
        try:
            self._file: BinaryIO = path.open("a+b")
            self._lock()
            self._end = self._read(header)
            if self._end == 0:
                self._append(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r}: could not be written: {error.strerror}", field="output_file"
            ) from error
        self.num_resumed = len(self._found)
        """Answers of an earlier run."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        self._file.close()

    def __contains__(self, line: object) -> bool:
        return line in self._found

    def __len__(self) -> int:
        return len(self._found)

    def add(self, line: int, output: BatchOutput) -> None:
        """Keep the answer to a line of the input."""
        data = msgspec.json.encode(_Entry(line, msgspec.Raw(encode(output)))) + b"\n"
        start = self._end
        self._append(data)
        self._found[line] = (start, len(data))

    def write_output(self, path: Path) -> None:
        """Write the answers, in the input's order, to a file that appears when it is whole.

        A link stays and its target is replaced; a device or a pipe is written to.
        """
        path = path.resolve()
        if is_stream(path):
            with path.open("wb") as file:
                self.copy_to(file)
            return
        partial = path.with_name(path.name + ".tmp")
        with partial.open("wb") as file:
            self.copy_to(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def copy_to(self, file: BinaryIO) -> None:
        """Write the answers, in the input's order."""
        for line in sorted(self._found):
            start, length = self._found[line]
            self._file.seek(start)
            entry = msgspec.json.decode(self._file.read(length), type=_Entry)
            file.write(bytes(entry.output) + b"\n")

    def remove(self) -> None:
        """Forget everything: the answers are elsewhere now."""
        self._file.close()
        self.path.unlink(missing_ok=True)

    def _lock(self) -> None:
        """Two runs must not write one journal. The lock ends with the process."""
        try:
            fcntl.flock(self._file.fileno(), fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            self._file.close()
            raise ConfigError(
                f"{str(self.path)!r} is in use: another run of this batch is under way",
                field="output_file",
            ) from None

    def _append(self, data: bytes) -> None:
        # Straight to the system: what was appended outlives this process.
        written = os.write(self._file.fileno(), data)
        while written < len(data):
            written += os.write(self._file.fileno(), data[written:])
        self._end += len(data)

    def _read(self, header: _Header) -> int:
        """Take in what is there; returns where the next line goes."""
        self._end = 0
        self._file.seek(0)
        for raw in self._file:
            if not raw.endswith(b"\n"):  # half a line: the crash
                if self._end == 0 and not msgspec.json.encode(header).startswith(raw):
                    raise _no_journal(self.path)
                break
            if self._end == 0:
                self._check(raw, header)
            else:
                entry = _decode(raw, _Entry, self.path)
                self._found[entry.line] = (self._end, len(raw))
            self._end += len(raw)
        self._file.truncate(self._end)
        return self._end

    def _check(self, raw: bytes, header: _Header) -> None:
        found = _decode(raw, _Header, self.path)
        for name in ("headrace_batch", "input", "model"):
            if getattr(found, name) != getattr(header, name):
                raise ConfigError(
                    f"{str(self.path)!r} holds the answers of an interrupted batch with another "
                    f"{name}; run that one again, or start afresh with --restart",
                    field="output_file",
                )


def is_stream(path: Path) -> bool:
    """True if a path is a device, a pipe or the like, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


def _decode(raw: bytes, kind: type[_Form], path: Path) -> _Form:
    try:
        return msgspec.json.decode(raw, type=kind)
    except (msgspec.DecodeError, UnicodeError) as error:
        raise _no_journal(path) from error


def _no_journal(path: Path) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} exists and is not a journal of a batch; move it away or start afresh with "
        "--restart",
        field="output_file",
    )
