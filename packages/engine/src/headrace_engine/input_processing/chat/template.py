"""Chats to prompts: which template, with which variables, rendered where.

jinja2 is imported with the first chat (:mod:`~headrace_engine.input_processing.chat.sandbox`): a start does
without.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from typing import Any, Literal

from headrace_core.errors import PromptTooLong, RequestError
from headrace_core.request import ChatPrompt
from headrace_core.text import GuardableTokenizer, Tokenizer
from headrace_engine.input_processing.chat.content import (
    CONTENT_FORMATS,
    PairSides,
    normalize_messages,
)
from headrace_engine.input_processing.chat.render_worker import (
    RenderFailed,
    RenderTimeout,
    RenderWorker,
    describe_error,
)
from headrace_engine.input_processing.chat.roles import left_out, own_roles, without_contents
from headrace_engine.input_processing.control_tokens import MessageGuard, RenderedPrompt
from headrace_engine.input_processing.media import ChatMedia

WORKER_ABOVE = 256 * 1024
"""Characters of messages and tools from which a trusted template, too, renders in the worker."""
CHARS_PER_TOKEN = 16
"""Characters of a rendered chat for each token of the context, at most. Ordinary text has 4, deeply
indented code 8; a chat that is longer than this is not worth tokenizing."""
_MARKUP_CHARS = 65_536
"""Characters that a template may add besides."""
_MOST_LEFT_OUT = 4
"""A chat this many times longer than a template may write is not rendered at all."""
_MOST_ADDED = 4
"""A template that writes more than so many times what it is given is at fault itself."""
RESERVED = frozenset(
    {
        "messages",
        "tools",
        "documents",
        "add_generation_prompt",
        "continue_final_message",
        "chat_template",
        "conversation",
        "tokenize",
        "raise_exception",
        "strftime_now",
        "range",
        "namespace",
        "dict",
        "cycler",
        "joiner",
        "lipsum",
    }
)
"""Names that ``chat_template_kwargs`` may not set, beside those of generation marks."""

PromptTemplates = Literal["refused", "isolated", "trusted"]
"""Treatment of a template that comes with a prompt: an error; a client's, rendered in a process that is
killed after a second; or the operator's own."""

_HELLO = {"role": "user", "content": "Hello"}


