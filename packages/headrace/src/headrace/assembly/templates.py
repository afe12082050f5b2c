"""Settings for rendering chats: the operator's template, and who else may bring one.

A server's template is tried before weights are read: a chat that is as simple as can be shows what would
fail with every request.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.assembly.missing_packages import missing
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_core.pooling import PoolingInfo
    from headrace_core.text import Tokenizer
    from headrace_engine.input_processing.chat.template import PromptTemplates
    from headrace_server.settings import ServerSettings

logger = logging.getLogger("headrace")

USER = {"role": "user", "content": "Hello"}
SIMPLE_CHATS: Sequence[Sequence[Mapping[str, str]]] = (
    (USER,),
    ({"role": "system", "content": "Be brief."}, USER),
    ({"role": "query", "content": "Hello"}, {"role": "document", "content": "Hello"}),
)
"""The simplest inputs of a template: chats with and without a system message, and a pair to be scored."""
PLACEHOLDER_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
}
"""Names that templates use, where the tokenizer has not been read."""
MAX_CHARS = 1 << 20


class TemplateSettings(NamedTuple):
    """Settings for rendering chats."""

    chat_template: str | None = None
    """Text of the operator's template."""
    content_format: str = "auto"
    prompt_templates: PromptTemplates = "refused"
    """Treatment of templates that come with prompts."""
    tried_at_start: bool = True
    """The checkpoint's own template renders a chat before the start is over; else a first chat shows that it
    fails."""


PYTHON = TemplateSettings(prompt_templates="trusted", tried_at_start=False)
"""Settings of ``LLM`` and ``AsyncLLM``, whose caller is the operator, and hears what fails."""


def templates_of(settings: ServerSettings) -> TemplateSettings:
    """The template settings of a server, where a prompt's template is a client's.

    Raises:
        ConfigError: ``chat_template`` is neither a readable file nor a template, or renders no chat.
    """
    from headrace_server.settings import read_chat_template

    source, given = read_chat_template(settings), settings.chat_template
    if source is not None and given is not None:
        reason = failure_of(source, settings.chat_template_content_format, PLACEHOLDER_TOKENS)
        if reason is not None:
            raise ConfigError(
                f"chat_template = {given[:100]!r} (--chat-template): must render a simple chat, but "
                f"fails: {reason}",
                field="chat_template",
            )
    trusts = settings.trust_request_chat_template
    return TemplateSettings(
        source, settings.chat_template_content_format, "isolated" if trusts else "refused"
    )


def check_template(settings: ServerSettings) -> None:
    """Try the operator's template before anything is loaded.

    Raises: as :func:`templates_of`.
    """
    if settings.chat_template is not None:
        templates_of(settings)


def warn_of_broken(tokenizer: Tokenizer | None, templates: TemplateSettings) -> None:
    """Warn if the checkpoint's own template is used and fails. Requests that need no template are served
    all the same."""
    own = tokenizer.chat_template if tokenizer is not None else None
    if tokenizer is None or own is None or templates.chat_template is not None:
        return
    if not templates.tried_at_start:
        return
    reason = failure_of(own, templates.content_format, tokenizer.special_tokens)
    if reason is not None:
        logger.warning(
            "the checkpoint's chat template fails with a simple chat: %s; --chat-template replaces it",
            reason,
        )


def with_own(templates: TemplateSettings, pooling: PoolingInfo | None) -> TemplateSettings:
    """The settings with the template of the model's class, where it has one: it wins over the checkpoint's,
    and the operator's over it."""
    if templates.chat_template is not None or pooling is None or pooling.scoring == "cross":
        return templates
    return templates._replace(chat_template=pooling.score_template)


def failure_of(source: str, content_format: str, tokens: Mapping[str, str]) -> str | None:
    """Why a template renders none of :data:`SIMPLE_CHATS`; None: it renders one.

    Args:
        tokens: names of special tokens -> their texts.
    """
    try:
        from headrace_engine.input_processing.chat.content import normalize_messages
        from headrace_engine.input_processing.chat.content_format import detect_content_format
        from headrace_engine.input_processing.chat.render_worker import describe_error
        from headrace_engine.input_processing.chat.sandbox import render_template
    except ImportError as error:
        raise missing(error) from error
    wanted = detect_content_format(source) if content_format == "auto" else content_format
    reason = None
    for messages in SIMPLE_CHATS:
        variables: dict[str, Any] = {
            **tokens,
            "messages": normalize_messages(messages, wanted),
            "tools": None,
            "documents": None,
            "add_generation_prompt": True,
        }
        try:
            render_template(source, variables, MAX_CHARS)
        except Exception as error:  # whatever an expression in the template raises
            reason = reason or describe_error(error)
        else:
            return None
    return reason
