"""One turn of a model as typed pieces, whatever protocol asked for it.

A protocol brings its request into the form of a :class:`ChatRequest`; a :class:`Turn` runs it with
the chat route's checks and prompts and says what each output of the engine turned out to be: pieces
of reasoning, of text, of calls, in the model's order. :mod:`headrace_server.blocks` groups the
pieces; each protocol then only has to spell them.
"""

from __future__ import annotations

import dataclasses
import re
from collections.abc import AsyncGenerator, AsyncIterator, Iterable
from dataclasses import dataclass, field
from typing import Protocol

import msgspec
from msgspec import Raw

from headrace_core.engine import ServedModel
from headrace_core.errors import GenerateError, PromptTooLong, RequestError, UnsupportedFeature
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import ChatPrompt, Prompt, TextPrompt
from headrace_core.text import AnswerContext
from headrace_server import convert
from headrace_server.answers import PROMPT_END, AnswerPlan
from headrace_server.counting import Tally
from headrace_server.harmony.prompt import is_harmony, render
from headrace_server.logprobs import content_logprobs
from headrace_server.parsing import AnswerParser, is_cut
from headrace_server.protocol.chat import ChatRequest
from headrace_server.request_log import log_request
from headrace_server.segments import CallPiece, Content, Reasoning, Segment
from headrace_server.settings import ServerSettings
from headrace_server.state import ServerState
from headrace_server.stream import close
from headrace_server.tools.base import Namespace

_EDGES = re.compile(r"(?<=[>\])}\n])|(?=[<\[{])")
"""Where calls begin and end. A parser does not say whether text came before a call or after it, so
texts are fed to it in parts that hold one or the other, however the engine cut them."""


@dataclass(slots=True)
class Piece:
    """What one output of the engine added."""

    segments: list[Segment]
    logprobs: list[Raw] = field(default_factory=list)
    finish_reason: str | None = None
    stop_reason: int | str | None = None
    ends_in_call: bool = False
    """The output was cut within a call."""
    call_is_open: bool = False
    """The output was cut within the last call's arguments."""


@dataclass(slots=True)
class Counts:
    """Tokens of one turn."""

    prompt: int = 0
    cached: int = 0
    """Of the prompt: found in the cache."""
    output: int = 0
    reasoning: int = 0
    """Of the output; counted by tokenizing the reasoning again, so nearly exact, and the same
    however the output was cut."""


class DeadEnd(RequestError):
    """The request's own parameters left the model no next token."""


def check_end(piece: Piece) -> None:
    """Raise if a turn did not come to an end of its own.

    Raises:
        DeadEnd: the request is to blame; says how.
        GenerateError: the engine gave it up.
    """
    if piece.finish_reason == "error" and isinstance(piece.stop_reason, str):
        raise DeadEnd(piece.stop_reason)
    if piece.finish_reason in ("abort", "error"):
        raise GenerateError(f"the engine ended the request: {piece.finish_reason}")


class HasThoughts(Protocol):
    """Whatever read an answer's reasoning."""

    @property
    def thoughts(self) -> list[str]:
        """The reasoning in pieces, kept or not."""
        ...


class Reader(HasThoughts, Protocol):
    """Text of an answer, piece by piece -> segments."""

    @property
    def call_is_open(self) -> bool:
        """The last call's arguments are not complete."""
        ...

    @property
    def ends_in_call(self) -> bool:
        """The output was cut within a call."""
        ...

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        """Take the next piece; with ``last``, also what was held back.

        Args:
            cut: the output ends here because it was cut (:func:`headrace_server.parsing.is_cut`).
        """
        ...

    def call_id(self, index: int, name: str) -> str | None:
        """The id that the model's format gives to a call; None: any will do."""
        ...


