"""Prompts of any form -> tokens."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from hashlib import sha256
from typing import Any, Literal, NamedTuple

from headrace_core.arrays import own_values
from headrace_core.errors import ConfigError, RequestError, UnsupportedFeature
from headrace_core.multimodal import MediaInput
from headrace_core.request import ChatPrompt, Prompt, PromptEmbeds, brings_media
from headrace_core.served_model import ServedModel
from headrace_core.text import GuardableTokenizer, Tokenizer
from headrace_engine.freed_memory import trimmed_after
from headrace_engine.input_processing.chat.content import PairSides
from headrace_engine.input_processing.chat.template import ChatRenderer, PromptTemplates
from headrace_engine.input_processing.control_tokens import RenderedPrompt
from headrace_engine.input_processing.embeds import EmbedsDecoder
from headrace_engine.input_processing.media import (
    ChatMedia,
    MediaReader,
    PlacedMedia,
    implicit_form,
    named_at,
)
from headrace_engine.input_processing.media_items import FIELD as MEDIA_FIELD
from headrace_engine.input_processing.media_names import FIELD as NAMES_FIELD
from headrace_engine.input_processing.text_limits import TextLimits
from headrace_engine.input_processing.tokens import check_ids, check_text, need_tokenizer


class PromptTokens(NamedTuple):
    """A prompt of any form, as tokens."""

    ids: list[int]
    text: str | None
    cache_salt: str | None
    embeds: PromptEmbeds | None = None
    """The prompt, if it came as embeddings; ``ids`` are as many zeros then."""
    media: Sequence[MediaInput] = ()
    """In order of their offsets."""
    num_encoder_tokens: int = 0
    whole_spans: Sequence[tuple[int, ...]] = ()
    """See :class:`headrace_core.multimodal.MediaPlacement`."""
    token_type_ids: list[int] | None = None
    """The text of a pair that each token belongs to; None: not said."""
    num_attended_tokens: int | None = None
    """So many of the first tokens are attended to; None: all."""


class Fit(NamedTuple):
    """Rules for text that is too long."""

    max_length: int | None = None
    """Tokens that it is shortened to, special ones kept
    (:meth:`headrace_core.text.Tokenizer.encode_pair`); None: it is not."""
    room: int | None = None
    """Tokens that the prompt may have; None: the context."""
    cut: bool = False
    """The prompt will be cut, or is not for the model: text beyond ``room`` is tokenized, up to
    :data:`~headrace_engine.input_processing.text_limits.MOST_CHARACTERS`."""
    side: Literal["left", "right"] = "left"
    """Side at which it loses tokens (:attr:`headrace_core.pooling.PoolingParams.truncation_side`)."""

    @property
    def shortening(self) -> dict[str, Any]:
        """Arguments of :meth:`headrace_core.text.Tokenizer.encode_pair`. ``truncation_side`` is among
        them only where it is not the default: tokenizers of plug-ins may not have it."""
        side = {} if self.side == "left" else {"truncation_side": self.side}
        return {"max_length": self.max_length, **side}


AS_IT_IS = Fit()


class PairParts(NamedTuple):
    """A pair that a template makes one prompt, at least one side of which brings media."""

    sides: PairSides
    template: str | None
    """The call's; None: the operator's, or the model's."""
    cache_salt: str | None = None


