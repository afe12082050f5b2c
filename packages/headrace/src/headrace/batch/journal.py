"""Journal of the finished requests of an unfinished batch: one file that survives a crash at any moment.

Each answer is appended as one line as soon as it is there. A crash can leave half a line at the
end, which is cut off when the file is opened again; everything before it counts. The first line
says what the answers are for: another input or model is refused, not mixed in.
"""

from __future__ import annotations

import fcntl
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import BinaryIO, TypeVar

import msgspec

from headrace.batch.lines import BatchInput
from headrace.disk import naming
from headrace_core.errors import ConfigError

_Form = TypeVar("_Form")


class _Header(msgspec.Struct, omit_defaults=True):
    headrace_batch: int
    """Version of this format."""
    input: str
    """SHA-256 of the input file."""
    model: str
    options: str = ""
    """Other options that the answers depend on, as text."""


class _JournalLine(msgspec.Struct):
    line: int
    output: msgspec.Raw


class Journal:
    """The answers so far. Use as a context manager.

    Args:
        path: of the journal; created if absent.
        source: the input that it must be about.
        model: served name and origin of the model.
        options: other options that the answers depend on, in any stable form.
        field: option that names the output, for errors.

    Raises:
        ConfigError: it is about something else, is not a journal, or cannot be written.
    """

    def __init__(
        self,
        path: Path,
        source: BatchInput,
        model: str,
        options: str = "",
        *,
        field: str = "output_file",
    ) -> None:
        self.path = path
        self._field = field
        self._found: dict[int, tuple[int, int]] = {}
        """Line number of the input -> (offset, length) in the journal."""
        header = _Header(1, source.digest, model, options)
        try:
            self._file: BinaryIO = path.open("a+b")
            self._lock()
            self._end = self._read(header)
            if self._end == 0:
                self._append(msgspec.json.encode(header) + b"\n")
        except OSError as error:
            raise ConfigError(
                f"{str(path)!r}: could not be written: {error.strerror}", field=field
            ) from error
        self.num_resumed = len(self._found)
        """Answers of an earlier run."""

    def __enter__(self) -> Journal:
        return self

    def __exit__(self, *_: object) -> None:
        if not self._found and not self._file.closed:
            self.remove()  # nothing to go on from: a model that could not be loaded, say
        self._file.close()

    def __contains__(self, line: object) -> bool:
        return line in self._found

    def __len__(self) -> int:
        return len(self._found)

    def add(self, line: int, output: bytes) -> None:
        """Keep the answer to a line of the input: JSON, without the line's end."""
        data = msgspec.json.encode(_JournalLine(line, msgspec.Raw(output))) + b"\n"
        start = self._end
        self._append(data)
        self._found[line] = (start, len(data))

    def write_output(self, path: Path) -> None:
        """Write the answers, in the input's order, to a file that appears when it is whole.

        A link stays and its target is replaced; a device or a pipe is written to.
        """
        if is_stream(path):  # as it was named: /dev/stdout leads to a name that cannot be opened
            with naming(path), path.open("wb") as file:
                self.copy_to(file)
            return
        path = path.resolve()
        partial = path.with_name(path.name + ".tmp")
        with naming(partial), partial.open("wb") as file:
            self.copy_to(file)
            file.flush()
            os.fsync(file.fileno())
        partial.replace(path)

    def copy_to(self, file: BinaryIO) -> None:
        """Write the answers, in the input's order."""
        for output in self.outputs():
            file.write(output + b"\n")

    def outputs(self) -> Iterator[bytes]:
        """The answers, in the input's order."""
        for line in sorted(self._found):
            start, length = self._found[line]
            self._file.seek(start)
            entry = msgspec.json.decode(self._file.read(length), type=_JournalLine)
            yield bytes(entry.output)

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
                field=self._field,
            ) from None

    def _append(self, data: bytes) -> None:
        # Straight to the system: what was appended outlives this process.
        with naming(self.path):
            written = os.write(self._file.fileno(), data)
            while written < len(data):
                written += os.write(self._file.fileno(), data[written:])
        self._end += len(data)

    def _read(self, header: _Header) -> int:
        """Take in what is there; returns where the next line goes."""
        self._end = 0
        self._file.seek(0)
        another = None
        for raw in self._file:
            if not raw.endswith(b"\n"):  # half a line: the crash
                if self._end == 0 and not msgspec.json.encode(header).startswith(raw):
                    raise _no_journal(self.path, self._field)
                break
            if self._end == 0:
                another = _difference(self._decode(raw, _Header), header)
            elif another is not None:
                raise ConfigError(
                    f"{str(self.path)!r} holds the answers of an interrupted batch with {another}; run "
                    f"that batch again, or start over with --restart",
                    field=self._field,
                )
            else:
                entry = self._decode(raw, _JournalLine)
                self._found[entry.line] = (self._end, len(raw))
            self._end += len(raw)
        if another is not None:  # it left no answers
            self._end = 0
        self._file.truncate(self._end)
        return self._end

    def _decode(self, raw: bytes, kind: type[_Form]) -> _Form:
        try:
            return msgspec.json.decode(raw, type=kind)
        except (msgspec.DecodeError, UnicodeError) as error:
            raise _no_journal(self.path, self._field) from error


def journal_beside(
    output: str, folder: Path, field: str = "output_file", source: str | None = None
) -> Path:
    """The path of a local output's journal: ``OUTPUT.partial`` beside it.

    Args:
        output: as the user typed it. Of a link it is the target that counts.
        folder: temporary one, for the journal of a device or a pipe.
        field: option that named the output, for errors.
        source: the file of the requests, which the output must not replace.

    Raises:
        ConfigError: the output is a folder, the source, or a link that leads nowhere; or its folder does
            not exist.
    """
    if is_stream(Path(output)):
        return folder / "journal"
    try:
        path = Path(output).resolve()
    except (OSError, RuntimeError) as error:  # a loop of links is a RuntimeError
        raise ConfigError(
            f"{field} = {output!r}: is a link that leads nowhere", field=field
        ) from error
    if source is not None and Path(source).exists() and path.exists() and path.samefile(source):
        raise ConfigError(
            f"{field} = {output!r}: is the input file, and would overwrite it; choose another file",
            field=field,
        )
    if path.is_dir():
        raise ConfigError(f"{field} = {output!r}: is a folder; must be a file", field=field)
    if not path.parent.is_dir():
        raise ConfigError(f"{field} = {output!r}: its folder does not exist", field=field)
    return path.with_name(path.name + ".partial")


def is_stream(path: Path) -> bool:
    """True if a path is a device, a pipe or the like, which must not be replaced by a file."""
    return path.exists() and not path.is_file() and not path.is_dir()


_SAID: Mapping[str, str] = {
    "headrace_batch": "another format",
    "input": "another input",
    "model": "another model",
    "options": "other options",
}


def _difference(found: _Header, wanted: _Header) -> str | None:
    """Name the first difference between two headers; None: they are equal."""
    for name, said in _SAID.items():
        if getattr(found, name) != getattr(wanted, name):
            return said
    return None


def _no_journal(path: Path, field: str) -> ConfigError:
    return ConfigError(
        f"{str(path)!r} exists and is not a journal of a batch; move it away or start afresh with "
        "--restart",
        field=field,
    )
