"""Answers that take a while: event streams, and waiting while watching the client.

A stream is an async iterator of encoded events, or of :class:`DirectWriter` for a stretch that needs no
task of its own. :class:`EventStream` sends them, straight to the
socket where the server allows it (:mod:`headrace_server.http.h11_protocol`), else as one ASGI message
each, and ends with exactly one ``data: [DONE]``; an error on the way becomes an event before it.
Memory is bounded: nothing is fetched from the engine while the socket's buffer (16 KiB) is full; the
engine merges what piles up there, and suspends the request before that is much. Closing the
iterator aborts the request.
"""

from __future__ import annotations

import asyncio
import logging
import uuid
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias, TypeVar

import msgspec
from fastapi import Request
from starlette.responses import Response
from starlette.types import Message, Receive, Scope, Send

from headrace_core.engine import OutputStream
from headrace_core.errors import RequestError
from headrace_core.output import RequestOutput
from headrace_core.reliability import failpoints
from headrace_server.errors.mapping import ClientGone, ShuttingDown, report
from headrace_server.http.h11_protocol import DirectWrite, NumUntaken, direct_write, num_untaken
from headrace_server.state import Lifecycle, ServerState
from headrace_server.streaming.offload import PIECE, OffLoop, cost_of, pieces

logger = logging.getLogger(__name__)

KEEP_ALIVE_AFTER = 15.0
"""Seconds without an event after which blank lines are sent."""
WRITE_TIMEOUT = 300.0
"""Seconds that a client may go without taking a byte while the socket is full."""
LOOKS = 12
"""Looks at a client's progress in that time."""

DONE = b"data: [DONE]\n\n"
_BLANK = b"\n\n"
"""Keeps a quiet stream alive: the end of an event that has no fields, which readers pass over (HTML, 9.2.6).

Not a comment: there are clients (``vllm bench serve``) that strip each piece that they receive and join the
pieces, so that the events after a comment would be part of it.
"""
_HEADERS = [
    (b"content-type", b"text/event-stream; charset=utf-8"),
    (b"cache-control", b"no-cache"),
    (b"x-accel-buffering", b"no"),
]

T = TypeVar("T")
_encoder = msgspec.json.Encoder()


def event(data: Any) -> bytes:
    """One server-sent event with a JSON line."""
    return b"".join((b"data: ", _encoder.encode(data), b"\n\n"))


def named_event(name: str, data: Any) -> bytes:
    """One server-sent event with an ``event:`` line and a JSON line."""
    head = b"event: %b\ndata: " % name.encode()
    return b"".join((head, _encoder.encode(data), b"\n\n"))


def _error_event(error: Exception, request_id: str) -> bytes:
    return b"data: " + report(error, request_id).encoded() + b"\n\n"


@dataclass(frozen=True)
class StreamForm:
    """Bytes of a protocol where a stream has nothing, fails or ends. The default is OpenAI's."""

    done: bytes = DONE
    """After the last event; b"" if the last event says itself that it is the last."""
    error: Callable[[Exception, str], bytes] = _error_event
    """The events for an error (and the request's id, for the log)."""
    keep_alive: bytes = _BLANK
    """Sent in quiet times."""


OPENAI_FORM = StreamForm()


class EventTemplate:
    """Events that differ in one text only: the rest is encoded once.

    Args:
        make: gives the event's data for a text.
    """

    def __init__(self, make: Callable[[str], Any]) -> None:
        # Random, so that no name or id of a request can hold it.
        mark = uuid.uuid4().hex
        self._head, self._tail = event(make(mark)).split(_encoder.encode(mark))

    def __call__(self, text: str) -> bytes:
        return self._head + _encoder.encode(text) + self._tail