class PromptReader:
    """Reads prompts for one model. Thread-safe.

    Args:
        tokenizer: None: prompts must be token ids.
        model: facts and limits.
        chat_template: replaces the tokenizer's own template.
        content_format: what templates expect ``content`` to be, unless a prompt says otherwise.
        prompt_templates: how templates are treated that prompts bring.
        allow_control_tokens: text of special tokens in messages becomes these tokens.
        media: reads what prompts bring besides text; None: the model takes none.
    """

    def __init__(
        self,
        tokenizer: Tokenizer | None,
        model: ServedModel,
        *,
        chat_template: str | None = None,
        content_format: str = "auto",
        prompt_templates: PromptTemplates = "refused",
        allow_control_tokens: bool = False,
        media: MediaReader | None = None,
    ) -> None:
        self._tokenizer = tokenizer
        self._texts = TextLimits(tokenizer, model.max_model_len)
        self._media = media
        self._vocab_size = model.vocab_size
        pooling = model.pooling
        self._lower_case = pooling is not None and pooling.lower_case
        self._token_types = pooling is not None and pooling.token_types
        own = pooling.score_template if pooling is not None else None
        self._score_template = chat_template or own
        self._embeds: EmbedsDecoder | None = None
        if model.prompt_embeds:
            self._embeds = EmbedsDecoder(model.hidden_size, model.dtype, model.max_model_len)
        self._renderer: ChatRenderer | None = None
        if tokenizer is not None:
            self._renderer = ChatRenderer(
                tokenizer,
                template=chat_template,
                content_format=content_format,
                prompt_templates=prompt_templates,
                allow_control_tokens=allow_control_tokens,
                max_model_len=model.max_model_len,
                media_tokens=self._placeholder_texts(tokenizer),
            )

    def _placeholder_texts(self, tokenizer: Tokenizer) -> list[str]:
        """Texts of the special tokens that stand for media."""
        ids = set() if self._media is None else self._media.placeholder_ids
        special = tokenizer.special_token_ids.intersection(ids)
        return [tokenizer.decode([token], skip_special_tokens=False) for token in special]

    def close(self) -> None:
        """End the processes in which templates render and embeddings are read, if there are any;
        they would be started anew."""
        if self._renderer is not None:
            self._renderer.close()
        if self._embeds is not None:
            self._embeds.close()
        if self._media is not None:
            self._media.close()

    def limit_context(self, max_model_len: int) -> None:
        """Take over a shorter context, in tokens."""
        self._texts.max_model_len = max_model_len
        if self._renderer is not None:
            self._renderer.limit_context(max_model_len)

    def read(
        self,
        prompt: Prompt,
        add_special_tokens: bool | None,
        fit: Fit = AS_IT_IS,
    ) -> PromptTokens:
        """Tokens of a prompt. Lengths are not checked, but text that cannot fit is not tokenized.

        Args:
            add_special_tokens: None: yes for text, as a chat says for chats.
            fit: what becomes of text that is long; token ids, and text beside media, are not shortened.

        Raises:
            RequestError: the prompt is malformed, or needs what the engine does not have.
            PromptTooLong: its text cannot fit.
        """
        if add_special_tokens is None and self._encodes:
            add_special_tokens = False  # a decoder's prompt says itself how it begins
        if isinstance(prompt, Mapping) and brings_media(prompt):
            return self._media_tokens(prompt, add_special_tokens)
        if isinstance(prompt, ChatPrompt):
            media = ChatMedia(self._media)
            rendered = self._chat_renderer().render(prompt, media)
            special = (
                prompt.add_special_tokens if add_special_tokens is None else add_special_tokens
            )
            tokens = self.read_rendered(
                rendered._replace(cache_salt=_salt(prompt.cache_salt)),
                special,
                fit._replace(max_length=None) if media else fit,
            )
            if not media:
                self._check_options(prompt.mm_processor_kwargs)
                if self._media is not None and self._chat_renderer().allows_control_tokens:
                    self._media.check_text_alone(rendered.plain, "messages")
                return tokens
            with named_at("messages"):
                return self._placed(
                    tokens, media.data(), prompt.mm_processor_kwargs, media.names(), media.places()
                )
        if isinstance(prompt, Mapping):
            return self._mapping_tokens(prompt, add_special_tokens, fit)
        if isinstance(prompt, str):
            ids = self._encode(prompt, add_special_tokens is not False, fit)
            return PromptTokens(ids, prompt, None)
        return PromptTokens(self._checked_ids("prompt", prompt), None, None)

    def check_text_alone(self, prompt: Prompt) -> None:
        """Check the text of a prompt that brings no media; a chat's is looked at when it is rendered.

        Raises: RequestError: it has placeholders.
        """
        if self._media is None or (isinstance(prompt, Mapping) and brings_media(prompt)):
            return
        self._media.check_text_alone(prompt)

    def check_tokens_alone(self, prompt: Prompt, tokens: PromptTokens) -> None:
        """The same by tokens, which need not be what is written for an item, and may come as ids. A chat's
        are its template's own.

        Raises: RequestError: some stand for media.
        """
        if self._media is None or not self._media.modalities or isinstance(prompt, ChatPrompt):
            return
        if tokens.media or tokens.embeds is not None:
            return
        found = self._media.placeholder_ids.intersection(tokens.ids)
        if found:
            token = next(token for token in tokens.ids if token in found)
            raise RequestError(
                f"prompt: has {self._told(token)}, which stands for media, and none come with it; bring "
                f"one item for each placeholder as {MEDIA_FIELD} or as a part of a chat's messages, or leave "
                "the token out",
                param="prompt",
            )

    def _told(self, token: int) -> str:
        """A token as messages name it."""
        text = ""
        if self._tokenizer is not None:
            text = self._tokenizer.decode([token], skip_special_tokens=False)
        return f"token {token}{text and f' ({text!r})'}"

    def read_rendered(
        self, prompt: RenderedPrompt, add_special_tokens: bool | None, fit: Fit
    ) -> PromptTokens:
        """Tokens of what a template made; lengths as :meth:`read`.

        Raises:
            RequestError: the tokenizer cannot keep control tokens' text apart from the tokens.
            PromptTooLong: the text cannot fit.
        """
        self._check_size(self._spelled(prompt.plain), fit=fit)  # the guard's marks make no tokens
        tokenizer = self._tokenizer if not prompt.guard else self._guarded(prompt.guard)
        ids = self._tokenized(prompt.text, add_special_tokens is not False, fit, tokenizer)
        return PromptTokens(ids, prompt.plain, prompt.cache_salt)

    def is_special(self, token_id: int) -> bool:
        """True if a token is one of the tokenizer's special ones."""
        return self._tokenizer is not None and token_id in self._tokenizer.special_token_ids

    def read_pair(self, first: str, second: str, fit: Fit = AS_IT_IS) -> PromptTokens:
        """Tokens of two texts as one prompt, by the tokenizer's rule for pairs; lengths as
        :meth:`read`.

        Raises:
            RequestError: there is no tokenizer, or a text is none.
            PromptTooLong: the texts cannot fit.
        """
        tokenizer = need_tokenizer(self._tokenizer, "text_1")
        texts = [self._spelled(text) for text in (first, second)]
        self._check_size(*texts, fit=fit)
        with trimmed_after(first, second):
            ids, types = tokenizer.encode_pair(*texts, **fit.shortening)
        return PromptTokens(ids, None, None, token_type_ids=types)

    def render(
        self, chat: ChatPrompt, generation_marks: tuple[str, str] | None = None
    ) -> RenderedPrompt:
        """See :meth:`headrace_engine.input_processing.input_processor.InputProcessor.render_guarded`."""
        return self._chat_renderer().render(chat, generation_marks=generation_marks)

    def render_pair(self, query: str, document: str, template: str | None) -> RenderedPrompt | None:
        """A pair's prompt by a template: the call's, the operator's, or the checkpoint's; None: there
        is none, and the tokenizer's own rule for pairs holds.

        Raises:
            RequestError: the template failed, or there is no tokenizer.
        """
        source = template or self._score_template
        if source is None:
            return None
        return self._chat_renderer().render_pair(query, document, source)

    def read_parts(
        self, pair: PairParts, add_special_tokens: bool | None, fit: Fit = AS_IT_IS
    ) -> PromptTokens:
        """Tokens and media of a pair; media are not shortened.

        Raises:
            RequestError: there is no template, it failed, or an item cannot be read.
        """
        source = pair.template or self._score_template
        if source is None:
            raise RequestError(
                "text_1: a pair with media needs a template, of messages with the roles 'query' and "
                "'document' (--chat-template, chat_template=)",
                param="text_1",
            )
        media = ChatMedia(self._media)
        rendered = self._chat_renderer().render_parts(pair.sides, source, media)
        tokens = self.read_rendered(
            rendered._replace(cache_salt=_salt(pair.cache_salt)),
            add_special_tokens,
            fit._replace(max_length=None),
        )
        return self._placed(tokens, media.data(), None, media.names())

    def _mapping_tokens(
        self,
        prompt: Mapping[str, object],
        add_special_tokens: bool | None,
        fit: Fit,
    ) -> PromptTokens:
        if prompt.get("prompt_embeds") is not None:
            return self._embeds_tokens(prompt)
        known = {"prompt", "prompt_token_ids", "cache_salt", "prompt_embeds"}
        if self._token_types:
            known.add("token_type_ids")
        unknown = {name for name in prompt if name not in known and prompt[name] is not None}
        if unknown:
            raise UnsupportedFeature(
                f"prompt: {sorted(unknown)} cannot be served; a prompt has 'prompt' or "
                "'prompt_token_ids', and 'cache_salt'",
                param=min(unknown),
            )
        salt, text = _salt(prompt.get("cache_salt")), prompt.get("prompt")
        if text is not None and not isinstance(text, str):
            raise RequestError(f"prompt = {text!r}: must be text", param="prompt")
        if prompt.get("prompt_token_ids") is not None:
            ids = self._checked_ids("prompt_token_ids", prompt["prompt_token_ids"])
            types = prompt.get("token_type_ids")
            return PromptTokens(
                ids, text, salt, token_type_ids=None if types is None else _types(types)
            )
        if text is None:
            raise RequestError(
                "prompt: a mapping needs 'prompt' or 'prompt_token_ids'", param="prompt"
            )
        ids = self._encode(text, add_special_tokens is not False, fit)
        return PromptTokens(ids, text, salt)

    def _media_tokens(
        self, prompt: Mapping[str, Any], add_special_tokens: bool | None
    ) -> PromptTokens:
        """Tokens and media of a prompt that brings some, in either form."""
        if self._media is None or ("encoder_prompt" in prompt and not self._encodes):
            param = "encoder_prompt" if "encoder_prompt" in prompt else MEDIA_FIELD
            raise UnsupportedFeature(
                f"{param}: this model {'has no encoder' if self._media else 'takes text only'}",
                param=param,
            )
        given = implicit_form(prompt)
        data, options = given.pop(MEDIA_FIELD, None), given.pop("mm_processor_kwargs", None)
        names = given.pop(NAMES_FIELD, None)
        if data is None:
            raise RequestError(f"encoder_prompt.{MEDIA_FIELD}: must be given", param=MEDIA_FIELD)
        start = self._media.decoder_start_token_id
        if (
            start is not None
            and _is_empty(given.get("prompt_token_ids"))
            and not given.get("prompt")
        ):
            given = {**given, "prompt_token_ids": [start]}
        tokens = self._mapping_tokens(given, add_special_tokens, AS_IT_IS)
        return self._placed(tokens, data, options, names)

    def _placed(
        self,
        tokens: PromptTokens,
        data: object,
        options: object,
        names: object,
        places: Mapping[str, Sequence[str]] | None = None,
    ) -> PromptTokens:
        assert self._media is not None
        text = self._text_of(tokens) if self._media.reads_text else ""
        placed = self._media.place(
            tokens.ids, data, options, names, tokens.cache_salt, places, text
        )
        return tokens._replace(
            ids=placed.token_ids,
            media=placed.media,
            num_encoder_tokens=placed.num_encoder_tokens,
            whole_spans=placed.whole_spans,
            cache_salt=_salted(tokens.cache_salt, placed),
        )

    def _text_of(self, tokens: PromptTokens) -> str:
        """The text that a prompt came with; of ids, theirs without special tokens.

        Raises: RequestError: it came as ids, and there is no tokenizer.
        """
        if tokens.text is not None:
            return tokens.text
        tokenizer = need_tokenizer(self._tokenizer, "prompt_token_ids")
        return tokenizer.decode(tokens.ids, skip_special_tokens=True)

    def _check_options(self, options: object) -> None:
        """Raises: RequestError: a chat without media has options of the processor that it does not take."""
        if not options:
            return
        if self._media is None:
            name = "mm_processor_kwargs"
            raise UnsupportedFeature(f"{name}: this model takes text only", param=name)
        self._media.check_options(options)

    @property
    def needs_media(self) -> str:
        """Why every prompt must bring media; "": text alone will do."""
        return "" if self._media is None else self._media.needs_media

    @property
    def _encodes(self) -> bool:
        return self._media is not None and self._media.is_encoder_decoder

    def _embeds_tokens(self, prompt: Mapping[str, object]) -> PromptTokens:
        if self._embeds is None:
            raise UnsupportedFeature(
                "prompt_embeds: the engine takes no embeddings; it must be started with "
                "--enable-prompt-embeds (enable_prompt_embeds=True)",
                param="prompt_embeds",
            )
        others = set(prompt) - {"prompt_embeds", "cache_salt"}
        if others:
            raise RequestError(
                f"prompt: {sorted(others)} beside 'prompt_embeds'; a prompt of embeddings may have "
                "'cache_salt' only",
                param=min(others),
            )
        embeds = self._embeds.decode(prompt["prompt_embeds"])
        return PromptTokens([0] * embeds.num_tokens, None, _salt(prompt.get("cache_salt")), embeds)

    def _encode(self, text: str, add_special_tokens: bool, fit: Fit) -> list[int]:
        self._check_size(self._spelled(text), fit=fit)
        return self._tokenized(text, add_special_tokens, fit, self._tokenizer)

    def _check_size(self, *texts: str, fit: Fit) -> None:
        self._texts.check("prompt", *texts, room=fit.room, cut=fit.cut)

    def _tokenized(
        self, text: str, add_special_tokens: bool, fit: Fit, tokenizer: Tokenizer | None
    ) -> list[int]:
        tokenizer = need_tokenizer(tokenizer, "prompt")
        text = self._spelled(text)
        with trimmed_after(text):
            if fit.max_length is None:
                return tokenizer.encode(text, add_special_tokens=add_special_tokens)
            return tokenizer.encode_pair(
                text, add_special_tokens=add_special_tokens, **fit.shortening
            ).token_ids

    def _guarded(self, guard: str) -> Tokenizer:
        found: Tokenizer | None = None
        if isinstance(self._tokenizer, GuardableTokenizer):
            found = self._tokenizer.guarded(guard)
        if found is None:
            raise RequestError(
                "messages: must not hold text of the tokenizer's control tokens, which this "
                "tokenizer cannot keep apart from the tokens themselves",
                param="messages",
            )
        return found

    def _spelled(self, text: str) -> str:
        """A text as the tokenizer is to see it."""
        check_text("prompt", text)
        return text.lower() if self._lower_case else text

    def _chat_renderer(self) -> ChatRenderer:
        need_tokenizer(self._tokenizer, "messages")
        if self._renderer is None:
            raise ConfigError("no chat renderer without a tokenizer")
        return self._renderer

    def _checked_ids(self, param: str, ids: object) -> list[int]:
        ids = _own_ids(ids)
        if not isinstance(ids, Sequence) or isinstance(ids, (str, bytes, bytearray)):
            raise RequestError(
                f"{param} = {ids!r:.100}: must be text or a list of token ids", param=param
            )
        check_ids(param, ids, self._vocab_size)
        return list(ids)


