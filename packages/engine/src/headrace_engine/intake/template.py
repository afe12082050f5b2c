"""Chats to prompts: which template, with which variables, rendered where."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.request import ChatPrompt
from headrace_core.text import Tokenizer
from headrace_engine.intake.content import (
    CONTENT_FORMATS,
    detect_content_format,
    normalize_messages,
)
from headrace_engine.intake.media import ChatMedia
from headrace_engine.intake.render_worker import (
    RenderFailed,
    RenderTimeout,
    RenderWorker,
    describe_error,
)
from headrace_engine.intake.sandbox import render_template

WORKER_ABOVE = 256 * 1024
"""Characters of messages and tools from which a trusted template, too, renders in the worker."""
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
"""Names that ``chat_template_kwargs`` may not set."""


class ChatRenderer:
    """Renders chats. Thread-safe.

    The template is, in this order: the prompt's own (if trusted), the operator's, the checkpoint's
    named ``tool_use`` if tools are given, the checkpoint's default.

    Args:
        tokenizer: for its template and the texts of its special tokens.
        template: the operator's.
        content_format: ``auto``, ``string`` or ``openai``; a prompt may say otherwise.
        trust_request_template: whether prompts may bring templates. Those always render in a
            process that is killed after a second.
        max_output_chars: cap on what a template may produce.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        template: str | None = None,
        content_format: str = "auto",
        trust_request_template: bool = False,
        max_output_chars: int = 1 << 20,
    ) -> None:
        self._special_tokens = dict(tokenizer.special_tokens)
        self._named: Mapping[str, str] = getattr(tokenizer, "chat_templates", {})
        self._own = template
        self._default = tokenizer.chat_template
        self._content_format = content_format
        self._trust = trust_request_template
        self._max_chars = max_output_chars
        self._worker = RenderWorker()

    def render(self, prompt: ChatPrompt, media: ChatMedia | None = None) -> str:
        """The prompt's text.

        Args:
            media: gets what the messages bring besides text; None: they may bring none.

        Raises:
            RequestError: no template, wrong messages, or the template failed or refused.
        """
        source, foreign = self._source(prompt)
        messages = normalize_messages(prompt.messages, self._format(prompt, source), media)
        variables = self._variables(prompt, messages)
        text = self._render(source, variables, in_worker=foreign or _is_large(variables))
        if prompt.continue_final_message:
            return _cut_after_final_message(text, messages[-1])
        return text

    def render_pair(self, query: str, document: str, template: str, *, foreign: bool) -> str:
        """A pair's prompt: the template gets two messages, of the roles ``query`` and ``document``.

        Args:
            foreign: the template is a caller's; it renders in the worker process.

        Raises:
            RequestError: the template failed or refused; with its message.
        """
        variables: dict[str, Any] = {
            **self._special_tokens,
            "messages": [
                {"role": "query", "content": query},
                {"role": "document", "content": document},
            ],
            "add_generation_prompt": False,
        }
        return self._render(template, variables, in_worker=foreign or _is_large(variables))

    def close(self) -> None:
        """End the worker process, if there is one."""
        self._worker.close()

    def _source(self, prompt: ChatPrompt) -> tuple[str, bool]:
        """(template, whether it is the request's own)."""
        if prompt.chat_template is not None:
            if prompt.chat_template in self._named:
                return self._named[prompt.chat_template], False
            if not self._trust:
                raise RequestError(
                    "chat_template: templates in requests are refused; the operator can allow "
                    "them with --trust-request-chat-template",
                    param="chat_template",
                )
            return prompt.chat_template, True
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

    def _format(self, prompt: ChatPrompt, source: str) -> str:
        wanted = prompt.content_format if prompt.content_format != "auto" else self._content_format
        if wanted not in CONTENT_FORMATS:
            raise RequestError(
                f"content_format = {wanted!r}: must be one of {', '.join(CONTENT_FORMATS)}",
                param="content_format",
            )
        return detect_content_format(source) if wanted == "auto" else wanted

    def _variables(self, prompt: ChatPrompt, messages: list[dict[str, Any]]) -> dict[str, Any]:
        if prompt.continue_final_message and prompt.add_generation_prompt:
            raise RequestError(
                "continue_final_message = True: needs add_generation_prompt = False",
                param="continue_final_message",
            )
        shadowed = sorted(
            (RESERVED | self._special_tokens.keys()) & prompt.chat_template_kwargs.keys()
        )
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
        }

    def _render(self, source: str, variables: Mapping[str, Any], in_worker: bool) -> str:
        try:
            if in_worker:
                return self._worker.render(source, variables, self._max_chars)
            return render_template(source, variables, self._max_chars)
        except (RenderFailed, RenderTimeout) as error:
            reason = str(error)
        except Exception as error:  # whatever an expression in the template raises
            reason = describe_error(error)
        raise RequestError(f"messages: the chat template failed: {reason}", param="messages")


def _is_large(variables: Mapping[str, Any]) -> bool:
    """Whether rendering might take long for its input's sake alone."""
    try:
        return len(json.dumps(variables)) > WORKER_ABOVE
    except (TypeError, ValueError):
        return False  # holds what JSON cannot: only Python callers can make that


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