class DirectWriter:
    """The rest of a request's outputs, encoded and written as they come from the engine.

    Args:
        outputs: the first is taken already.
        encode: an output's events; b"" for none.
        encode_text: the same of new text and the number of its tokens, where that is all; None:
            ``encode`` gets every output.
        off_loop: where events are encoded that cost much.
        cost: of an output's events.
    """

    def __init__(
        self,
        outputs: OutputStream,
        encode: Callable[[RequestOutput], bytes],
        encode_text: Callable[[str, int], bytes] | None = None,
        *,
        off_loop: OffLoop,
        cost: Callable[[RequestOutput], int] = cost_of,
    ) -> None:
        self._outputs = outputs
        self._encode = encode
        self._off_loop = off_loop
        self._cost = cost
        self._encode_text = encode_text
        self._ended = False

    def then(self, change: Callable[[bytes], bytes]) -> DirectWriter:
        """The same writer, whose events are changed before they are written; call it before :meth:`into`."""
        encode, encode_text = self._encode, self._encode_text
        self._encode = lambda output: change(encode(output))
        if encode_text is not None:
            self._encode_text = lambda text, num_tokens: change(encode_text(text, num_tokens))
        return self

    async def into(self, writer: _Writer) -> None:
        """Write everything. While the socket is full the engine merges what comes.

        Raises: what the engine, encoding or writing raises.
        """
        refused, encode_text = b"", self._encode_text
        heavy: tuple[int, RequestOutput] | None = None

        def put(data: bytes) -> bool:
            nonlocal refused
            if not data or writer.write_now(data):
                return True
            refused = data
            return False

        def take(output: RequestOutput) -> bool:
            nonlocal heavy
            self._ended = output.finished
            if (cost := self._cost(output)) > self._off_loop.light:
                heavy = cost, output
                return False
            return put(self._encode(output))

        def take_text(text: str, num_tokens: int) -> bool:
            assert encode_text is not None
            return put(encode_text(text, num_tokens))

        while not self._ended:
            await self._outputs.push(take, None if encode_text is None else take_text)
            if heavy is not None:
                # Meanwhile the engine merges what comes, as it does for a socket that is full.
                cost, output = heavy
                heavy = None
                refused = await self._off_loop(cost, self._encode, output)
            elif not refused:
                return  # it has ended
            data, refused = refused, b""
            await writer.write_large(data)


Blame: TypeAlias = Callable[[int, RequestError], None]
"""Is told of a refusal and the position of the stream that it came from, before anybody else."""


def _nobody(position: int, error: RequestError) -> None:
    """Leave an error as it is."""


class NumberedStream(AsyncIterator[tuple[int, T]]):
    """The items of one stream as :func:`merge` would give them, at less cost."""

    def __init__(self, stream: AsyncIterator[T], blame: Blame = _nobody) -> None:
        self.stream = stream
        self._blame = blame

    async def __anext__(self) -> tuple[int, T]:
        try:
            return 0, await self.stream.__anext__()
        except RequestError as error:
            self._blame(0, error)
            raise

    async def aclose(self) -> None:
        await close(self.stream)


async def merge(
    streams: Sequence[AsyncIterator[T]], blame: Blame = _nobody
) -> AsyncGenerator[tuple[int, T], None]:
    """Items of several streams as they come, each with its stream's position.

    The first item comes once the engine has taken all requests in: if it refuses one, that error
    comes first. At most one item per stream waits. Closing, or an error in one, closes all.
    """
    queue: asyncio.Queue[tuple[int, T] | BaseException | None] = asyncio.Queue(maxsize=1)
    failures: list[Exception] = []
    pumps = [
        asyncio.create_task(_pump(i, s, queue, failures, blame)) for i, s in enumerate(streams)
    ]
    try:
        given: Sequence[object] = streams
        await asyncio.gather(*(s.decided() for s in given if isinstance(s, OutputStream)))
        running = len(pumps)
        while running and not failures:
            got = await queue.get()
            if got is None:
                running -= 1
            elif isinstance(got, BaseException):
                raise got
            else:
                yield got
        if failures:
            raise failures[0]
    finally:
        await _cancel(pumps)


async def _pump(
    position: int,
    stream: AsyncIterator[T],
    queue: asyncio.Queue[tuple[int, T] | BaseException | None],
    failures: list[Exception],
    blame: Blame,
) -> None:
    try:
        async for item in stream:
            await queue.put((position, item))
    except Exception as error:
        if isinstance(error, RequestError):
            blame(position, error)
        failures.append(error)
        await queue.put(error)
    else:
        await queue.put(None)
    finally:
        await close(stream)


async def close(stream: AsyncIterator[Any]) -> None:
    """Close an iterator that can be closed; of an engine's outputs: abort the request."""
    aclose = getattr(stream, "aclose", None)
    if aclose is not None:
        await aclose()


Events = AsyncGenerator[bytes | DirectWriter, None]
"""Events of a route: encoded ones, and stretches of them."""


async def _cancel(tasks: Sequence[asyncio.Task[Any]]) -> None:
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


