"""Prompts and media that are embeddings: from a tensor, or a file's bytes, to checked rows.

A tensor that the caller of the offline API made is looked at here. Bytes are never: what a client sent
is read in a process that can be killed (:mod:`headrace_engine.input_processing.embeds_worker`), with
limits on its time and memory, and only plain rows come back.
"""

from __future__ import annotations

import threading

import msgspec

from headrace_core.errors import RequestError
from headrace_core.reliability.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong
from headrace_core.request import EMBEDS_DTYPES, PromptEmbeds

DECODE_SECONDS = 10.0
"""Wall-clock limit of reading one prompt."""
START_SECONDS = 120.0
"""Wall-clock limit of starting the process, which imports torch."""
PROMPT_FIELD = "prompt_embeds"
FILE_OVERHEAD = 1 << 16
"""Bytes that a file may take beyond its numbers."""


class EmbedsDecodeJob(msgspec.Struct, frozen=True, tag=True):
    """A file of rows that the process reads."""

    data: bytes
    hidden_size: int
    dtype: str


class NumbersDecodeJob(msgspec.Struct, frozen=True, tag=True):
    """A file of a few whole numbers that the process reads."""

    data: bytes


Job = EmbedsDecodeJob | NumbersDecodeJob


class EmbedsRows(msgspec.Struct, frozen=True):
    """The process's answer: rows, or why there are none."""

    num_tokens: int = 0
    data: bytes = b""
    numbers: list[int] = []
    error: str = ""


class EmbedsDecoder:
    """Checks rows for one model. Thread-safe.

    Args:
        hidden_size: numbers of a row.
        dtype: the activations'.
        max_tokens: rows of the longest prompt.
    """

    def __init__(self, hidden_size: int, dtype: str, max_tokens: int) -> None:
        self._hidden_size, self._dtype = hidden_size, dtype
        largest = max(EMBEDS_DTYPES.values())
        self.max_bytes = max_tokens * hidden_size * largest + FILE_OVERHEAD
        """Longest file that is looked at."""
        self._worker = EmbedsWorker(self.max_bytes)

    def decode(self, value: object) -> PromptEmbeds:
        """Rows of a prompt, in the activations' dtype; see :meth:`rows`."""
        rows = self.rows(value, PROMPT_FIELD)
        return PromptEmbeds.of(self._dtype, rows.num_tokens, self._hidden_size, rows.data)

    def rows(self, value: object, where: str) -> EmbedsRows:
        """Checked rows, in the activations' dtype.

        Args:
            value: a torch tensor, or the bytes of a file that holds one; see
                :class:`~headrace_core.request.EmbedsPrompt`.
            where: the field, for messages.

        Raises:
            RequestError: it is no such tensor, or of another shape, or not finite.
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            data = self._bounded(bytes(value), where)
            rows = self._worker.decode(EmbedsDecodeJob(data, self._hidden_size, self._dtype))
        elif type(value).__module__.partition(".")[0] == "torch":
            from headrace_engine.input_processing.embeds_worker import checked_rows

            rows = checked_rows(value, self._hidden_size, self._dtype)
        else:
            raise _refused(
                where,
                f"{type(value).__name__} {value!r:.40}; must be a torch tensor [num_tokens, "
                f"{self._hidden_size}], or the bytes of a file of torch.save or safetensors",
            )
        if rows.error:
            raise _refused(where, rows.error)
        return rows

    def numbers(self, data: bytes, where: str, name: str) -> list[int]:
        """The whole numbers of a file that holds one small tensor of them.

        Args:
            name: of the numbers, for messages.

        Raises:
            RequestError: it holds something else.
        """
        read = self._worker.decode(NumbersDecodeJob(self._bounded(data, where)))
        if read.error:
            raise _refused(where, f"{name}: {read.error}")
        return read.numbers

    def close(self) -> None:
        """End the process, if there is one."""
        self._worker.close()

    def _bounded(self, data: bytes, where: str) -> bytes:
        if len(data) > self.max_bytes:
            raise _refused(
                where, f"{len(data)} bytes; at most {self.max_bytes}, which the whole context takes"
            )
        return data


class EmbedsWorker:
    """One child process that reads files, replaced when it had to be killed. Thread-safe.

    Args:
        max_bytes: longest file; bounds the process's memory.
        seconds: limit of one reading.
    """

    def __init__(self, max_bytes: int, seconds: float = DECODE_SECONDS) -> None:
        self._seconds = seconds
        self._lock = threading.Lock()
        self._process = SandboxProcess(
            "headrace_engine.input_processing.embeds_worker",
            str(max_bytes),
            start_seconds=START_SECONDS,
        )

    def decode(self, job: Job) -> EmbedsRows:
        """Have a file read; what the process could not survive is an error, too."""
        message = msgspec.msgpack.encode(job)
        with self._lock:
            try:
                answer = self._process.ask(message, self._seconds)
                return msgspec.msgpack.decode(answer, type=EmbedsRows)
            except TookTooLong:
                return EmbedsRows(error="reading the file took too long")
            except (ProcessEnded, msgspec.MsgspecError):
                self._process.kill()
                return EmbedsRows(
                    error="reading the file failed: it is damaged, or needs too much memory"
                )

    def close(self) -> None:
        """End the process."""
        with self._lock:
            self._process.kill()


def _refused(where: str, reason: str) -> RequestError:
    return RequestError(f"{where}: {reason}", param=where)
