"""One response on its way: turns of the model, calls of built-in tools between them, events.

Whole, streamed and background responses are the same run: what differs is who reads its events.
"""

from __future__ import annotations

import time
from collections.abc import AsyncGenerator, Mapping, Sequence
from contextlib import aclosing
from dataclasses import dataclass, field
from typing import Any

import msgspec
from msgspec import Raw
from pydantic import BaseModel

from headrace_core.errors import PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_server.chat.blocks import Block, Blocks
from headrace_server.chat.prompts import count_tokens, turn_prompt
from headrace_server.chat.segments import Segment
from headrace_server.chat.turn import ChoiceDelta, DeadEnd, TokenCounts, Turn, check_end
from headrace_server.errors.mapping import report
from headrace_server.harmony.prompt import is_harmony
from headrace_server.protocols.openai.logprobs import content_logprobs
from headrace_server.protocols.responses.events import Event, ItemEvents, Numbering, new_id
from headrace_server.protocols.responses.items import to_messages, with_instructions
from headrace_server.protocols.responses.protocol import MessageItem, ResponsesRequest
from headrace_server.protocols.responses.request import chat_request, name_fields
from headrace_server.protocols.responses.store import StoredResponse
from headrace_server.protocols.responses.toolset import BuiltinTool, ToolSet, resolve_tools
from headrace_server.requests import convert
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import DirectWriter, named_event
from headrace_server.streaming.offload import cost_of
from headrace_server.tools.base import Sessions, ToolResult, ToolServer

MAX_TOOL_CALLS = 128
"""Most calls of built-in tools in one response, whatever the request allows."""


@dataclass
class TurnUsage:
    """Tokens per turn of the model."""

    turns: list[TokenCounts] = field(default_factory=list)

    def tool_tokens(self) -> list[int]:
        """Tokens that tools added before each turn: what is neither the last prompt nor output."""
        found = [0] if self.turns else []
        for before, now in zip(self.turns, self.turns[1:], strict=False):
            found.append(max(0, now.prompt - before.prompt - before.output))
        return found

    @property
    def output(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.output for turn in self.turns)

    def body(self) -> dict[str, Any]:
        """``usage`` of the response object."""
        prompts = [turn.prompt for turn in self.turns]
        cached = [turn.cached for turn in self.turns]
        outputs = [turn.output for turn in self.turns]
        tools = self.tool_tokens()
        return {
            "input_tokens": sum(prompts),
            "input_tokens_details": {
                "cached_tokens": sum(cached),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": prompts,
                "cached_tokens_per_turn": cached,
            },
            "output_tokens": sum(outputs),
            "output_tokens_details": {
                "reasoning_tokens": sum(turn.reasoning for turn in self.turns),
                "tool_output_tokens": sum(tools),
                "output_tokens_per_turn": outputs,
                "tool_output_tokens_per_turn": tools,
            },
            "total_tokens": sum(prompts) + sum(outputs),
        }


