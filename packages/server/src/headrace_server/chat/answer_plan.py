"""Plans of answers to a conversation: sampling, constraint, parsers.

Every route that answers a :class:`~headrace_server.protocols.openai.bodies.chat.ChatRequest`, or something
that was brought into its form, decides these things here.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

from headrace_core import plugins
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarBackend, GrammarSpec
from headrace_core.output import CompletionOutput, RequestOutput
from headrace_core.request import ChatPrompt
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_core.text import AnswerContext, ReasoningParser
from headrace_server.chat.segments import AnswerReader
from headrace_server.chat.tool_choice import form_or_calls, plan_tools, shown
from headrace_server.chat.tool_schemas import Sources
from headrace_server.harmony.parse import HarmonyReader
from headrace_server.harmony.prompt import is_harmony
from headrace_server.parsing.answer_parser import AnswerParser
from headrace_server.parsing.registry import Parsers
from headrace_server.parsing.token_filter import by_first
from headrace_server.protocols.openai.bodies.chat import ChatRequest
from headrace_server.protocols.openai.logprobs import without_last_bytes
from headrace_server.reasoning_parsers.formats.openai_gptoss import GptOssReasoningParser
from headrace_server.requests import convert
from headrace_server.requests.constraints import asked_of
from headrace_server.state import ServerState
from headrace_server.tool_parsers.formats.openai import OpenAIToolParser
from headrace_server.tool_parsers.harmony import ENDS

_ANY_TAG = '{"format": {"type": "const_string", "value": "a"}}'
"""A structural tag that every backend serves which serves any."""
_PROMPT_END = 256
"""Characters of the prompt's end that reasoning parsers get to see."""


