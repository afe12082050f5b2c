"""One answer to ``POST /v1/messages``: whole, or as events."""

from __future__ import annotations

import uuid
from collections.abc import AsyncGenerator
from contextlib import aclosing
from typing import Any

from fastapi import Request

from headrace_core.output import RequestOutput
from headrace_server.chat.blocks import Blocks, BlockStep
from headrace_server.chat.turn import ChoiceDelta, Turn, check_end
from headrace_server.protocols.anthropic.context import apply_edits
from headrace_server.protocols.anthropic.convert import chat_request
from headrace_server.protocols.anthropic.events import PING, STOP_REASONS, encode_step, whole_block
from headrace_server.protocols.anthropic.protocol import MessagesRequest
from headrace_server.requests import convert
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import DirectWriter, named_event


class MessageAnswer:
    """Checks a request when made; then either :meth:`whole` or :meth:`events`, once.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: MessagesRequest, request: Request, state: ServerState) -> None:
        convert.check_model(body.model, state.engine.model)
        body.check_fields(state)
        convert.choose_engine(request, state.engine)
        self.body, self.state = body, state
        self.id = convert.answer_id("msg_", body.request_id, request)
        apply_edits(body, state.engine.model.max_model_len)
        chat = chat_request(body, state.left_out.note)
        reasoning = state.parsers.reasoning
        if body.thinking is not None and reasoning is not None and reasoning.end_marker:
            # Without a parser nobody knows where thoughts end, and none are returned either.
            chat.thinking_token_budget = body.thinking.budget_tokens
        # Anthropic's clients must name a limit and name large ones: past the context is no error.
        chat.check_fields(state)
        self._turn = Turn(chat, state, self.id, fit=True)
        self._blocks = Blocks(0, self._call_id)
        self._last: ChoiceDelta | None = None

    async def whole(self) -> dict[str, Any]:
        """The answer in one piece."""
        await self._turn.whole(self._take)
        content = [whole_block(block) for block in self._blocks.blocks]
        usage = await self._final_usage()
        return {**self._message(content), **self._stop(), "usage": usage}

    async def events(self) -> AsyncGenerator[bytes | DirectWriter, None]:
        """The answer as server-sent events."""
        turn = self._turn
        encode_text = self._encode_text if turn.is_plain else None
        async with aclosing(
            turn.events(self._encode, encode_text, opening=lambda first: self._opening() + PING)
        ) as events:
            async for item in events:
                yield item
        usage = await self._final_usage()
        ending = {"type": "message_delta", "delta": self._stop(), "usage": usage}
        yield named_event("message_delta", ending) + named_event(
            "message_stop", {"type": "message_stop"}
        )

    def _encode(self, output: RequestOutput) -> bytes:
        return b"".join(map(encode_step, self._take(output)))

    def _encode_text(self, text: str, num_tokens: int) -> bytes:
        steps = self._blocks.take(self._turn.take_text(text, num_tokens))
        return b"".join(map(encode_step, steps))

    def _take(self, output: RequestOutput) -> list[BlockStep]:
        (piece,) = self._turn.take(output)
        steps = self._blocks.take(piece.segments)
        if piece.output.finish_reason is not None:
            self._last = piece
            steps += self._blocks.finish()
            check_end(piece.output)
        return steps

    def _opening(self) -> bytes:
        message = {**self._message([]), "stop_reason": None, "stop_sequence": None,
                   "usage": {**self._input_usage(), "output_tokens": 0}}  # fmt: skip
        return named_event("message_start", {"type": "message_start", "message": message})

    def _message(self, content: list[dict[str, Any]]) -> dict[str, Any]:
        return {"id": self.id, "type": "message", "role": "assistant",
                "model": self.state.engine.model.name, "content": content}  # fmt: skip

    def _stop(self) -> dict[str, Any]:
        """Why it ended."""
        last = self._last
        assert last is not None, "an engine's last output has a finish reason"
        output = last.output
        reason, sequence = STOP_REASONS.get(output.finish_reason or "", "end_turn"), None
        if output.finish_reason == "stop":
            if isinstance(output.stop_reason, str):
                reason, sequence = "stop_sequence", output.stop_reason
            if last.called:
                reason = "tool_use"  # a complete call wins, as in chats
        elif output.finish_reason == "length" and self._turn.params.max_tokens is None:
            reason = "model_context_window_exceeded"
        return {"stop_reason": reason, "stop_sequence": sequence}

    def _input_usage(self) -> dict[str, int]:
        """Input tokens are those that were not in the cache, as this protocol counts."""
        tally = self._turn.tally
        cached = tally.num_cached_tokens
        return {
            "input_tokens": tally.num_prompt_tokens - cached,
            "cache_creation_input_tokens": 0,
            "cache_read_input_tokens": cached,
        }

    async def _final_usage(self) -> dict[str, Any]:
        counts = await self._turn.counts()
        details = {"thinking_tokens": counts.reasoning} if counts.reasoning else None
        return {
            **self._input_usage(),
            "output_tokens": counts.output,
            "output_tokens_details": details,
        }

    def _call_id(self, index: int, name: str) -> str:
        return self._turn.call_id(0, index, name) or f"toolu_{uuid.uuid4().hex}"
