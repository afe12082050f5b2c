"""Runs the lines of a batch: a bounded number at once, each answer kept as soon as it is there."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Callable, Collection, Iterable, Mapping
from dataclasses import dataclass
from typing import Protocol

import msgspec

from headrace.batch.inprocess import InProcessResponse
from headrace.batch.journal import Journal
from headrace.batch.lines import BatchLine, BatchOutput, encode, output_of
from headrace_core.errors import EngineDead
from headrace_server.errors.mapping import ErrorAnswer

logger = logging.getLogger(__name__)

BUSY = frozenset({429, 503})
"""Statuses that say "later": the line waits and is tried again."""
MAX_WAIT = 30.0
DUPLICATE = "duplicate_custom_id"
"""OpenAI's code for a line whose custom_id another line has."""


class Client(Protocol):
    """Whatever answers requests."""

    async def post(self, path: str, body: bytes) -> InProcessResponse: ...


@dataclass
class BatchCounts:
    """Progress of a batch."""

    submitted: int = 0
    completed: int = 0
    failed: int = 0
    """Number of failed requests among the completed."""


class Runner:
    """One run of a batch.

    Args:
        client: answers requests.
        journal: keeps answers; lines in it are left out.
        paths: URLs that lines may ask for.
        repeated: lines that are refused for their custom_id -> lines that had it first.
        concurrency: lines at once.
        check: raises if it makes no sense to go on, because the engine is dead.
        progress: called after each change.
    """

    def __init__(
        self,
        client: Client,
        journal: Journal,
        *,
        paths: Collection[str],
        repeated: Mapping[int, int] | None = None,
        concurrency: int,
        check: Callable[[], None],
        progress: Callable[[BatchCounts], None] = lambda counts: None,
    ) -> None:
        self._client = client
        self._journal = journal
        self._paths = paths
        self._repeated = repeated or {}
        self._slots = asyncio.Semaphore(concurrency)
        self._check = check
        self._progress = progress
        self.counts = BatchCounts()

    async def run(self, lines: Iterable[tuple[int, BatchLine]]) -> BatchCounts:
        """Answer every line that has no answer yet.

        Raises:
            EngineDead: the engine stopped; what was answered until then is kept.
        """
        try:
            async with asyncio.TaskGroup() as group:
                for number, line in lines:
                    if number in self._journal:
                        continue
                    await self._slots.acquire()
                    group.create_task(self._one(number, line))
                    self.counts.submitted += 1
                    self._progress(self.counts)
        except BaseExceptionGroup as errors:
            raise _first(errors) from None
        return self.counts

    async def _one(self, number: int, line: BatchLine) -> None:
        try:
            output = await self._answer(number, line)
        finally:
            self._slots.release()
        self._journal.add(number, encode(output))
        self.counts.completed += 1
        self.counts.failed += output.failed
        self._progress(self.counts)

    async def _answer(self, number: int, line: BatchLine) -> BatchOutput:
        refused = self._refusal(number, line)
        if refused is not None:
            return output_of(line, 400, "", refused.encoded())
        wait = 0.1
        while True:
            answer = await self._client.post(line.url, bytes(line.body))
            self._check()
            if answer.status not in BUSY:
                break
            wait = min(MAX_WAIT, max(2 * wait, _retry_after(answer)))
            await asyncio.sleep(wait)
        name = answer.headers.get("x-request-id", "")
        return output_of(line, answer.status, name, answer.body)

    def _refusal(self, number: int, line: BatchLine) -> ErrorAnswer | None:
        if (first := self._repeated.get(number)) is not None:
            return ErrorAnswer(
                400,
                f"line {number}: custom_id = {line.custom_id[:100]!r}: must differ from that of line "
                f"{first}",
                "custom_id",
                code=DUPLICATE,
            )
        if line.method != "POST":
            return ErrorAnswer(400, f"method = {line.method[:16]!r}: must be 'POST'", "method")
        if line.url not in self._paths:
            accepted = f"must be one of {sorted(self._paths)}"
            return ErrorAnswer(400, f"url = {line.url[:200]!r}: {accepted}", "url")
        return _unlinelike(bytes(line.body))


def _unlinelike(body: bytes) -> ErrorAnswer | None:
    """The refusal of a body whose answer would not be a line of JSON; the route judges the rest."""
    try:
        form = msgspec.json.decode(body, type=_StreamFields)
    except (msgspec.DecodeError, msgspec.ValidationError, UnicodeError, RecursionError):
        return None
    if form.stream is True:
        return ErrorAnswer(400, "stream = True: a batch has no streams; leave it out", "stream")
    if form.encoding_format in ("bytes", "bytes_only"):
        said = f"encoding_format = {form.encoding_format!r}: a batch has JSON only; use 'base64'"
        return ErrorAnswer(400, said, "encoding_format")
    return None


class _StreamFields(msgspec.Struct):
    stream: object = False
    encoding_format: object = None


def _retry_after(answer: InProcessResponse) -> float:
    text = answer.headers.get("retry-after", "")
    return float(text) if text.isascii() and text.isdigit() else 0.0


def _first(errors: BaseExceptionGroup[BaseException]) -> BaseException:
    """The error that explains a group: the engine's death before all others."""
    leaves = [e for e in errors.exceptions if not isinstance(e, BaseExceptionGroup)]
    dead = next((e for e in leaves if isinstance(e, EngineDead)), None)
    return dead or next(iter(leaves), errors)
