"""State that the routes of responses share: the store, and the runs in the background."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import AsyncGenerator
from functools import partial
from typing import Any
from weakref import WeakValueDictionary

from fastapi import Request

from headrace_core.errors import QueueFull, RequestError
from headrace_server.errors.mapping import ErrorAnswer
from headrace_server.protocols.responses.protocol import ResponsesRequest
from headrace_server.protocols.responses.request import check
from headrace_server.protocols.responses.run import ResponseRun
from headrace_server.protocols.responses.store import ResponseStore, StoredResponse
from headrace_server.requests import convert
from headrace_server.security.auth import KEY_IN_SCOPE
from headrace_server.security.keys import Key
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import DirectWriter
from headrace_server.tools.base import ToolServer

logger = logging.getLogger(__name__)

_RETRY_SECONDS = 5.0


class UnknownResponse(Exception):
    """No response of that id is kept for this caller."""

    def __init__(self, response_id: str) -> None:
        super().__init__(response_id)
        self.answer = ErrorAnswer(
            404, f"response {response_id[:64]!r} is not kept here", param="response_id"
        )


class ResponseService:
    """Makes runs, keeps what they leave, and runs those that nobody waits for.

    Args:
        tool_server: where built-in tools come from.
    """

    def __init__(
        self,
        settings: ServerSettings,
        tool_server: ToolServer | None = None,
    ) -> None:
        self.stores = settings.enable_responses_store
        self.store = ResponseStore(
            max_count=settings.responses_store_count,
            max_bytes=settings.responses_store_bytes,
            max_age=settings.responses_store_seconds,
        )
        self._max_background = settings.max_background_responses
        self._tool_server = tool_server
        self._tasks: set[asyncio.Task[None]] = set()
        self._under_way: WeakValueDictionary[tuple[str, str], StoredResponse] = (
            WeakValueDictionary()
        )
        """Records of runs that are not kept yet; of a run that was dropped, none."""

    async def begin(
        self, body: ResponsesRequest, request: Request, state: ServerState
    ) -> PreparedResponse:
        """Check a request and make its run.

        Raises:
            RequestError: naming the field.
            QueueFull: too many responses run in the background.
        """
        convert.check_model(body.model, state.engine.model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        check(body, stores=self.stores)
        owner = owner_of(request)
        wanted = (body.request_id or "").removeprefix("resp_") or None
        name = convert.answer_id("resp_", wanted, request)
        stored = self.stores and body.store
        if body.background:
            self._check_room()  # before work is done for it
        record = self._new_record(body, owner, name) if stored else None
        try:
            run = ResponseRun(
                body,
                state,
                name,
                previous=self._previous(owner, body),
                record=record if body.stream or body.background else None,
                tool_server=self._tool_server,
                stored=stored,
            )
            await run.prepare()
        except BaseException:
            self.release(record)
            raise
        return PreparedResponse(self, run, record)

    def _check_room(self) -> None:
        if len(self._tasks) >= self._max_background:
            raise QueueFull(
                f"{len(self._tasks)} responses run in the background", retry_after=_RETRY_SECONDS
            )

    def _new_record(self, body: ResponsesRequest, owner: str, name: str) -> StoredResponse:
        """A record, whose id is taken from now on."""
        if self.store.has(owner, name) or (owner, name) in self._under_way:
            raise RequestError(f"request_id: {name[:64]!r} is in use", param="request_id")
        record = StoredResponse(name, owner, body.background)
        self._under_way[owner, name] = record
        return record

    def release(self, record: StoredResponse | None) -> None:
        """The run of a record has ended, or did not begin."""
        if record is not None:
            self._under_way.pop((record.owner, record.id), None)

    def _previous(self, owner: str, body: ResponsesRequest) -> StoredResponse | None:
        if body.previous_response_id is None:
            return None
        record = self.find(owner, body.previous_response_id, "previous_response_id")
        status = record.response.get("status")
        if status not in ("completed", "incomplete"):
            raise RequestError(
                f"previous_response_id: response {record.id!r} is {status}; only completed and "
                "incomplete ones can be continued",
                param="previous_response_id",
            )
        return record

    def find(self, owner: str, response_id: str, param: str = "response_id") -> StoredResponse:
        """The caller's record.

        Raises:
            RequestError: the id has another form.
            UnknownResponse: it is not kept, or belongs to somebody else.
        """
        if not response_id.startswith("resp_") or len(response_id) > 256:
            raise RequestError(
                f"{param} = {response_id[:64]!r}: must begin with 'resp_'", param=param
            )
        record = self.store.get(owner, response_id)
        if record is None:
            raise UnknownResponse(response_id)
        return record

    def start_background(
        self, run: ResponseRun, record: StoredResponse, state: ServerState
    ) -> None:
        """Run without a reader; the record tells what comes of it.

        Raises:
            QueueFull: others began while this one was prepared.
        """
        self.release(record)
        self._check_room()
        run.queue()
        self.store.add(record)
        task = asyncio.create_task(self._in_background(run, record, state))
        record.cancel = partial(_cancel, task)
        self._tasks.add(task)

        def ended(task: asyncio.Task[None]) -> None:
            self._tasks.discard(task)
            if not record.ended:  # cancelled before its first step
                run.cancel()
                self.keep(run, record)

        task.add_done_callback(ended)

    async def _in_background(
        self, run: ResponseRun, record: StoredResponse, state: ServerState
    ) -> None:
        task = asyncio.current_task()
        assert task is not None
        try:
            with state.lifecycle.track(record.id, partial(_cancel, task)):
                await run.whole()
        except asyncio.CancelledError:
            run.cancel()
        except Exception as error:
            run.fail(error, record.id)
        finally:
            self.keep(run, record)

    def keep(self, run: ResponseRun, record: StoredResponse) -> None:
        """A run has ended: its record is what others read from now on."""
        record.response = run.response()
        record.input_items = run.input_items
        record.messages = run.messages
        record.end()
        if self.store.has(record.owner, record.id):
            self.store.update(record)
        elif not record.background:
            self.store.add(record)

    async def cancel(self, record: StoredResponse) -> None:
        """End a background run and wait until it has.

        Raises:
            RequestError: it does not run in the background, or has ended.
        """
        if record.cancel is None or not record.running:
            status = record.response.get("status")
            why = f"it is {status}" if record.background else "it does not run in the background"
            raise RequestError(
                f"response {record.id!r} cannot be cancelled: {why}", param="response_id"
            )
        record.cancel()
        await record.wait_end()


class PreparedResponse:
    """A checked request that has not run yet."""

    def __init__(
        self, service: ResponseService, run: ResponseRun, record: StoredResponse | None
    ) -> None:
        self._service = service
        self.run = run
        self.record = record

    async def whole(self) -> dict[str, Any]:
        """Run to the end; the response object."""
        try:
            result = await self.run.whole()
            if self.record is not None:
                self._service.keep(self.run, self.record)
        finally:
            self._service.release(self.record)
        return result

    async def events(self) -> AsyncGenerator[bytes | DirectWriter, None]:
        """Run; the encoded events."""
        events = self.run.events()
        try:
            async for item in events:
                yield item
            if self.record is not None:
                self._service.keep(self.run, self.record)
        finally:
            await events.aclose()
            self._service.release(self.record)

    def fail(self, error: Exception, request_id: str) -> bytes:
        """End the stream with an error: the last events, encoded. The response is kept: its id was told."""
        data = self.run.fail(error, request_id)
        if self.record is not None:
            self._service.keep(self.run, self.record)
        return data

    def in_background(self, state: ServerState) -> StoredResponse:
        """Run without a reader."""
        assert self.record is not None, "background needs a store"
        self._service.start_background(self.run, self.record, state)
        return self.record


def _cancel(task: asyncio.Task[None]) -> None:
    task.cancel()


def owner_of(request: Request) -> str:
    """Whose responses these are: the name of the key, "" where the server asks for none."""
    key: Key | None = request.scope.get(KEY_IN_SCOPE)
    return "" if key is None else key.name
