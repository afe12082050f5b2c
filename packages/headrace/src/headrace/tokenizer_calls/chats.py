"""Conversations as prompts: :class:`ChatTemplateMixin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.offline.arguments import check_chat_options
from headrace.tokenizer_calls.checks import need_flag, need_text
from headrace.tokenizer_calls.encoding import EncodingMixin, as_piece, checked_kwargs
from headrace.tokenizer_calls.filling import TextEncoding
from headrace.tokenizer_calls.generations import (
    MARKS,
    Generations,
    assistant_mask,
    plain_offsets,
    refuse_marks,
)
from headrace.tokenizer_calls.options import CallOptions
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.request import ChatPrompt, brings_media
from headrace_core.text import GuardableTokenizer


class ChatTemplateMixin(EncodingMixin):
    """Renders conversations through a chat template."""

    def get_chat_template(
        self, chat_template: str | None = None, tools: Sequence[Any] | None = None
    ) -> str:
        """The template's source that :meth:`apply_chat_template` would render.

        Raises:
            RequestError: there is none.
        """
        named: Mapping[str, str] = getattr(self._tokenizer, "chat_templates", {})
        if chat_template is not None:
            return named.get(chat_template, chat_template)
        found = named.get("tool_use") if tools and not self._has_own_template else None
        found = found or self.chat_template
        if found is None:
            raise RequestError(
                "chat_template: the checkpoint has none; pass one", param="chat_template"
            )
        return found

    def apply_chat_template(
        self,
        conversation: Sequence[Any],
        tools: Sequence[Mapping[str, Any]] | None = None,
        documents: Sequence[Mapping[str, Any]] | None = None,
        chat_template: str | None = None,
        add_generation_prompt: bool = False,
        continue_final_message: bool = False,
        tokenize: bool = True,
        sanitize_control_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
        return_assistant_tokens_mask: bool = False,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **kwargs: Any,
    ) -> Any:
        """Render a conversation, or a list of conversations, as :meth:`headrace.LLM.chat` does.

        Args:
            conversation: messages, each a mapping with ``role`` and ``content``.
            tools: their definitions, as JSON objects.
            chat_template: a template, or the name of one of the checkpoint's; None: its default.
            tokenize: False: return the text.
            sanitize_control_tokens: text of special tokens inside messages stays text, as in every
                chat that headrace answers; False: it becomes these tokens.
            padding, truncation, max_length, return_tensors: as a call of the object.
            return_dict: False: return the ids only.
            return_assistant_tokens_mask: return ``assistant_masks``, too: 1 for each token of the text
                that the template writes between ``{% generation %}`` and ``{% endgeneration %}``.
            tokenizer_kwargs: further arguments of a call of the object, by name
                (``return_offsets_mapping``, ``pad_to_multiple_of``, ...).
            kwargs: further variables of the template.

        Returns:
            A :class:`TokenizedText`; ids; or text. A list for a list of conversations.

        Raises:
            RequestError: an argument is wrong, or the template is missing, fails or refuses; or a mask
                is asked for, and the template has no ``{% generation %}``.
            UnsupportedFeature: a mask or offsets of a chat that brings media.
            PromptTooLong: a chat is far longer than the context: more characters than the template may
                write. What is only longer than the context is returned; :meth:`headrace.LLM.chat`
                refuses that, too.
        """
        conversations, one = _conversations(conversation)
        check_chat_options(
            chat_template=chat_template,
            tools=tools,
            documents=documents,
            add_generation_prompt=add_generation_prompt,
            continue_final_message=continue_final_message,
        )
        need_flag("tokenize", tokenize)
        need_flag("sanitize_control_tokens", sanitize_control_tokens)
        need_flag("return_dict", return_dict)
        masked = need_flag("return_assistant_tokens_mask", return_assistant_tokens_mask)
        options = self._chat_options(
            tokenizer_kwargs,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            return_tensors=return_tensors,
        )
        if chat_template is None and self._has_own_template:
            chat_template = self.get_chat_template()
        chats = [
            ChatPrompt(
                messages=messages,
                tools=tools,
                chat_template=chat_template,
                chat_template_kwargs=kwargs,
                add_generation_prompt=add_generation_prompt,
                continue_final_message=continue_final_message,
                documents=documents,
            )
            for messages in conversations
        ]
        if masked:
            _check_mask(
                options,
                tokenize=tokenize,
                return_dict=return_dict,
                continue_final_message=continue_final_message,
            )
        if not tokenize:
            texts = [self._input_processor.render(chat) for chat in chats]
            return texts[0] if one else texts
        if masked or options.details:
            encoded = [
                self._detailed(chat, options, sanitize_control_tokens, masked) for chat in chats
            ]
        else:
            encoded = [self._chat_piece(chat, options, sanitize_control_tokens) for chat in chats]
        made = self._collected(encoded, one, options)
        return made if return_dict else made["input_ids"]

    def _chat_options(self, more: Any, **given: Any) -> CallOptions:
        """Checked arguments for a chat's text, which has its special tokens already.

        Args:
            more: ``tokenizer_kwargs``.

        Raises:
            RequestError: an argument is wrong, or given twice.
        """
        further = checked_kwargs(more)
        for name in (*given, "add_special_tokens", "is_split_into_words"):
            if name in further:
                raise RequestError(
                    f"tokenizer_kwargs.{name}: must not be there; "
                    + (f"give {name} itself" if name in given else "a chat is one text, whole"),
                    param="tokenizer_kwargs",
                )
        return self._options("apply_chat_template", further, add_special_tokens=False, **given)

    def _chat_piece(self, chat: ChatPrompt, options: CallOptions, sanitize: bool) -> TextEncoding:
        """Token ids of a chat."""
        if sanitize:
            ids = list(self._input_processor.tokenize(chat, False).token_ids)
        else:
            text = need_text("conversation", self._input_processor.render(chat))
            ids = self._tokenizer.encode(text, add_special_tokens=False)
        cut = self._cut(options)
        if cut is not None and len(ids) > cut.limit:
            ids = ids[-cut.limit :] if cut.side == "left" else ids[: cut.limit]
        return TextEncoding(ids, [0] * len(ids))

    def _detailed(
        self, chat: ChatPrompt, options: CallOptions, sanitize: bool, masked: bool
    ) -> TextEncoding:
        """Tokens of a chat, with their places in its text and the assistant's mask."""
        if self._backend is None:
            raise self._not_of_plugins("return_assistant_tokens_mask")
        if brings_media(chat):
            raise UnsupportedFeature(
                "conversation: must be text only for a mask or for offsets", param="conversation"
            )
        if masked:
            refuse_marks(chat)
        rendered = self._input_processor.render_guarded(chat, MARKS if masked else None)
        guard = rendered.guard if sanitize else ""
        found = Generations.found_in(rendered.text if guard else rendered.plain)
        if masked and not found.spans and _has_answers(chat):
            raise RequestError(
                "return_assistant_tokens_mask = True: needs a chat template that marks what the assistant "
                "says with {% generation %}; this one has no such marks",
                param="return_assistant_tokens_mask",
            )
        backend = self._backend
        if guard:
            own = self._tokenizer
            guarded = own.guarded(guard) if isinstance(own, GuardableTokenizer) else None
            backend = getattr(guarded, "backend", None)
            if backend is None:
                raise RequestError(
                    "conversation: must not hold text of the tokenizer's control tokens, which this "
                    "tokenizer cannot keep apart from the tokens themselves",
                    param="conversation",
                )
        need_text("conversation", found.text)
        encoding = backend.encode_batch([found.text], add_special_tokens=False)[0]
        mask = assistant_mask(found.spans, encoding.offsets) if masked else None
        cut = self._cut(options)
        if cut is not None:
            cut.shorten([encoding], 0)
        piece = as_piece(encoding)
        if mask is not None:
            size = len(piece.ids)
            left = cut is not None and cut.side == "left"
            piece.assistant = mask[len(mask) - size :] if left else mask[:size]
        if guard:
            for part in (piece, *piece.overflowing):
                part.offsets = plain_offsets(found.text, guard, part.offsets or [])
        return piece