class AnswerPlan:
    """Sampling, constraint and parsers that follow from a body's tools, form and reasoning.

    Args:
        body: the request.
        state: the application's.

    Raises:
        RequestError: naming the field.
    """

    def __init__(self, body: ChatRequest, state: ServerState) -> None:
        self._body, self._state = body, state
        self.harmony = answers_in_harmony(state)
        """True if answers are read by the gpt-oss format, which has calls and reasoning of its own."""
        self._chosen = state.parsers
        if self.harmony:  # no flag is needed
            self._chosen = Parsers(OpenAIToolParser, state.parsers.reasoning)
        self.tools = plan_tools(
            body.tools or [],
            body.tool_choice,
            self._chosen.tools,
            forces_own=not self._calls_come_too_early() and serves_tags(state),
            parallel=body.parallel_tool_calls,
            paths=body.tool_paths,
        )
        reasoning = self._chosen.reasoning
        if body.thinking_token_budget is not None and reasoning is None:
            raise UnsupportedFeature(
                "thinking_token_budget: this server does not parse this model's reasoning; start it "
                "with --reasoning-parser NAME",
                param="thinking_token_budget",
            )
        self._check_strict()
        needs_marks = (
            self.harmony
            or self.tools.needs_special_tokens
            or (reasoning is not None and reasoning.needs_special_tokens)
        )
        self._hides = needs_marks and body.skip_special_tokens
        """True if parsers read special tokens that the client is not to see."""
        self._asked = asked_of(body)
        constraint = self._constraint()
        self._is_made = constraint is not self._asked.constraint
        """True if the constraint is not what the client sent."""
        if constraint is not None and self.tools.forced and body.ignore_eos:
            raise RequestError(
                f"ignore_eos = True: cannot be combined with tool_choice {self._choice}: forced calls "
                "end with an end token",
                param="ignore_eos",
            )
        self.params = convert.chat_params(
            body, state.engine.model, constraint, keep_special_tokens=needs_marks
        )
        self.is_parsed = self.harmony or reasoning is not None or self.tools.make_parser is not None
        """True if texts are anything but content."""

    def _constraint(self) -> StructuredOutputsParams | None:
        """The constraint on the answer. A forced call has no content that could have a form; beside
        free calls a form is that of answers without calls, if the format of calls is known."""
        tools, (field, asked) = self.tools, self._asked
        if tools.forced and asked is not None and not self._asked.is_format:
            raise RequestError(
                f"{field}: cannot be combined with tool_choice {self._choice}: exactly one constraint "
                "can apply",
                param=field,
            )
        if tools.forced or asked is None:
            return self._of_tools()
        if tools.choice == "auto" and tools.delimiters and self._asked.is_format:
            schema = asked.json if isinstance(asked.json, (dict, bool)) else {"type": "object"}
            return asked if asked.structural_tag is not None else form_or_calls(schema, tools)
        return asked

    def _of_tools(self) -> StructuredOutputsParams | None:
        """The constraint that the tools come to. It holds from the first token on where it would
        otherwise begin too late, or never."""
        gate, constraint = self._gate, self.tools.constraint
        if constraint is None or gate is None:
            return constraint
        includes_reasoning = gate.calls_before_end and self.tools.includes_reasoning
        if includes_reasoning or not gate.end_marker:
            return dataclasses.replace(constraint, enable_in_reasoning=True)
        return constraint

    @property
    def _gate(self) -> type[ReasoningParser] | None:
        """The reasoning format behind which the engine lets constraints begin: the operator's, whatever
        the route reads answers with."""
        return self._state.parsers.reasoning

    def _calls_come_too_early(self) -> bool:
        """True if the model's own calls come where no constraint can hold yet."""
        gate, tools = self._gate, self._chosen.tools
        if gate is None or tools is None:
            return False
        return gate.calls_before_end and not tools.structural_tags_include_reasoning

    def _check_strict(self) -> None:
        """Raises UnsupportedFeature if the arguments of free calls cannot be held to their schemas."""
        gate, tools = self._gate, self.tools
        if tools.choice != "auto" or tools.constraint is None or gate is None:
            return
        # Behind a thought that a budget has ended, free calls leave room for the next thought.
        bound = gate.calls_before_end and self._body.thinking_token_budget is not None
        if bound or self._calls_come_too_early():
            raise UnsupportedFeature(
                "tools: 'strict' cannot be combined with this server's reasoning parser, whose format "
                "allows calls before the end of the reasoning; send strict false"
                + (", or no thinking_token_budget" if bound else ""),
                param="tools",
            )

    @property
    def _choice(self) -> str:
        """``tool_choice`` as the client sent it, for errors."""
        sent = self._body.sent_choice
        return repr(sent) if isinstance(sent, str) else shown(sent)

    @property
    def constrained_by(self) -> str:
        """The field that the constraint came from."""
        field = self._asked.field
        return "tools" if not field or (self.tools.forced and self._asked.is_format) else field

    @contextmanager
    def naming_tools(self) -> Iterator[None]:
        """Errors of the engine about a constraint that was made of tools name the client's schemas."""
        try:
            yield
        except RequestError as error:
            if self._is_made:
                self._sources().name_in(error, self.params.structured_outputs, self.constrained_by)
            raise

    def _sources(self) -> Sources:
        """The schemas of the tools, and of the form beside them."""
        asked = self._asked.constraint
        form = None if asked is None else asked.json
        if not isinstance(form, (dict, bool)):
            return self.tools.sources
        return Sources([*self.tools.sources.schemas, ("", form)])

    async def make_readers(
        self, output: RequestOutput, prompt: ChatPrompt, *, in_order: bool
    ) -> Sequence[AnswerReader]:
        """One reader for each choice.

        Args:
            output: the first: it shows the prompt as rendered.
            prompt: the conversation.
            in_order: texts and calls are given in the model's order.
        """
        if self.harmony:
            return [self._harmony_reader() for _ in range(self._body.n)]
        context = AnswerContext()
        if self._chosen.reasoning is not None:
            context = await self._context(output, prompt)
        return [self._parser(context, in_order=in_order) for _ in range(self._body.n)]

    def _harmony_reader(self) -> HarmonyReader:
        """The reader of one choice in the gpt-oss format."""
        tools = self.tools
        return HarmonyReader(
            keep_reasoning=self._body.include_reasoning,
            one_call=not self._body.parallel_tool_calls,
            only_calls=tools.forced,
            forced=tools.make_parser() if tools.bare and tools.make_parser is not None else None,
        )

    def _parser(self, context: AnswerContext, *, in_order: bool) -> AnswerParser:
        """The operator's parsers for one choice."""
        reasoning, make_tools = self._chosen.reasoning, self.tools.make_parser
        return AnswerParser(
            reasoning(context) if reasoning is not None else None,
            make_tools() if make_tools is not None else None,
            keep_reasoning=self._body.include_reasoning,
            one_call=not self._body.parallel_tool_calls,
            only_calls=self.tools.forced,
            in_order=in_order,
            hidden=by_first(self._state.engine.model.special_tokens) if self._hides else None,
        )

    def without_end(self, part: CompletionOutput) -> CompletionOutput:
        """An output without the text of the special token that ended it, where special tokens are in the
        text only because parsers read them.

        A token of ``stop_token_ids``, and the marks that end messages of the gpt-oss format, stay in
        the text: a parser may read them, and takes them out. They have no bytes either.
        """
        if not self._hides or part.finish_reason != "stop" or isinstance(part.stop_reason, str):
            return part
        special = self._state.engine.model.special_tokens
        end = max((t for t in special if t and part.text.endswith(t)), key=len, default="")
        if not end:
            return part
        is_read = part.stop_reason is not None or (self.harmony and end in ENDS)
        text = part.text if is_read else part.text.removesuffix(end)
        logprobs = None if part.logprobs is None else without_last_bytes(part.logprobs)
        return dataclasses.replace(part, text=text, logprobs=logprobs)

    async def _context(self, output: RequestOutput, prompt: ChatPrompt) -> AnswerContext:
        """Facts that a reasoning parser may know; the end of a prompt that was cut is read anew."""
        text = output.prompt
        if text is None:
            text = await self._state.engine.detokenize(output.prompt_token_ids[-_PROMPT_END:])
        return AnswerContext(text[-_PROMPT_END:], prompt.chat_template_kwargs)


def serves_tags(state: ServerState) -> bool:
    """True if the engine serves structural tags, in which forced calls of a format are written."""
    # An engine that says nothing of it has the defaults.
    grammars = state.engine.settings.get("structured_outputs", {})
    if not grammars.get("disable_fallback") or grammars.get("backend", "auto") == "auto":
        return True
    backend: type[GrammarBackend] = plugins.load("headrace.grammar_backends", grammars["backend"])
    return not backend.refuse(GrammarSpec(backend.name, "structural_tag", _ANY_TAG))


def answers_in_harmony(state: ServerState) -> bool:
    """True if a gpt-oss model's answers are read by their own format: parsers of another one, if
    the operator chose any, win."""
    chosen = state.parsers
    return (
        is_harmony(state.engine.model)
        and chosen.tools in (None, OpenAIToolParser)
        and chosen.reasoning in (None, GptOssReasoningParser)
    )