class ResponseRun:
    """A response. :meth:`prepare` once, then :meth:`events` or :meth:`whole`, once.

    Args:
        body: checked by :func:`headrace_server.protocols.responses.request.check`.
        response_id: of the response.
        previous: the record that this one continues.
        record: keeps the events as they are made.
    """

    def __init__(
        self,
        body: ResponsesRequest,
        state: ServerState,
        response_id: str,
        *,
        previous: StoredResponse | None = None,
        record: StoredResponse | None = None,
        tool_server: ToolServer | None = None,
        stored: bool = False,
    ) -> None:
        self.body, self.state, self.id = body, state, response_id
        self._record, self._tool_server, self._stored = record, tool_server, stored
        self._harmony = is_harmony(state.engine.model)
        items = _input_items(body)
        history = previous.messages if previous is not None else []
        self.messages = to_messages(
            items,
            history,
            developer=self._harmony,
            note=state.left_out.note,
            modalities=state.engine.model.modalities,
        )
        """The conversation without instructions; grows by what is said."""
        self.input_items = [_with_id(_declared(item)) for item in items]
        self.status = "queued" if body.background else "in_progress"
        self._created = int(time.time())
        self._completed: int | None = None
        self._error: dict[str, str] | None = None
        self._incomplete: str | None = None
        self._usage = TurnUsage()
        self._raw: dict[str, list[Any]] = {"input_messages": [], "output_messages": []}
        self._out: list[bytes] = []
        self._keep_out = body.stream and not body.background
        self._numbers = Numbering(self._emit)
        self._items: ItemEvents
        self._blocks = Blocks(0, self._call_id)
        self._turn: Turn
        self._tools = ToolSet()
        self._num_tool_calls = 0
        self._finish_reason: str | None = None
        self._ends_in_call = False
        """The turn was cut within a call."""
        self._opened = False

    # Before

    async def prepare(self) -> None:
        """Check everything that can be checked without running the model.

        Raises:
            RequestError: naming the field.
            HTTPException: 424, a tool server does not answer.
        """
        self._tools = await resolve_tools(
            self.body.tools,
            self.body.tool_choice,
            self._tool_server,
            self.state.left_out.note,
            harmony=self._harmony,
        )
        seals = "reasoning.encrypted_content" in self.body.include
        self._items = ItemEvents(self._numbers, self._tools.find, seals=seals)
        self._turn = self._make_turn()
        if self.body.include and self._turn.body.logprobs and self._turn.plan.is_parsed:
            raise UnsupportedFeature(
                "include: log-probabilities of texts are not supported where reasoning or calls are "
                "parsed out of them",
                param="include",
            )
        if self.body.truncation == "auto":
            await self._fit()

    def _make_turn(self) -> Turn:
        limit = self.body.max_output_tokens
        left = None if limit is None else limit - self._usage.output
        messages = with_instructions(self.messages, self.body.instructions)
        chat = chat_request(self.body, messages, self._tools, left)
        chat.check_fields(self.state)
        return Turn(
            chat,
            self.state,
            self.id,
            builtin=self._tools.namespaces,
            keep_text=self.body.enable_response_messages,
        )

    async def _fit(self) -> None:
        """Drop the oldest exchanges until the prompt fits (truncation = auto)."""
        room = self.state.engine.model.max_model_len - (self.body.max_output_tokens or 1)
        if await self._length(0) <= room:
            return
        starts = [i for i, m in enumerate(self.messages) if m["role"] == "user"] or [0]
        low, high = 0, len(starts) - 1
        while low < high:
            middle = (low + high) // 2
            if await self._length(starts[middle]) <= room:
                high = middle
            else:
                low = middle + 1
        self.messages = self._from(starts[low])
        self._turn = self._make_turn()

    def _from(self, start: int) -> list[dict[str, Any]]:
        """The messages from one on, and the system's before it."""
        return [m for m in self.messages[:start] if m["role"] in ("system", "developer")] + (
            self.messages[start:]
        )

    async def _length(self, start: int) -> int:
        """Tokens of the prompt that begins with a message."""
        told = with_instructions(self._from(start), self.body.instructions)
        body = chat_request(self.body, told, self._tools, None)
        prompt = turn_prompt(body, self.state, self._tools.namespaces)
        try:
            return await count_tokens(self.state, prompt)
        except PromptTooLong:
            return self.state.engine.model.max_model_len + 1

    # The run

    async def whole(self) -> dict[str, Any]:
        """Run to the end; the response object. Its status is ``failed`` where the request's own
        parameters left no next token."""
        try:
            async for _ in self.events():
                pass
        except DeadEnd as error:
            self.fail(error, self.id)
        return self.response()

    async def events(self) -> AsyncGenerator[bytes | DirectWriter, None]:
        """Run; the events, encoded, if somebody streams them.

        Raises: RequestError, QueueFull, EngineDead, GenerateError.
        """
        sessions: Sessions | None = None
        if self._tool_server is not None:
            sessions = Sessions(self._tool_server, self.id)
        try:
            while True:
                async with aclosing(self._play(self._turn)) as events:
                    async for item in events:
                        yield item
                calls = self._calls()
                if not calls:
                    break
                results: list[tuple[Block, ToolResult]] = []
                for block, builtin in calls:
                    result = await self._call(sessions, block, builtin)
                    self._items.result(block, builtin, result)
                    results.append((block, result))
                    if data := self._flush():
                        yield data
                if not self._go_on(results):
                    break
        finally:
            if sessions is not None:
                await sessions.close()
        await self.state.off_loop(self._repeated(), self._complete)
        if data := self._flush():
            yield data

    async def _play(self, turn: Turn) -> AsyncGenerator[bytes | DirectWriter, None]:
        """One turn of the model, to its end."""
        self._blocks = Blocks(len(self._items.items), self._call_id)
        async with aclosing(
            turn.events(
                self._encode,
                self._encode_text if turn.is_plain else None,
                opening=self._open,
                cost=self._cost,
                direct=self._keep_out,
            )
        ) as events:
            async for item in events:
                yield item
        await self._count(turn)

    def _cost(self, output: RequestOutput) -> int:
        """Cost of an output's events: where it closes a block, they repeat all of it."""
        return cost_of(output) + (self._repeated() if output.finished else 0)

    def _repeated(self) -> int:
        """Cost of an event that repeats all that the turn has said; it is encoded already."""
        entries = sum(len(block.logprobs) for block in self._blocks.blocks)
        return entries * (1 + self.body.top_logprobs) // 8

    def _encode(self, output: RequestOutput) -> bytes:
        """The events of one output; b"" if it says nothing or nobody streams."""
        (piece,) = self._turn.take(output)
        self._take(piece.segments, self._logprobs(piece.output))
        if piece.output.finish_reason is not None:
            self._finish_reason = piece.output.finish_reason
            self._ends_in_call = piece.ends_in_call
            self._close("completed" if self._is_whole(piece) else "incomplete")
            check_end(piece.output)
        return self._flush()

    def _encode_text(self, text: str, num_tokens: int) -> bytes:
        """The events of new text."""
        self._take(self._turn.take_text(text, num_tokens))
        return self._flush()

    def _take(self, segments: Sequence[Segment], logprobs: Sequence[Raw] = ()) -> None:
        for step in self._blocks.take(segments, logprobs):
            self._items.take(step)

    def _logprobs(self, part: CompletionOutput) -> list[Raw]:
        """Log-probabilities of an output's tokens, encoded."""
        body = self._turn.body
        if not body.logprobs or part.logprobs is None:
            return []
        as_ids = convert.tokens_as_ids(body, self.state.settings)
        count = body.top_logprobs or 0
        entries = content_logprobs(part.token_ids, part.logprobs, count, as_ids)
        return [Raw(msgspec.json.encode(entry)) for entry in entries]

    def _close(self, status: str) -> None:
        """Close the item that is being written, with this status."""
        self._items.ending = status
        for step in self._blocks.finish():
            self._items.take(step)

    def _is_whole(self, piece: ChoiceDelta) -> bool:
        """True if the block that ends with the turn is complete. Where the turn was cut, a call is if its
        arguments are, whatever was cut behind it; where the turn failed, none is."""
        if piece.output.finish_reason in ("error", "abort"):
            return False
        block = self._blocks.open
        if block is not None and block.kind == "call":
            return not piece.call_is_open
        return piece.output.finish_reason != "length"

    async def _count(self, turn: Turn) -> None:
        self._usage.turns.append(await turn.counts())
        if self.body.enable_response_messages:
            for name, text, ids in (
                ("input_messages", turn.prompt_text, turn.prompt_token_ids),
                ("output_messages", turn.text, turn.token_ids),
            ):
                raw = {"type": "raw_message_tokens", "message": text, "tokens": ids}
                self._raw[name].append(raw)

    def _call_id(self, index: int, name: str) -> str:
        return self._turn.call_id(0, index, name) or new_id("call")

    # Built-in tools

    def _calls(self) -> list[tuple[Block, BuiltinTool]]:
        """The built-in calls of the turn that has ended, and remembers what it said."""
        self.messages.append(_assistant_message(self._blocks))
        found = ((block, self._tools.find(block.name)) for block in self._blocks.calls)
        calls = [(block, builtin) for block, builtin in found if builtin is not None]
        if self._finish_reason == "length" or self._ends_in_call:
            self._items.give_up()
            return []
        return calls

    async def _call(
        self, sessions: Sessions | None, block: Block, builtin: BuiltinTool
    ) -> ToolResult:
        limit = min(self.body.max_tool_calls or MAX_TOOL_CALLS, MAX_TOOL_CALLS)
        if self._num_tool_calls >= limit:
            return ToolResult(f"error: not called; {limit} calls is the limit", failed=True)
        self._num_tool_calls += 1
        if sessions is None:
            return ToolResult(f"error: there is no tool {block.name[:64]!r}", failed=True)
        return await sessions.call(builtin.label, builtin.tool, block.text)

    def _go_on(self, results: list[tuple[Block, ToolResult]]) -> bool:
        """Tell the model what the tools said; False: the model does not go on."""
        for block, result in results:
            self.messages.append(
                {"role": "tool", "tool_call_id": block.call_id, "name": block.name,
                 "content": result.text}
            )  # fmt: skip
        limit, output = self.body.max_output_tokens, self._usage.output
        if limit is not None and output >= limit:
            self._finish_reason = "length"
            return False
        others = len(self._blocks.calls) > len(results)
        told_to_stop = self._tools.choice == "none"
        if others or told_to_stop:  # the client's functions come first; or it called nevertheless
            return False
        self._tools.choice = self._next_choice()
        self._turn = self._make_turn()
        return True

    def _next_choice(self) -> str | None:
        """Calls are required once; past the limit there are none."""
        limit = min(self.body.max_tool_calls or MAX_TOOL_CALLS, MAX_TOOL_CALLS)
        if self._num_tool_calls >= limit:
            return "none"
        return "auto" if self._tools.functions else None

    # Events and the object

    def _emit(self, event: Event) -> None:
        if not self._keep_out and self._record is None:
            return
        data = named_event(event["type"], event)
        if self._keep_out:
            self._out.append(data)
        if self._record is not None:
            self.state.off_loop.back(self._record.append, data)

    def _flush(self) -> bytes:
        data = b"".join(self._out)
        self._out.clear()
        return data

    def _open(self, first: RequestOutput) -> bytes:
        """Say that the response has begun; the events go out with those of its first output."""
        if not self._opened:
            self._opened = True
            if self._numbers.next == 0:
                self._numbers.send("response.created", response=self.response())
            self.status = "in_progress"
            self._numbers.send("response.in_progress", response=self.response())
            self._keep()
        return b""

    def queue(self) -> None:
        """Say that the response waits (background)."""
        self._numbers.send("response.created", response=self.response())
        self._numbers.send("response.queued", response=self.response())
        self._keep()

    def _complete(self) -> None:
        stopped = self._finish_reason == "length"
        self.status = "incomplete" if stopped else "completed"
        self._incomplete = "max_output_tokens" if stopped else None
        self._completed = None if stopped else int(time.time())
        self._numbers.send(f"response.{self.status}", response=self.response())
        self._keep()

    def fail(self, error: BaseException, request_id: str = "") -> bytes:
        """End with an error: close what is open as incomplete. Returns the last events, encoded."""
        if isinstance(error, RequestError):
            name_fields(error, self.body, self._turn.plan.constrained_by)
        told = report(error, request_id)
        code = "rate_limit_exceeded" if told.status == 429 else "server_error"
        if isinstance(error, RequestError):
            code = told.code or "invalid_prompt"
        self._error = {"code": code, "message": told.message}
        return self._last("failed")

    def cancel(self) -> bytes:
        """End because somebody asked for it: close what is open as incomplete. Returns the last events,
        encoded."""
        return self._last("cancelled")

    def _last(self, status: str) -> bytes:
        if self._numbers.next == 0:
            self._numbers.send("response.created", response=self.response())
        self._close("incomplete")
        self._items.give_up()
        self.status = status
        self._numbers.send(f"response.{status}", response=self.response())
        self._keep()
        return self._flush()

    def _keep(self) -> None:
        if self._record is not None:
            self._record.response = self.response()

    def response(self) -> dict[str, Any]:
        """The response object as it is now."""
        body, params = self.body, self._turn.params
        usage = self._usage.body() if self._usage.turns else None
        raw = self._raw if body.enable_response_messages else {}
        return {
            "id": self.id, "object": "response", "created_at": self._created,
            "completed_at": self._completed, "model": self.state.engine.model.name,
            "status": self.status, "background": body.background, "error": self._error,
            "incomplete_details": self._incomplete and {"reason": self._incomplete},
            "instructions": body.instructions, "max_output_tokens": body.max_output_tokens,
            "max_tool_calls": body.max_tool_calls, "metadata": body.metadata or {},
            "output": [dict(item) for item in self._items.items],
            "parallel_tool_calls": body.parallel_tool_calls,
            "previous_response_id": body.previous_response_id,
            "prompt_cache_key": body.prompt_cache_key,
            "reasoning": _echo_reasoning(body), "safety_identifier": body.safety_identifier,
            "service_tier": "default", "store": self._stored,
            "temperature": params.temperature, "top_p": params.top_p,
            "text": _echo_text(body), "tool_choice": body.tool_choice, "tools": body.tools,
            "top_logprobs": body.top_logprobs, "truncation": body.truncation, "usage": usage,
            "user": body.user, **raw,
        }  # fmt: skip


