"""One turn of a model: a conversation to the engine, its outputs to pieces of one or several answers.

Chat completions, responses and messages are spellings of it. A protocol brings its request into the
form of a :class:`ChatRequest`; a :class:`Turn` makes prompt, sampling and parsers of it, runs it, and
says what each output of the engine turned out to be: pieces of reasoning, of text, of calls. The
protocol only writes them down: as they are (chats) or grouped (:mod:`headrace_server.chat.blocks`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import AsyncGenerator, AsyncIterator, Callable, Sequence
from dataclasses import dataclass

from msgspec import Struct

from headrace_core.engine import OutputStream
from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_server.chat.answer_plan import AnswerPlan
from headrace_server.chat.beam import beam_outputs, beams_of
from headrace_server.chat.prompts import chat_prompt_of, engine_prompt, special_tokens
from headrace_server.chat.segments import AnswerReader, Content, Segment
from headrace_server.observability.request_log import log_request
from headrace_server.observability.tally import Tally
from headrace_server.parsing.answer_parser import is_cut
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.requests import convert
from headrace_server.state import ServerState
from headrace_server.streaming.event_stream import DirectWriter, close
from headrace_server.streaming.offload import cost_of
from headrace_server.tools.base import Namespace

Encode = Callable[[RequestOutput], bytes]
"""The events of an output; b"" for none."""
EncodeText = Callable[[str, int], bytes]
"""The events of new text and the number of its tokens, where an output says no more."""


class ChoiceDelta(Struct):
    """The part that one output of the engine added to one choice."""

    segments: list[Segment]
    output: CompletionOutput
    """As the client may see it: without the text of a special token that ended it."""
    called: bool = False
    """The model ended the answer, with calls that are all complete."""
    ends_in_call: bool = False
    """The output was cut within a call."""
    call_is_open: bool = False
    """The output was cut within the last call's arguments."""


@dataclass(slots=True)
class TokenCounts:
    """Tokens of one turn."""

    prompt: int = 0
    cached: int = 0
    """Tokens of the prompt that were found in the cache."""
    output: int = 0
    reasoning: int = 0
    """Tokens of the output; counted by tokenizing the reasoning again, so nearly exact, and the same
    however the output was cut."""


class DeadEnd(RequestError):
    """The request's own parameters left the model no next token."""


def check_end(output: CompletionOutput) -> None:
    """Raise if a turn did not come to an end of its own.

    Raises:
        DeadEnd: the request is to blame; says how.
        GenerateError: the engine gave it up.
    """
    if output.finish_reason == "error" and isinstance(output.stop_reason, str):
        raise DeadEnd(output.stop_reason)
    if output.finish_reason in ("abort", "error"):
        raise GenerateError(f"the engine ended the request: {output.finish_reason}")