class OpenedStream:
    """A stream whose first event was already waited for, so that early errors keep a status."""

    def __init__(self, events: Events) -> None:
        self._events = events
        self._first: asyncio.Task[bytes | DirectWriter] = asyncio.ensure_future(_next(events))

    async def wait(self, seconds: float) -> None:
        """Until the first event or error is there, or so long.

        Raises: what the stream raises before its first event.
        """
        await asyncio.wait({self._first}, timeout=seconds)
        error = self._first.exception() if self._first.done() else None
        if error is not None and not isinstance(error, _Ended):
            raise error

    async def first(self) -> bytes | DirectWriter:
        """The first event. Once; :attr:`rest` has the others.

        Raises: what the stream raises before it; :class:`_Ended` if there is none.
        """
        return await asyncio.shield(self._first)

    @property
    def rest(self) -> AsyncIterator[bytes | DirectWriter]:
        """The events after the first."""
        return self._events

    async def aclose(self) -> None:
        """Stop the stream, wherever it is."""
        await _cancel([self._first])
        await self._events.aclose()


class _Ended(Exception):
    """The stream had no event (a task cannot raise StopAsyncIteration)."""


async def _next(events: Events) -> bytes | DirectWriter:
    try:
        return await events.__anext__()
    except StopAsyncIteration:
        raise _Ended from None


class EventStream(Response):
    """Sends events until they end, the client goes, or the server stops.

    Args:
        events: encoded events; ``[DONE]`` is added here.
        lifecycle: told that this request is in flight.
        request_id: for the log.
        form: the protocol's terminal, error and keep-alive events.
    """

    media_type = "text/event-stream"

    def __init__(
        self,
        events: OpenedStream,
        lifecycle: Lifecycle,
        request_id: str,
        form: StreamForm = OPENAI_FORM,
    ) -> None:
        super().__init__()
        self._form = form
        self.raw_headers = [*_HEADERS]
        self._events = events
        self._lifecycle = lifecycle
        self._request_id = request_id

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        writer = _Writer(send, direct_write(scope), num_untaken(scope), self._form)
        sending = asyncio.create_task(self._send_events(writer, self.raw_headers))
        gone = asyncio.create_task(wait_disconnect(receive))
        beat = asyncio.create_task(writer.keep_alive())
        stopped = asyncio.Event()
        halt = asyncio.create_task(stopped.wait())
        try:
            with self._lifecycle.track(self._request_id, stopped.set):
                await asyncio.wait({sending, gone, halt}, return_when=asyncio.FIRST_COMPLETED)
                if not sending.done() and stopped.is_set():
                    await _cancel([sending, beat])
                    await _bounded(self._say_goodbye(writer), 1.0)
        finally:
            await _cancel([sending, gone, beat, halt])
            await self._events.aclose()
        if not sending.cancelled() and (error := sending.exception()) is not None:
            logger.warning("stream %s was cut: %s", self._request_id, type(error).__name__)

    async def _say_goodbye(self, writer: _Writer) -> None:
        if not writer.started:
            await writer.start(self.raw_headers)
        await writer.finish(ShuttingDown(), self._request_id)

    async def _send_events(self, writer: _Writer, headers: list[tuple[bytes, bytes]]) -> None:
        await writer.start(headers)
        try:
            await self._send_item(writer, await self._events.first())
            async for item in self._events.rest:
                await self._send_item(writer, item)
        except _Ended:
            await writer.finish(None, self._request_id)
        except (TimeoutError, OSError):
            raise
        except Exception as error:
            await writer.finish(error, self._request_id)
        else:
            await writer.finish(None, self._request_id)

    async def _send_item(self, writer: _Writer, item: bytes | DirectWriter) -> None:
        if failpoints.PLAN is not None:
            failpoints.hit("stream.write", self._request_id)
        if isinstance(item, DirectWriter):
            await item.into(writer)
        elif len(item) > PIECE or not writer.write_now(item):
            await writer.write_large(item)


