"""The HTTP processes of one server: what one of them asks the others.

Connections of one port are spread over processes that share nothing. What a client or an operator asks
of the server as a whole (its metrics, its load, a pause) the process that was asked asks of the
others: over sockets in a private folder, one line of JSON there, one answer of JSON back.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Mapping
from pathlib import Path
from typing import Any

import msgspec
from starlette.exceptions import HTTPException

logger = logging.getLogger(__name__)

ANSWER_SECONDS = 2.0
"""Seconds that a peer may take for a question that it can answer at once."""

Answers = Mapping[str, Callable[[Mapping[str, Any]], Awaitable[Any]]]
"""Question -> what answers it, from the question's words."""


class PeerSilent(HTTPException):
    """A peer lives and gave no answer; what needs all of them is a 503."""

    def __init__(self, rank: int, question: str, error: BaseException) -> None:
        logger.warning("HTTP process %d gave no answer to %r: %r", rank, question, error)
        super().__init__(503, f"HTTP process {rank} of this server gave no answer; try again")


class Peers:
    """The other HTTP processes, as one of them sees them.

    Args:
        folder: private; holds one socket for each process.
        rank: which one this is, from 0.
        count: how many there are.
    """

    def __init__(self, folder: Path, rank: int, count: int) -> None:
        self.rank, self.count = rank, count
        self.folder = folder

    @contextlib.asynccontextmanager
    async def answering(self, answers: Answers) -> AsyncIterator[None]:
        """Answer questions for the time of the block."""

        async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
            with contextlib.suppress(OSError, asyncio.IncompleteReadError):
                writer.write(await _answer(answers, await reader.readline()))
                await writer.drain()
            writer.close()

        path = self._path(self.rank)
        path.unlink(missing_ok=True)  # of one that was killed
        server = await asyncio.start_unix_server(serve, path)
        try:
            yield
        finally:
            server.close()
            path.unlink(missing_ok=True)

    async def ask(
        self, question: str, *, seconds: float | None = ANSWER_SECONDS, **words: Any
    ) -> list[Any]:
        """Ask all others at once; the answers of those that are there, by rank.

        Args:
            seconds: longest wait; None: as long as it takes.
            words: of the question; plain data.

        Raises:
            PeerSilent: one is there and gave no answer, or failed.
        """
        others = [rank for rank in range(self.count) if rank != self.rank]
        line = msgspec.json.encode({"question": question, **words}) + b"\n"
        replies = await asyncio.gather(
            *(self._ask_one(rank, line, seconds) for rank in others), return_exceptions=True
        )
        for rank, reply in zip(others, replies, strict=True):
            if isinstance(reply, BaseException):
                raise PeerSilent(rank, question, reply) from reply
        return [msgspec.json.decode(reply) for reply in replies if isinstance(reply, bytes)]

    async def _ask_one(self, rank: int, line: bytes, seconds: float | None) -> bytes | None:
        """One's answer; None if it is not there."""
        async with asyncio.timeout(seconds):
            reply = await self._connect_and_ask(rank, line)
            if reply == b"":  # one that fell while it answered is not there at the second look
                reply = await self._connect_and_ask(rank, line)
        if reply == b"":
            raise ConnectionError("the connection ended")
        return reply

    async def _connect_and_ask(self, rank: int, line: bytes) -> bytes | None:
        """Its answer, empty if it has none; None if nobody listens."""
        try:
            reader, writer = await asyncio.open_unix_connection(self._path(rank))
        except (FileNotFoundError, ConnectionRefusedError):
            return None  # it is starting, again perhaps, or leaving
        try:
            writer.write(line)
            return await reader.read()
        except ConnectionError:
            return b""
        finally:
            writer.close()

    def _path(self, rank: int) -> Path:
        return self.folder / f"http-{rank}"


async def _answer(answers: Answers, line: bytes) -> bytes:
    """The answer to one line; nothing if there is none."""
    try:
        words = msgspec.json.decode(line, type=dict[str, Any])
        return msgspec.json.encode(await answers[words.pop("question")](words))
    except Exception:
        logger.exception("a peer's question could not be answered")
        return b""