def _has_answers(chat: ChatPrompt) -> bool:
    """True if an assistant said something."""
    return any(message.get("role") == "assistant" for message in chat.messages)


def _check_mask(
    options: CallOptions, *, tokenize: bool, return_dict: bool, continue_final_message: bool
) -> None:
    """Check that the assistant's mask can be returned.

    Raises:
        RequestError: another argument excludes it.
    """
    needed = {
        "tokenize": (tokenize, True),
        "return_dict": (return_dict, True),
        "continue_final_message": (continue_final_message, False),
        "return_overflowing_tokens": (options.return_overflowing_tokens, False),
    }
    for name, (given, accepted) in needed.items():
        if bool(given) is not accepted:
            raise RequestError(
                f"{name} = {given}: must be {accepted} with return_assistant_tokens_mask = True",
                param=name,
            )


def _conversations(given: Any) -> tuple[list[Sequence[Mapping[str, Any]]], bool]:
    """A conversation or several, as a list; True if it was one."""
    if isinstance(given, Sequence) and not isinstance(given, str | bytes) and given:
        if all(isinstance(message, Mapping) for message in given):
            return [list(given)], True
        if all(
            isinstance(each, Sequence) and each and all(isinstance(m, Mapping) for m in each)
            for each in given
        ):
            return [list(each) for each in given], False
    raise RequestError(
        f"conversation = {given!r:.100}: must be a list of messages, at least one, each a mapping with "
        "'role' and 'content'; or a list of such lists",
        param="conversation",
    )