class _Writer:
    """The sending half of a connection, with blank lines in quiet times."""

    def __init__(
        self, send: Send, direct: DirectWrite | None, untaken: NumUntaken | None, form: StreamForm
    ) -> None:
        self._send = send
        self._form = form
        self._direct = direct
        self._untaken = untaken
        self._clock = asyncio.get_running_loop().time
        self._last = self._clock()
        self._busy = False
        self.started = False

    async def start(self, headers: list[tuple[bytes, bytes]]) -> None:
        await self._put({"type": "http.response.start", "status": 200, "headers": headers})
        self.started = True

    def write_now(self, data: bytes) -> bool:
        """Write without waiting and without a task switch; False: use :meth:`write`."""
        # While another write waits for the socket, this one must not overtake it.
        if self._direct is None or self._busy or not self._direct(data):
            return False
        self._last = self._clock()
        return True

    async def write(self, data: bytes, *, more: bool = True) -> None:
        await self._put({"type": "http.response.body", "body": data, "more_body": more})

    async def write_large(self, data: bytes) -> None:
        """:meth:`write` what may be megabytes, or nothing."""
        for piece in pieces(data):
            if piece:
                await self.write(piece)

    async def finish(self, error: Exception | None, request_id: str) -> None:
        """The terminal event, after an error event if there was an error."""
        said = b"" if error is None else self._form.error(error, request_id)
        await self.write(said + self._form.done, more=False)

    async def keep_alive(self) -> None:
        """Send blank lines whenever nothing was sent for a while; ends only by cancellation."""
        while True:
            await asyncio.sleep(max(0.01, self._last + KEEP_ALIVE_AFTER - self._clock()))
            if self._clock() - self._last >= KEEP_ALIVE_AFTER and self.started and not self._busy:
                await self.write(self._form.keep_alive)

    async def _put(self, message: Message) -> None:
        self._busy = True
        try:
            async with asyncio.timeout(WRITE_TIMEOUT) as limit:
                watch = None if self._untaken is None else _Progress(limit, self._untaken)
                try:
                    await self._send(message)
                finally:
                    if watch is not None:
                        watch.stop()
        finally:
            self._busy = False
            self._last = self._clock()


class _Progress:
    """Puts off the time limit of a write whenever its client has taken something.

    What waits for the client changes only by what it takes: nobody else writes meanwhile. Where the
    server knows only a part of it (TLS), that part may also grow, out of the other.

    Args:
        limit: of the write that begins now.
        untaken: bytes that the client has not taken.
    """

    def __init__(self, limit: asyncio.Timeout, untaken: NumUntaken) -> None:
        self._limit, self._untaken = limit, untaken
        self._loop = asyncio.get_running_loop()
        self._seen: int | None = None
        # Not now: what is to be written does not wait yet.
        self._timer: asyncio.Handle = self._loop.call_soon(self._look)

    def stop(self) -> None:
        """The write has ended."""
        self._timer.cancel()

    def _look(self) -> None:
        if self._limit.expired():
            return
        before, self._seen = self._seen, self._untaken()
        if before is not None and self._seen != before:
            self._limit.reschedule(self._loop.time() + WRITE_TIMEOUT)
        self._timer = self._loop.call_later(WRITE_TIMEOUT / LOOKS, self._look)


async def start_stream(
    events: Events,
    request: Request,
    state: ServerState,
    request_id: str,
    form: StreamForm = OPENAI_FORM,
) -> Response:
    """A response that streams ``events``.

    Waits for the first event, so that a request which is refused gets a status and not a stream;
    but not longer than the keep-alive time, so that a queued request does not look dead.

    Raises: what the stream raises before its first event.
    """
    opened = OpenedStream(events)
    try:
        await wait_watching(opened.wait(KEEP_ALIVE_AFTER), request, state.lifecycle, request_id)
    except BaseException:
        await opened.aclose()
        raise
    return EventStream(opened, state.lifecycle, request_id, form)


async def wait_watching(
    work: Coroutine[Any, Any, T], request: Request, lifecycle: Lifecycle, request_id: str
) -> T:
    """Await ``work`` while watching the connection. The request's body must be read already.

    Raises:
        ClientGone: the client left; ``work`` was cancelled.
        ShuttingDown: the server stops; ``work`` was cancelled.
    """
    if failpoints.PLAN is not None:
        work = _failing(work, request_id)
    working = asyncio.create_task(work)
    gone = asyncio.create_task(wait_disconnect(request.receive))
    stopped = asyncio.Event()
    halt = asyncio.create_task(stopped.wait())
    try:
        with lifecycle.track(request_id, stopped.set):
            await asyncio.wait({working, gone, halt}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ShuttingDown if stopped.is_set() else ClientGone
    finally:
        await _cancel([working, gone, halt])


async def _failing(work: Coroutine[Any, Any, T], request_id: str) -> T:
    result = await work
    failpoints.hit("server.answer", request_id)
    return result


async def wait_disconnect(receive: Receive) -> None:
    """Return when the client has left. The request's body must be read already."""
    while (await receive())["type"] != "http.disconnect":
        pass


async def _bounded(work: Awaitable[None], seconds: float) -> None:
    """Await, but give up silently on a client that does not read."""
    try:
        async with asyncio.timeout(seconds):
            await work
    except (TimeoutError, OSError, RuntimeError):
        return