class Turn:
    """One call of the engine. Begin it, take its outputs, close it.

    Args:
        body: the conversation, with its sampling fields; ``n`` must be 1. ``stream`` chooses
            between outputs as they come and one at the end.
        name: id of the answer; the engine's is derived.
        builtin: tools that the server calls itself, for prompts that describe them apart.
        fit: where prompt and ``max_tokens`` exceed the context, write until it is full.
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
        builtin: tuple[Namespace, ...] = (),
        fit: bool = False,
        keep_text: bool = False,
    ) -> None:
        body.check_fields(state)
        self.body, self.state, self.name = body, state, name
        self._fit, self._keep_text = fit, keep_text
        self._plan = AnswerPlan(body, state)
        self.params = self._plan.params
        self.prompt = turn_prompt(body, state, builtin)
        self.parsed = self._plan.is_parsed
        """Whether anything but plain text is looked for."""
        self._reader: Reader | None = None
        self._tally = Tally(state.metrics, self.params)
        self._outputs: AsyncIterator[RequestOutput] | None = None
        self._text: list[str] = []
        self.token_ids: list[int] = []
        self.prompt_text, self.prompt_token_ids = "", list[int]()

    async def begin(self) -> RequestOutput:
        """The first output; :attr:`outputs` has the others.

        Raises: RequestError, QueueFull, EngineDead, GenerateError.
        """
        try:
            return await self._first()
        except PromptTooLong:
            if not self._fit or self.params.max_tokens is None:
                raise
            self.params = dataclasses.replace(self.params, max_tokens=None)
            return await self._first()

    async def _first(self) -> RequestOutput:
        await self.close()
        name = convert.engine_id(self.name, 0)
        log_request(self.state.settings, name, self.params, self.prompt)
        special = special_tokens(self.prompt)
        self._outputs = self.state.engine.generate(
            self.prompt, self.params, name, priority=self.body.priority, add_special_tokens=special
        )
        with self._plan.naming_tools():
            return await anext(self._outputs)

    @property
    def outputs(self) -> AsyncIterator[RequestOutput]:
        """The outputs after the first."""
        assert self._outputs is not None, "the turn has not begun"
        return self._outputs

    async def pieces(self) -> AsyncGenerator[Piece, None]:
        """Everything from :meth:`begin` to :meth:`close`."""
        try:
            yield self.take(await self.begin())
            async for output in self.outputs:
                yield self.take(output)
        finally:
            await self.close()

    async def close(self) -> None:
        """Abort what still runs. May be called again."""
        if self._outputs is not None:
            outputs, self._outputs = self._outputs, None
            await close(outputs)

    def take(self, output: RequestOutput) -> Piece:
        """Count an output and say what it is."""
        self._tally.count(output)
        (part,) = output.outputs
        if self._reader is None:
            self.prompt_text, self.prompt_token_ids = output.prompt or "", output.prompt_token_ids
            self._reader = self._make_reader(self.prompt_text)
        if self._keep_text:
            self._text.append(part.text)
            self.token_ids += part.token_ids
        part = self._plan.without_end(part)
        cut = is_cut(part)
        segments = self._reader.feed(part.text, last=part.finished(), cut=cut)
        piece = Piece(segments, self._logprobs(part), part.finish_reason, part.stop_reason)
        if cut:
            piece.ends_in_call = self._reader.ends_in_call
            piece.call_is_open = self._reader.call_is_open
        return piece

    @property
    def text(self) -> str:
        """What the model wrote, if it was to be kept."""
        return "".join(self._text)

    def call_id(self, index: int, name: str) -> str | None:
        """See :meth:`Reader.call_id`."""
        return None if self._reader is None else self._reader.call_id(index, name)

    async def counts(self) -> Counts:
        """Tokens so far."""
        tally = self._tally
        if self._reader is not None:
            tally.num_reasoning_tokens = await reasoning_tokens(self.state, [self._reader])
        return Counts(
            tally.num_prompt_tokens,
            tally.num_cached_tokens,
            tally.num_output_tokens,
            min(tally.num_reasoning_tokens, tally.num_output_tokens),
        )

    @property
    def num_prompt_tokens(self) -> int:
        return self._tally.num_prompt_tokens

    @property
    def num_cached_tokens(self) -> int:
        return self._tally.num_cached_tokens

    def _make_reader(self, prompt: str) -> Reader:
        if self._plan.harmony:
            return self._plan.make_reader()
        kwargs = self.prompt.chat_template_kwargs if isinstance(self.prompt, ChatPrompt) else {}
        parser = self._plan.make_parser(AnswerContext(prompt[-PROMPT_END:], kwargs))
        return _ParserReader(parser, seeks_calls=self._plan.tools.make_parser is not None)

    def _logprobs(self, part: CompletionOutput) -> list[Raw]:
        if not self.body.logprobs or part.logprobs is None:
            return []
        as_ids = convert.tokens_as_ids(self.body, self.state.settings)
        count = self.body.top_logprobs or 0
        entries = content_logprobs(part.token_ids, part.logprobs, count, as_ids)
        return [Raw(msgspec.json.encode(entry)) for entry in entries]


class _ParserReader:
    """The operator's parsers as a :class:`Reader`."""

    def __init__(self, parser: AnswerParser, *, seeks_calls: bool) -> None:
        self._parser, self._seeks_calls = parser, seeks_calls
        self.thoughts = parser.thoughts

    @property
    def call_is_open(self) -> bool:
        return self._parser.call_is_open

    @property
    def ends_in_call(self) -> bool:
        return self._parser.ends_in_call

    def feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        parts = _EDGES.split(text) if self._seeks_calls else [text]
        segments: list[Segment] = []
        for part in parts[:-1]:
            segments += self._feed(part, last=False)
        return segments + self._feed(parts[-1], last=last, cut=cut)

    def _feed(self, text: str, *, last: bool, cut: bool = False) -> list[Segment]:
        called = self._parser.called
        parsed = self._parser.feed(text, last=last, cut=cut)
        calls = [CallPiece(c.index, c.name, c.arguments) for c in parsed.tool_calls]
        said = [Content(parsed.content)] if parsed.content else []
        thought = [Reasoning(parsed.reasoning)] if parsed.reasoning else []
        # Once a call has begun, what comes along with a piece of it is what follows it.
        return [*thought, *calls, *said] if called else [*thought, *said, *calls]

    def call_id(self, index: int, name: str) -> str | None:
        return self._parser.own_id(index, name)