class ChatRenderer:
    """Renders chats. Thread-safe.

    The template is, in this order: the prompt's own (unless refused), the operator's, the checkpoint's
    named ``tool_use`` if tools are given, the checkpoint's default.

    Args:
        tokenizer: for its template and the texts of its special tokens.
        template: the operator's.
        content_format: ``auto``, ``string`` or ``openai``; a prompt may say otherwise.
        prompt_templates: how templates are treated that prompts bring.
        allow_control_tokens: text of special tokens in messages becomes these tokens.
        max_model_len: the context, in tokens; it bounds what a template may produce.
        media_tokens: texts of tokens that stand for media, which no turn of a user or an assistant may write.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        content_format: str = "auto",
        prompt_templates: PromptTemplates = "refused",
        allow_control_tokens: bool = False,
        max_model_len: int = 1 << 16,
        media_tokens: Iterable[str] = (),
    ) -> None:
        self._special_tokens = dict(tokenizer.special_tokens)
        self._named: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
        self._own = template
        self._default = tokenizer.chat_template
        self._content_format = content_format
        self._prompt_templates = prompt_templates
        self._guard = None if allow_control_tokens else MessageGuard(_special_texts(tokenizer))
        self._media_tokens = frozenset(media_tokens)
        self._max_model_len = max_model_len
        self._worker = RenderWorker()

    @property
    def allows_control_tokens(self) -> bool:
        """True if control tokens in messages are what they look like."""
        return self._guard is None

    def limit_context(self, max_model_len: int) -> None:
        """Take over another context, in tokens."""
        self._max_model_len = max_model_len

    def render(
        self,
        prompt: ChatPrompt,
        media: ChatMedia | None = None,
        generation_marks: tuple[str, str] | None = None,
    ) -> RenderedPrompt:
        """The prompt's text, in which control tokens of messages are guarded.

        Args:
            media: gets what the messages bring besides text; None: they may bring none.
            generation_marks: written at the beginning and at the end of each ``{% generation %}`` block.

        Raises:
            RequestError: no template, wrong messages, or the template failed or refused.
            PromptTooLong: the chat is far longer than the context.
        """
        source, isolated = self._source(prompt)
        roles = own_roles(prompt.messages, source)
        prompt, guard = self._protect(prompt, source, isolated)
        content_format = self._format(prompt, source, in_worker=isolated)
        messages = normalize_messages(prompt.messages, content_format, media)
        variables = self._variables(prompt, messages, generation_marks)
        template = "chat_template" if prompt.chat_template is not None else ""
        text = self._render(source, variables, isolated, "messages", template)
        without = without_contents(messages, roles) if roles else None
        if without is not None and self._writes(
            text, source, {**variables, "messages": without}, isolated
        ):
            raise left_out(roles)
        if prompt.continue_final_message:
            text = _cut_after_final_message(text, messages[-1])
        return self._settle(text, guard)

    def render_parts(self, sides: PairSides, template: str, media: ChatMedia) -> RenderedPrompt:
        """As :meth:`render_pair`, of sides that are texts or lists of parts.

        Args:
            media: gets what the sides bring besides text, in the order in which the prompt has it.
        """
        from headrace_engine.input_processing.chat.content_format import detect_content_format

        chat, guard = self._protect(ChatPrompt(sides.messages()), template, isolated=False)
        content_format = detect_content_format(template)
        step = -1 if self._begins_with_document(template, content_format) else 1
        messages = sides.normalize(chat.messages[::step], content_format, media)[::step]
        return self._settle(self._render_sides(template, messages), guard)

    def _begins_with_document(self, template: str, content_format: str) -> bool:
        """True if a template writes the document before the query."""
        query, document = "\ue000", "\ue001"  # characters of no script
        marks = PairSides(query, document)
        messages = marks.normalize(marks.messages(), content_format, ChatMedia(None))
        text = self._render_sides(template, messages)
        return -1 < text.find(document) < text.find(query)

    def _render_sides(self, template: str, messages: list[dict[str, Any]]) -> str:
        variables = {**self._special_tokens, "messages": messages, "add_generation_prompt": False}
        return self._render(template, variables, False, "prompt")

    def render_pair(self, query: str, document: str, template: str) -> RenderedPrompt:
        """A pair's prompt: the template gets two messages, of the roles ``query`` and ``document``.

        Args:
            template: the operator's or the checkpoint's; no request brings one for pairs.

        Raises:
            RequestError: the template failed or refused; with its message.
            PromptTooLong: the texts are far longer than the context.
        """
        guard = ""
        if self._guard is not None:
            (query, document), guard = self._guard.protect_text(query, document)
        messages = PairSides(query, document).messages()
        return self._settle(self._render_sides(template, messages), guard)

    def close(self) -> None:
        """End the worker process, if there is one."""
        self._worker.close()

    def _protect(self, prompt: ChatPrompt, source: str, isolated: bool) -> tuple[ChatPrompt, str]:
        guard = self._guard
        if guard is None:
            return prompt, ""
        if isolated:  # not rendered in this process
            return guard.protect(prompt, lambda: self._media_tokens)
        return guard.protect(prompt, lambda: self._turn_tokens(guard, source) | self._media_tokens)

    def _turn_tokens(self, guard: MessageGuard, source: str) -> frozenset[str]:
        """Control tokens that a template puts around a user's turn, and the end token: none of them
        is inside an assistant's turn."""
        from headrace_engine.input_processing.chat.content_format import detect_content_format
        from headrace_engine.input_processing.chat.sandbox import render_template

        variables = {
            **self._special_tokens,
            "messages": normalize_messages([_HELLO], detect_content_format(source)),
            "add_generation_prompt": False,
        }
        try:
            text = render_template(source, variables, self._max_chars())
        except Exception:  # whatever an expression in the template raises
            text = ""
        return guard.found_in(text + self._special_tokens.get("eos_token", ""))

    def _settle(self, text: str, guard: str) -> RenderedPrompt:
        return RenderedPrompt(text) if self._guard is None else self._guard.settle(text, guard)

    def _source(self, prompt: ChatPrompt) -> tuple[str, bool]:
        """(template, whether it must render in the worker)."""
        if prompt.chat_template is not None:
            if prompt.chat_template in self._named:
                return self._named[prompt.chat_template], False
            if self._prompt_templates == "refused":
                raise RequestError(
                    "chat_template: templates in requests are refused; the operator can allow "
                    "them with --trust-request-chat-template",
                    param="chat_template",
                )
            return prompt.chat_template, self._prompt_templates == "isolated"
        if self._own is not None:
            return self._own, False
        if prompt.tools and "tool_use" in self._named:
            return self._named["tool_use"], False
        if self._default is None:
            raise RequestError(
                "messages: the model has no chat template; the operator can give one with "
                "--chat-template",
                param="messages",
            )
        return self._default, False

    def _format(self, prompt: ChatPrompt, source: str, in_worker: bool) -> str:
        from headrace_engine.input_processing.chat.content_format import detect_content_format

        wanted = prompt.content_format if prompt.content_format != "auto" else self._content_format
        if wanted not in CONTENT_FORMATS:
            raise RequestError(
                f"content_format = {wanted!r}: must be one of {', '.join(CONTENT_FORMATS)}",
                param="content_format",
            )
        if wanted != "auto":
            return wanted
        if not in_worker:
            return detect_content_format(source)
        try:
            return self._worker.content_format(source)
        except (RenderFailed, RenderTimeout) as error:
            raise RequestError(
                f"chat_template: cannot be read: {error}", param="chat_template"
            ) from None

    def _variables(
        self,
        prompt: ChatPrompt,
        messages: list[dict[str, Any]],
        generation_marks: tuple[str, str] | None,
    ) -> dict[str, Any]:
        from headrace_engine.input_processing.chat.sandbox import GENERATION_BEGIN, GENERATION_END

        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise RequestError(
                "continue_final_message = True: needs add_generation_prompt = False",
                param="continue_final_message",
            )
        marks = (GENERATION_BEGIN, GENERATION_END)
        reserved = RESERVED.union(self._special_tokens, marks)
        shadowed = sorted(reserved & prompt.chat_template_kwargs.keys())
        if shadowed:
            raise RequestError(
                f"chat_template_kwargs.{shadowed[0]}: this name is the renderer's own",
                param=f"chat_template_kwargs.{shadowed[0]}",
            )
        return {
            **self._special_tokens,
            **prompt.chat_template_kwargs,
            "messages": messages,
            "tools": list(prompt.tools) if prompt.tools else None,
            "documents": list(prompt.documents) if prompt.documents else None,
            "add_generation_prompt": prompt.add_generation_prompt,
            **(dict(zip(marks, generation_marks, strict=True)) if generation_marks else {}),
        }

    def _writes(self, text: str, source: str, variables: Mapping[str, Any], isolated: bool) -> bool:
        """True if a template makes this text of these variables, too."""
        try:
            return self._render(source, variables, isolated, "messages") == text
        except RequestError:  # it needs what was taken out
            return False

    def _render(
        self,
        source: str,
        variables: Mapping[str, Any],
        foreign: bool,
        param: str,
        template_param: str = "",
    ) -> str:
        """The text that a template writes.

        Args:
            foreign: a client wrote the template.
            param: the field that is too long, if the text is.
            template_param: the field that the template came in; "": it is the operator's or the model's.
        """
        from headrace_engine.input_processing.chat.sandbox import OutputTooLong, render_template

        size, most = _size(variables), self._max_chars()
        # A template may leave out what it is given, an earlier turn's reasoning say, but not most.
        if size > _MOST_LEFT_OUT * most:
            raise self._too_long(param)
        try:
            if foreign or size > WORKER_ABOVE:
                return self._worker.render(source, variables, most)
            return render_template(source, variables, most)
        except OutputTooLong as error:
            if size > most // _MOST_ADDED:
                raise self._too_long(param) from None
            reason = str(error)
        except (RenderFailed, RenderTimeout) as error:
            reason = str(error)
        except Exception as error:  # whatever an expression in the template raises
            reason = describe_error(error)
        blamed = template_param or param
        raise RequestError(f"{blamed}: the chat template failed: {reason}", param=blamed)

    def _max_chars(self) -> int:
        """Most characters that a template may write."""
        return CHARS_PER_TOKEN * self._max_model_len + _MARKUP_CHARS

    def _too_long(self, source: str) -> PromptTooLong:
        limit = self._max_model_len
        return PromptTooLong(limit, limit + 1, at_least=True, param=source, source=source)


def _special_texts(tokenizer: Tokenizer) -> set[str]:
    if isinstance(tokenizer, GuardableTokenizer):
        return set(tokenizer.special_texts.values())
    return {tokenizer.token_string(token_id) for token_id in tokenizer.special_token_ids}


def _size(variables: Mapping[str, Any]) -> int:
    """Characters of a template's input."""
    try:
        return len(json.dumps(variables, ensure_ascii=False))
    except (TypeError, ValueError):
        return 0  # holds what JSON cannot: only Python callers can make that


def _cut_after_final_message(text: str, message: Mapping[str, Any]) -> str:
    """Drop what the template put after the last message, so that the model continues it."""
    content = message["content"]
    final = content if isinstance(content, str) else content[-1].get("text", "") if content else ""
    at = text.rfind(final.strip())
    if not final.strip() or at < 0:
        raise RequestError(
            "continue_final_message: the chat template does not write the last message as it is",
            param="continue_final_message",
        )
    whole = final.lstrip()
    return (
        text[: at + len(whole)] if text.startswith(whole, at) else text[: at + len(final.strip())]
    )
