"""Prompts that are embeddings: from a tensor, or a file's bytes, to checked rows.

A tensor that the caller of the offline API made is looked at here. Bytes are never: what a client sent
is read in a process that can be killed (:mod:`headrace_engine.input_processing.embeds_worker`), with
limits on its time and memory, and only plain rows come back.
"""

from __future__ import annotations

import threading

import msgspec

from headrace_core.errors import RequestError
from headrace_core.request import EMBEDS_DTYPES, PromptEmbeds
from headrace_core.sandbox_process import ProcessEnded, SandboxProcess, TookTooLong
from headrace_core.served_model import ServedModel

DECODE_SECONDS = 10.0
"""Wall-clock limit of reading one prompt."""
START_SECONDS = 120.0
"""Wall-clock limit of starting the process, which imports torch."""
FILE_OVERHEAD = 1 << 16
"""Bytes that a file may take beyond its numbers."""


class EmbedsDecodeJob(msgspec.Struct, frozen=True):
    """A file that the process reads."""

    data: bytes
    hidden_size: int
    dtype: str


class EmbedsRows(msgspec.Struct, frozen=True):
    """The process's answer: rows, or why there are none."""

    num_tokens: int = 0
    data: bytes = b""
    error: str = ""


class EmbedsDecoder:
    """Checks prompts of one model. Thread-safe.

    Args:
        model: whose hidden size, dtype and context the rows must fit.
    """

    def __init__(self, model: ServedModel) -> None:
        self._hidden_size, self._dtype = model.hidden_size, model.dtype
        largest = max(EMBEDS_DTYPES.values())
        self.max_bytes = model.max_model_len * model.hidden_size * largest + FILE_OVERHEAD
        """Longest file that is looked at."""
        self._worker = EmbedsWorker(self.max_bytes)

    def decode(self, value: object) -> PromptEmbeds:
        """Rows of a prompt, in the activations' dtype.

        Args:
            value: a torch tensor, or the bytes of a file that holds one; see
                :class:`~headrace_core.request.EmbedsPrompt`.

        Raises:
            RequestError: it is no such tensor, or of another shape, or not finite.
        """
        if isinstance(value, (bytes, bytearray, memoryview)):
            rows = self._read(bytes(value))
        elif type(value).__module__.partition(".")[0] == "torch":
            from headrace_engine.input_processing.embeds_worker import checked_rows

            rows = checked_rows(value, self._hidden_size, self._dtype)
        else:
            raise _refused(
                f"a {type(value).__name__}; must be a torch tensor [num_tokens, "
                f"{self._hidden_size}], or the bytes of a file of torch.save or safetensors"
            )
        if rows.error:
            raise _refused(rows.error)
        return PromptEmbeds.of(self._dtype, rows.num_tokens, self._hidden_size, rows.data)

    def close(self) -> None:
        """End the process, if there is one."""
        self._worker.close()

    def _read(self, data: bytes) -> EmbedsRows:
        if len(data) > self.max_bytes:
            raise _refused(
                f"{len(data)} bytes; at most {self.max_bytes}, which the whole context takes"
            )
        return self._worker.decode(EmbedsDecodeJob(data, self._hidden_size, self._dtype))


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

    def decode(self, job: EmbedsDecodeJob) -> EmbedsRows:
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


def _refused(reason: str) -> RequestError:
    return RequestError(f"prompt_embeds: {reason}", param="prompt_embeds")