class Turn:
    """One call of the engine. Run it with :meth:`whole` or :meth:`events`, once.

    Args:
        body: the conversation, with its sampling fields, already checked
            (:meth:`~headrace_server.protocols.base.RequestBody.check_fields`). ``stream`` chooses
            between outputs as they come and one at the end.
        name: id of the answer; the engine's is derived.
        position: among the conversations of one call.
        builtin: tools that the server calls itself, for prompts that describe them apart.
        fit: where prompt and ``max_tokens`` exceed the context, write until it is full.
        in_order: pieces hold texts and calls in the model's order, for protocols whose answers are
            lists of both.
        keep_text: remember text and token ids (:attr:`text`, :attr:`token_ids`).

    Raises:
        RequestError: naming a field of ``body``.
    """

    def __init__(
        self,
        body: ChatRequest,
        state: ServerState,
        name: str,
        *,
        position: int = 0,
        builtin: tuple[Namespace, ...] = (),
        fit: bool = False,
        in_order: bool = True,
        keep_text: bool = False,
    ) -> None:
        self.body, self.state, self.name = body, state, name
        self._position, self._fit, self._in_order = position, fit, in_order
        self._keep_text = keep_text
        self.plan = AnswerPlan(body, state)
        self.params = self.plan.params
        self._beams = beams_of(body, self.params.max_tokens)
        if self._beams is not None:
            self._check_beams()
        self.chat = chat_prompt_of(body, state)
        """The conversation, for the model's template."""
        self.prompt = engine_prompt(self.chat, state, builtin)
        """The same as the engine is given it."""
        self.is_plain = not (
            self.plan.is_parsed or keep_text or body.logprobs or body.return_token_ids
        )
        """True if an answer is its text, and nothing else of an output is looked at."""
        self.tally = Tally(state.metrics, self.params)
        """Tokens of the prompt and of all choices."""
        self._readers: Sequence[AnswerReader] = ()
        """Readers of the choices, by index; made from the first output."""
        self._outputs: AsyncIterator[RequestOutput] | None = None
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.prompt_text, self.prompt_token_ids = "", list[int]()

    def _check_beams(self) -> None:
        if self.params.structured_outputs is not None:
            raise UnsupportedFeature(
                "tool_choice: cannot be combined with use_beam_search", param="tool_choice"
            )
        if self.plan.harmony:
            raise UnsupportedFeature(
                "use_beam_search: beams return texts without special tokens, which this model's parser needs",
                param="use_beam_search",
            )

    # The run

    async def whole(self, take: Callable[[RequestOutput], object]) -> None:
        """Run to the end.

        Args:
            take: gets every output, beside the event loop where that costs much.

        Raises: RequestError, QueueFull, EngineDead, GenerateError; what ``take`` raises.
        """
        off_loop = self.state.off_loop
        try:
            output = await self._begin()
            await off_loop(cost_of(output), take, output)
            async for output in self._rest():
                await off_loop(cost_of(output), take, output)
        finally:
            await self._close()

    async def events(
        self,
        encode: Encode,
        encode_text: EncodeText | None = None,
        *,
        opening: Callable[[RequestOutput], bytes] = lambda first: b"",
        cost: Callable[[RequestOutput], int] = cost_of,
        direct: bool = True,
    ) -> AsyncGenerator[bytes | DirectWriter, None]:
        """Run; the events of every output. From the second on they are written directly, if the engine
        pushes its outputs.

        Args:
            encode: an output's events.
            encode_text: the same of new text of the only choice, where that is all; only of a turn
                that :attr:`is_plain`.
            opening: events before those of the first output, whose prompt is counted already.
            cost: of an output's events.
            direct: False: there is no socket to write to.

        Raises: RequestError, QueueFull, EngineDead, GenerateError; what the functions raise.
        """
        off_loop = self.state.off_loop
        try:
            first = await self._begin()
            data = opening(first) + await off_loop(cost(first), encode, first)
            if data:
                yield data
            outputs = self._rest()
            if direct and isinstance(outputs, OutputStream) and not first.finished:
                yield DirectWriter(outputs, encode, encode_text, off_loop=off_loop, cost=cost)
                return
            async for output in outputs:
                if data := await off_loop(cost(output), encode, output):
                    yield data
        finally:
            await self._close()

    async def _begin(self) -> RequestOutput:
        try:
            first = await self._first()
        except PromptTooLong:
            if not self._fit or self.params.max_tokens is None:
                raise
            self.params = dataclasses.replace(self.params, max_tokens=None)
            first = await self._first()
        self.tally.count_prompt(first)
        self.prompt_text, self.prompt_token_ids = first.prompt or "", first.prompt_token_ids
        self._readers = await self.plan.make_readers(first, self.chat, in_order=self._in_order)
        return first

    async def _first(self) -> RequestOutput:
        await self._close()
        self._outputs = self._generate()
        with self.plan.naming_tools():
            return await anext(self._outputs)

    def _generate(self) -> AsyncIterator[RequestOutput]:
        name = convert.engine_id(self.name, self._position)
        log_request(self.state, name, self.params, self.prompt)
        engine, special = self.state.engine, special_tokens(self.prompt)
        if self._beams is not None:
            return beam_outputs(
                engine,
                self.prompt,
                self._beams,
                name,
                priority=self.body.priority,
                add_special_tokens=special,
            )
        return engine.generate(
            self.prompt,
            self.params,
            name,
            priority=self.body.priority,
            add_special_tokens=special,
        )

    def _rest(self) -> AsyncIterator[RequestOutput]:
        assert self._outputs is not None, "the turn has not begun"
        return self._outputs

    async def _close(self) -> None:
        """Abort what still runs."""
        if self._outputs is not None:
            outputs, self._outputs = self._outputs, None
            await close(outputs)

    # Outputs

    def take(self, output: RequestOutput) -> list[ChoiceDelta]:
        """Count an output and read what it adds to each choice."""
        self.tally.count(output)
        if self._keep_text:
            for part in output.outputs:
                self._text.append(part.text)
                self.token_ids += part.token_ids
        return [self.read(part, last=output.finished) for part in output.outputs]

    def take_text(self, text: str, num_tokens: int) -> list[Segment]:
        """The same of new text of the only choice, of a turn that :attr:`is_plain`."""
        self.tally.add(num_tokens)
        return [Content(text)] if text else []

    def read(self, part: CompletionOutput, *, last: bool = False) -> ChoiceDelta:
        """Read what was added to one choice, which the caller has counted.

        Args:
            last: no more comes of any choice.
        """
        part, reader = self.plan.without_end(part), self._readers[part.index]
        cut = is_cut(part)
        piece = ChoiceDelta(reader.feed(part.text, last=last or part.finished(), cut=cut), part)
        if cut:
            piece.ends_in_call, piece.call_is_open = reader.ends_in_call, reader.call_is_open
        if part.finish_reason == "stop":
            piece.called = reader.called and not piece.ends_in_call
        return piece

    def call_id(self, choice: int, index: int, name: str) -> str | None:
        """The id that the model's format gives to a call; None: any will do."""
        return self._readers[choice].call_id(index, name) if self._readers else None

    # What was said

    @property
    def text(self) -> str:
        """Text that the model wrote, if it was to be kept."""
        return "".join(self._text)

    async def counts(self) -> TokenCounts:
        """Tokens so far."""
        tally = self.tally
        await self.count_reasoning()
        return TokenCounts(
            tally.num_prompt_tokens,
            tally.num_cached_tokens,
            tally.num_output_tokens,
            min(tally.num_reasoning_tokens, tally.num_output_tokens),
        )

    async def count_reasoning(self) -> None:
        """Put the tokens of what was thought, shown or not, into :attr:`tally`; by tokenizing it again, so
        nearly exact."""
        count = 0
        for reader in self._readers:
            if thought := "".join(reader.thoughts):
                again = await self.state.engine.tokenize(thought, add_special_tokens=False)
                count += len(again.token_ids)
        self.tally.num_reasoning_tokens = count