def _is_empty(ids: object) -> bool:
    """True if a prompt has no token."""
    ids = _own_ids(ids)
    return ids is None or (isinstance(ids, Sequence) and not ids)


def _types(types: object) -> list[int]:
    types = _own_ids(types)
    good = isinstance(types, Sequence) and all(type(t) is int for t in types)
    if not good:
        raise RequestError(
            f"token_type_ids = {types!r:.100}: must be a list of integers", param="token_type_ids"
        )
    return list(types)  # type: ignore[call-overload, no-any-return]


def _salted(salt: str | None, placed: PlacedMedia) -> str | None:
    """A salt for cached prefixes that names what their tokens see behind them: an item's blocks are known
    by its content, other text and later items are not."""
    items = [
        (item.offset, item.offset + item.num_tokens, item.content_hash) for item in placed.media
    ]
    ahead = [
        (
            placed.token_ids[span[0] : span[-1]],
            [content for begin, end, content in items if begin < span[-1] and span[0] < end],
        )
        for span in placed.whole_spans
        if not any(begin <= span[0] and span[-1] <= end for begin, end, _ in items)
    ]
    if not ahead:
        return salt
    return f"{salt or ''}:{sha256(repr(ahead).encode()).hexdigest()}"


def _salt(salt: object) -> str | None:
    if salt is None:
        return None
    if not isinstance(salt, str) or not salt:
        raise RequestError(
            f"cache_salt = {salt!r:.100}: must be a non-empty string", param="cache_salt"
        )
    return salt


def _own_ids(ids: object) -> object:
    """Token ids as a list, where they are an array, or a sequence of integers of another library."""
    is_array = callable(getattr(ids, "tolist", None))
    return own_values(ids) if is_array or isinstance(ids, Sequence) else ids
