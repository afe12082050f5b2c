"""Conversations as prompts: :class:`RendersChats`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from headrace.given import check_chat_options
from headrace.texts.checks import need_text
from headrace.texts.encoding import EncodesTexts
from headrace_core.errors import RequestError
from headrace_core.request import ChatPrompt


class RendersChats(EncodesTexts):
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
        found = named.get("tool_use") if tools else None
        found = found or self.chat_template
        if found is None:
            raise RequestError(
                "chat_template: the checkpoint has none; give one", param="chat_template"
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
        truncation: bool = False,
        max_length: int | None = None,
        return_tensors: str | None = None,
        return_dict: bool = True,
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
            kwargs: further variables of the template.

        Returns:
            A :class:`TokenizedText`; ids; or text. A list for a list of conversations.

        Raises:
            RequestError: an argument is wrong, or the template is missing, fails or refuses.
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
        if not tokenize:
            texts = [self._intake.render(chat) for chat in chats]
            return texts[0] if one else texts
        encoded = []
        limit = self._limit(truncation, max_length, padding)
        for chat in chats:
            if sanitize_control_tokens:
                ids = self._intake.tokenize(chat, False).token_ids
            else:
                text = need_text("conversation", self._intake.render(chat))
                ids = self._tokenizer.encode(text, add_special_tokens=False)
            if limit is not None and len(ids) > limit:
                ids = ids[-limit:] if self.truncation_side == "left" else ids[:limit]
            encoded.append((ids, [0] * len(ids)))
        made = self._collected(
            encoded, one, padding, max_length, None, None, return_tensors, None, None
        )
        return made if return_dict else made["input_ids"]


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
