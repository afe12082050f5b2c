"""Tool servers: sources of built-in tools."""

from __future__ import annotations

import asyncio
import json
from abc import ABC, abstractmethod
from collections.abc import Collection, Mapping
from contextlib import AbstractAsyncContextManager
from dataclasses import dataclass, field
from typing import Any, NamedTuple

MAX_OUTPUT = 64 * 1024
"""Characters of a tool's answer that the model is shown."""


@dataclass(frozen=True, slots=True)
class Tool:
    """One tool."""

    name: str
    description: str = ""
    schema: Mapping[str, Any] = field(default_factory=dict)
    """JSON schema of its arguments."""


@dataclass(frozen=True, slots=True)
class Namespace:
    """The tools of one server."""

    label: str
    description: str | None
    tools: tuple[Tool, ...]

    def only(self, names: Collection[str] | None) -> Namespace:
        """Tools of the names; None: all."""
        if names is None:
            return self
        return Namespace(
            self.label, self.description, tuple(t for t in self.tools if t.name in names)
        )


class ToolResult(NamedTuple):
    """A tool's answer to one call."""

    text: str
    failed: bool = False


class ToolSession(ABC):
    """A conversation with one server of tools; state may live in it."""

    ended: bool = False
    """It answers no more; the next call needs another."""

    @abstractmethod
    async def call(self, tool: str, arguments: Mapping[str, Any]) -> ToolResult:
        """Run a tool. Whatever goes wrong is a result that says so: the model reads it."""


class ToolServer(ABC):
    """Where built-in tools come from."""

    async def prepare(self) -> None:  # noqa: B027 most have nothing to do
        """Called once when serving begins, beside it: what would be slow at the first request."""

    @abstractmethod
    async def namespaces(self) -> Mapping[str, Namespace]:
        """All servers by label.

        Raises:
            ToolServerUnreachable: one that the operator named does not answer.
        """

    async def has_tool(self, label: str) -> bool:
        """True if a server of that label is there."""
        return label in await self.namespaces()

    async def describe(self, label: str, names: Collection[str] | None = None) -> Namespace | None:
        """A server's tools, or those of the names; None if it is unknown."""
        found = (await self.namespaces()).get(label)
        return None if found is None else found.only(names)

    @abstractmethod
    def session(
        self, label: str, session_id: str, headers: Mapping[str, str] | None = None
    ) -> AbstractAsyncContextManager[ToolSession]:
        """Open a session for the time of the block.

        Raises:
            KeyError: no server of that label.
            ToolServerUnreachable: it does not answer.
        """


class ToolServerUnreachable(Exception):
    """A tool server did not answer, or not in the protocol."""

    def __init__(self, address: str) -> None:
        super().__init__(f"the tool server {address} does not answer")


class Sessions:
    """One answer's sessions: opened at a server's first call, closed together.

    Args:
        server: where the tools are.
        session_id: names the sessions to the servers.
    """

    def __init__(self, server: ToolServer, session_id: str) -> None:
        self._server = server
        self._id = session_id
        self._open: dict[str, _SessionHolder] = {}

    async def call(self, label: str, tool: str, arguments: str) -> ToolResult:
        """Run a tool with the arguments that a model wrote."""
        parsed = parse_arguments(tool, arguments)
        if isinstance(parsed, ToolResult):
            return parsed
        try:
            if label not in self._open:
                self._open[label] = await _SessionHolder.open(self._server.session(label, self._id))
            session = self._open[label].session
            result = await session.call(tool, parsed)
            if session.ended:
                await self._open.pop(label).close()
        except KeyError:
            return ToolResult(f"error: there is no tool server {label!r}", failed=True)
        except ToolServerUnreachable:
            return ToolResult("error: the tool server does not answer", failed=True)
        return ToolResult(shorten(result.text), result.failed)

    async def close(self) -> None:
        """End every session."""
        opened, self._open = list(self._open.values()), {}
        for kept in opened:
            await kept.close()


def shorten(text: str, limit: int = MAX_OUTPUT) -> str:
    """At most so many characters of a text, and behind them how many there were."""
    if len(text) <= limit:
        return text
    return f"{text[:limit]}\n[cut: {len(text)} characters, {limit} shown]"


def parse_arguments(tool: str, arguments: str) -> Mapping[str, Any] | ToolResult:
    """A call's arguments, or what to tell the model about them. Python takes bare code."""
    try:
        parsed = json.loads(arguments or "{}")
    except (ValueError, RecursionError):
        if tool == "python":
            return {"code": arguments}
        return ToolResult("error: the arguments are not valid JSON", failed=True)
    if isinstance(parsed, dict):
        return parsed
    if tool == "python":
        return {"code": arguments}
    return ToolResult("error: the arguments must be a JSON object", failed=True)


class _SessionHolder:
    """A context that is entered and left by a task of its own.

    Clients of the protocol hold task groups, which must be left by the task that entered them; the
    tasks that iterate an answer change.
    """

    def __init__(self) -> None:
        self._leave = asyncio.Event()
        self._task: asyncio.Task[None]
        self.session: ToolSession

    @classmethod
    async def open(cls, context: AbstractAsyncContextManager[ToolSession]) -> _SessionHolder:
        kept = cls()
        ready: asyncio.Future[ToolSession] = asyncio.get_running_loop().create_future()
        kept._task = asyncio.create_task(kept._hold(context, ready))
        try:
            kept.session = await asyncio.shield(ready)
        except asyncio.CancelledError:
            await kept.close()
            raise
        return kept

    async def _hold(
        self,
        context: AbstractAsyncContextManager[ToolSession],
        ready: asyncio.Future[ToolSession],
    ) -> None:
        try:
            async with context as session:
                ready.set_result(session)
                await self._leave.wait()
        except Exception as error:
            if not ready.done():
                ready.set_exception(error)
        finally:
            ready.cancel()

    async def close(self) -> None:
        self._leave.set()
        _, late = await asyncio.wait({self._task}, timeout=_CLOSE_SECONDS)
        for task in late:
            task.cancel()
            await asyncio.wait({task}, timeout=_CLOSE_SECONDS)


_CLOSE_SECONDS = 5.0