def _input_items(body: ResponsesRequest) -> list[Any]:
    if isinstance(body.input, str):
        return [MessageItem(role="user", content=[{"type": "input_text", "text": body.input}])]
    return body.input


def _declared(item: BaseModel) -> dict[str, Any]:
    """An item's known fields."""
    made: dict[str, Any] = item.model_dump(exclude_none=True, include=set(type(item).model_fields))
    return made


def _with_id(item: dict[str, Any]) -> dict[str, Any]:
    prefix = {"message": "msg", "reasoning": "rs", "function_call": "fc"}.get(item["type"], "item")
    return {"id": new_id(prefix), **item}


def _assistant_message(blocks: Blocks) -> dict[str, Any]:
    """The answer of one turn, as a chat message."""
    texts = {kind: "\n".join(b.text for b in blocks.blocks if b.kind == kind)
             for kind in ("reasoning", "text")}  # fmt: skip
    message: dict[str, Any] = {"role": "assistant", "content": texts["text"]}
    if texts["reasoning"]:
        message["reasoning"] = texts["reasoning"]
    calls = [
        {"id": b.call_id, "type": "function", "function": {"name": b.name, "arguments": b.text}}
        for b in blocks.calls
    ]
    if calls:
        message["tool_calls"] = calls
        message["content"] = texts["text"] or None
    return message


def _echo_reasoning(body: ResponsesRequest) -> Mapping[str, Any]:
    given = body.reasoning
    return {"effort": given.effort if given else None, "summary": None}


def _echo_text(body: ResponsesRequest) -> Mapping[str, Any]:
    form = body.text.format if body.text is not None else None
    return {"format": form or {"type": "text"}}