def can_chat(model: ServedModel, settings: ServerSettings) -> bool:
    """Whether conversations can be written for a model: by a template, or in the gpt-oss format."""
    return model.has_chat_template or settings.chat_template is not None or is_harmony(model)


def need_template(model: ServedModel, settings: ServerSettings, template: str | None) -> None:
    """Raises UnsupportedFeature if conversations cannot be written, not even by a request's own
    template."""
    if not can_chat(model, settings) and template is None:
        raise UnsupportedFeature(
            "messages: the model has no chat template; start the server with --chat-template",
            param="messages",
        )


async def reasoning_tokens(state: ServerState, readers: Iterable[HasThoughts]) -> int:
    """Tokens of what was thought, shown or not; by tokenizing it again, so nearly exact."""
    count = 0
    for reader in readers:
        if thought := "".join(reader.thoughts):
            again = await state.engine.tokenize(thought, add_special_tokens=False)
            count += len(again.token_ids)
    return count


def special_tokens(prompt: Prompt) -> bool | None:
    """Whether the tokenizer adds special tokens: a rendered text has its own."""
    return None if isinstance(prompt, ChatPrompt) else False


async def count_tokens(state: ServerState, prompt: Prompt) -> int:
    """Tokens of a prompt of :func:`turn_prompt`, as it would be run."""
    special = special_tokens(prompt)
    return len((await state.engine.tokenize(prompt, add_special_tokens=special)).token_ids)


def turn_prompt(
    body: ChatRequest, state: ServerState, builtin: tuple[Namespace, ...] = ()
) -> Prompt:
    """What the engine is given for a body: see :func:`spelled`.

    Raises:
        RequestError: naming the message and part.
    """
    return spelled(chat_of(body, state), state, builtin)


def chat_of(body: ChatRequest, state: ServerState) -> ChatPrompt:
    """The conversation of a body, its messages and settings in one form.

    Raises:
        RequestError: naming the message and part.
    """
    drops = state.settings.exclude_tools_when_tool_choice_none
    return convert.chat_prompt(
        body,
        state,
        salt=body.cache_salt,
        with_tools=not (drops and body.tool_choice == "none"),
        effort=body.reasoning_effort,
        verbosity=body.verbosity,
    )


def spelled(
    chat: ChatPrompt, state: ServerState, builtin: tuple[Namespace, ...] = ()
) -> ChatPrompt | TextPrompt:
    """A conversation for the model's template, or in the gpt-oss format as we write it.

    A template that the operator (or a trusted client) brought wins over both.

    Args:
        builtin: tools that the server calls itself.

    Raises:
        RequestError: the format cannot say something; naming the field.
    """
    brought = chat.chat_template is not None or state.chat_template is not None
    if not is_harmony(state.engine.model) or brought:
        return chat
    text = TextPrompt(
        prompt=render(chat, builtin, special_tokens=state.engine.model.special_tokens)
    )
    if chat.cache_salt is not None:
        text["cache_salt"] = chat.cache_salt
    return text
