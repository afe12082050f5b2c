"""The tokenizer that :meth:`headrace.LLM.get_tokenizer` returns: :class:`ModelTokenizer`.

It has the interface of transformers' tokenizers, and gives the same results for the same checkpoint, without
importing transformers. What it cannot do, it does not accept.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal

from headrace.given import check_chat_options
from headrace_core.errors import RequestError, UnsupportedFeature
from headrace_core.foreign import own_value
from headrace_core.request import ChatPrompt

if TYPE_CHECKING:
    from headrace_core.text import EncodedPair, Tokenizer
    from headrace_engine.intake.intake import Intake

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that have attributes: ``bos_token``, ``bos_token_id``, ..."""
NO_LIMIT = int(1e30)
"""``model_max_length`` of a checkpoint that states none."""
LONGEST_LIMIT = int(1e20)
"""A ``model_max_length`` above this is no limit."""
SIDES = ("right", "left")
MODEL_INPUTS = ("input_ids", "attention_mask")
CLEANED_UP = (
    (" .", "."), (" ?", "?"), (" !", "!"), (" ,", ","), (" ' ", "'"), (" n't", "n't"), (" 'm", "'m"),
    (" 's", "'s"), (" 've", "'ve"), (" 're", "'re"),
)  # fmt: skip
"""What ``clean_up_tokenization_spaces`` replaces, in order."""


class TokenizedText(dict[str, Any]):
    """The result of tokenizing one text or several: ``input_ids``, ``attention_mask`` and, where the
    model reads them, ``token_type_ids``; by key or as attributes.

    Each is a list of integers; for several texts a list of such lists; with ``return_tensors`` an
    int64 array [texts, tokens].
    """

    def __getattr__(self, name: str) -> Any:
        try:
            return self[name]
        except KeyError:
            raise AttributeError(
                f"the tokenizer returned no {name!r}, only {', '.join(self)}"
            ) from None


def _text_of(name: str) -> property:
    def text(self: ModelTokenizer) -> str | None:
        return self._named.get(name)

    return property(text, doc=f"Text of the checkpoint's ``{name}``, None if it has none.")


def _id_of(name: str) -> property:
    def token_id(self: ModelTokenizer) -> int | None:
        return self._id_of_named(name)

    return property(token_id, doc=f"Id of the checkpoint's ``{name}``, None if it has none.")


class ModelTokenizer:
    """The tokenizer of a running model. Thread-safe, but for the attributes that can be set:
    ``pad_token``, ``padding_side`` and ``truncation_side``.

    Args:
        intake: reads the engine's prompts; it has a tokenizer.
    """

    is_fast = True

    def __init__(self, intake: Intake) -> None:
        tokenizer = intake.tokenizer
        assert tokenizer is not None
        self._intake = intake
        self._tokenizer: Tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend", None)
        self._config = intake.model.tokenizer_info
        self._named = {
            f"{name}_token": tokenizer.special_tokens[f"{name}_token"]
            for name in NAMED_TOKENS
            if f"{name}_token" in tokenizer.special_tokens
        }
        self.name_or_path = intake.model.root
        self._sides = {
            name: str(self._config.get(name, "right"))
            for name in ("padding_side", "truncation_side")
        }

    # The vocabulary.

    @property
    def vocab_size(self) -> int:
        """Number of tokens, without those that were added to the vocabulary."""
        if self._backend is None:
            return self._tokenizer.vocab_size
        return int(self._backend.get_vocab_size(with_added_tokens=False))

    def __len__(self) -> int:
        return len(self._vocab)

    def get_vocab(self) -> dict[str, int]:
        """All tokens, added ones included, with their ids."""
        return dict(self._vocab)

    @property
    def vocab(self) -> dict[str, int]:
        """See :meth:`get_vocab`."""
        return self.get_vocab()

    @functools.cached_property
    def _vocab(self) -> dict[str, int]:
        if self._backend is not None:
            found: dict[str, int] = self._backend.get_vocab(with_added_tokens=True)
            return found
        tokens = (
            (self._tokenizer.token_string(i), i) for i in range(self._intake.model.vocab_size)
        )
        return {token: i for token, i in tokens if token}

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are found in a text before it is cut into others, with their ids."""
        if self._backend is None:
            return {self._tokenizer.token_string(i): i for i in self.special_token_ids}
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or a list of ids; of an unknown one that of ``unk_token``, else None."""
        if isinstance(tokens, str):
            return self._vocab.get(tokens, self._id_of_named("unk_token"))
        return [self.convert_tokens_to_ids(token) for token in tokens]

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The vocabulary's spelling of an id, or a list of them; None for an unknown id."""
        ids = own_value(ids)
        if isinstance(ids, int):
            return self._tokenizer.token_string(ids) or None
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        every = [int(token_id) for token_id in ids]
        return [self._tokenizer.token_string(i) or None for i in every if i not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens, given by their spelling."""
        decoder = getattr(self._backend, "decoder", None)
        if decoder is not None:
            return str(decoder.decode(list(tokens)))
        if self._backend is not None:
            return " ".join(tokens)
        return self._tokenizer.decode(self.convert_tokens_to_ids(tokens))

    # Special tokens.

    bos_token = _text_of("bos_token")
    bos_token_id = _id_of("bos_token")
    eos_token = _text_of("eos_token")
    eos_token_id = _id_of("eos_token")
    unk_token = _text_of("unk_token")
    unk_token_id = _id_of("unk_token")
    sep_token = _text_of("sep_token")
    sep_token_id = _id_of("sep_token")
    pad_token_id = _id_of("pad_token")
    cls_token = _text_of("cls_token")
    cls_token_id = _id_of("cls_token")
    mask_token = _text_of("mask_token")
    mask_token_id = _id_of("mask_token")

    @property
    def special_tokens_map(self) -> dict[str, str]:
        """``bos_token``, ``eos_token``, ... -> text."""
        return dict(self._named)

    @property
    def all_special_tokens(self) -> list[str]:
        """Texts of the named special tokens, then of those that the checkpoint lists besides."""
        listed = self._config.get("extra_special_tokens")
        if listed is None:
            listed = self._config.get("additional_special_tokens")
        more = listed.values() if isinstance(listed, Mapping) else listed or ()
        texts = (one.get("content") if isinstance(one, Mapping) else one for one in more)
        return list(dict.fromkeys([*self._named.values(), *map(str, texts)]))

    @property
    def all_special_ids(self) -> list[int]:
        """Ids of :attr:`all_special_tokens`."""
        return [i for i in self.convert_tokens_to_ids(self.all_special_tokens) if i is not None]

    @property
    def special_token_ids(self) -> frozenset[int]:
        """Ids that ``skip_special_tokens`` drops."""
        return self._tokenizer.special_token_ids

    def _id_of_named(self, name: str) -> int | None:
        text = self._named.get(name)
        return None if text is None else self._vocab.get(text)

    @property
    def pad_token(self) -> str | None:
        """The token that fills up shorter texts. It can be set to any token of the vocabulary.

        Raises:
            RequestError: on setting a text that is not a token.
        """
        return self._named.get("pad_token")

    @pad_token.setter
    def pad_token(self, token: str) -> None:
        if token not in self._vocab:
            raise RequestError(
                f"pad_token = {token!r:.100}: must be a token of the vocabulary; a loaded model cannot "
                "get further ones",
                param="pad_token",
            )
        self._named["pad_token"] = token

    @property
    def padding_side(self) -> str:
        """``right`` or ``left``: where shorter texts are filled up. It can be set."""
        return self._sides["padding_side"]

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        self._sides["padding_side"] = _side("padding_side", side)

    @property
    def truncation_side(self) -> str:
        """``right`` or ``left``: where longer texts are cut. It can be set."""
        return self._sides["truncation_side"]

    @truncation_side.setter
    def truncation_side(self, side: str) -> None:
        self._sides["truncation_side"] = _side("truncation_side", side)

    # What the checkpoint says.

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, None if it has none."""
        return self._tokenizer.chat_template

    @property
    def model_max_length(self) -> int:
        """The checkpoint's longest text in tokens; :data:`NO_LIMIT` if it states none."""
        return int(self._config.get("model_max_length") or NO_LIMIT)

    @functools.cached_property
    def model_input_names(self) -> list[str]:
        """What a call returns: as the checkpoint says; else ids and mask, and token types where the
        model reads them."""
        stated = self._config.get("model_input_names")
        if stated is not None:
            return list(stated)
        pooling = self._intake.model.pooling
        types = pooling is not None and pooling.token_types
        return [*MODEL_INPUTS, "token_type_ids"] if types else list(MODEL_INPUTS)

    # Text to ids.

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False
    ) -> list[str]:
        """The tokens of a text, as the vocabulary spells them; unknown parts as the text does, where
        the vocabulary tells."""
        _need_text("text", text)
        if self._backend is None:
            ids = self.encode(text, pair, add_special_tokens=add_special_tokens)
            return [self._tokenizer.token_string(token_id) for token_id in ids]
        given = text if pair is None else (text, _need_text("pair", pair))
        made = self._backend.encode_batch([given], add_special_tokens=add_special_tokens)
        return list(made[0].tokens)

    def encode(
        self,
        text: str,
        text_pair: str | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        *,
        padding_side: str | None = None,
        return_tensors: str | None = None,
    ) -> Any:
        """Token ids of one text, or of a pair: a list; arguments and errors as a call of the object."""
        _need_text("text", text)
        made = self(
            text, text_pair, add_special_tokens, padding, truncation, max_length,
            padding_side=padding_side, return_tensors=return_tensors,
        )  # fmt: skip
        return made["input_ids"]

    def encode_pair(
        self,
        first: str,
        second: str | None = None,
        *,
        add_special_tokens: bool = True,
        max_length: int | None = None,
        truncation_side: Literal["left", "right"] = "left",
    ) -> EncodedPair:
        """See :meth:`headrace_core.text.Tokenizer.encode_pair`."""
        return self._tokenizer.encode_pair(
            first,
            second,
            add_special_tokens=add_special_tokens,
            max_length=max_length,
            truncation_side=truncation_side,
        )

    def token_string(self, token_id: int) -> str:
        """See :meth:`headrace_core.text.Tokenizer.token_string`."""
        return self._tokenizer.token_string(token_id)

    def __call__(
        self,
        text: str | Sequence[str],
        text_pair: str | Sequence[str] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        *,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
    ) -> TokenizedText:
        """Tokenize one text or a list of texts.

        Args:
            text_pair: the second texts of pairs, as many as ``text``.
            padding: True or ``longest``: fill up to the longest text; ``max_length``: up to that.
            truncation: True, ``longest_first`` or ``only_first``: cut to ``max_length`` tokens, special
                ones kept; None: only if ``max_length`` is given without padding. Pairs are not cut.
            max_length: tokens; None: :attr:`model_max_length`.
            pad_to_multiple_of: round the filled length up.
            padding_side: None: :attr:`padding_side`.
            return_tensors: ``pt`` for torch, ``np`` for numpy; None: lists.
            return_token_type_ids, return_attention_mask: None: as :attr:`model_input_names` says.

        Raises:
            RequestError: an argument is wrong; there is no padding token; texts of different lengths
                are to be one array; ``max_length`` leaves no room for a token.
            UnsupportedFeature: pairs are to be cut.
        """
        one = isinstance(text, str)
        texts = _texts("text", text)
        pairs = [None] * len(texts) if text_pair is None else _texts("text_pair", text_pair)
        if len(pairs) != len(texts) or (
            text_pair is not None and one != isinstance(text_pair, str)
        ):
            raise RequestError(
                f"text_pair: must hold a text for each of text, which holds {len(texts)}",
                param="text_pair",
            )
        limit = self._limit(truncation, max_length, padding)
        if limit is not None and text_pair is not None:
            raise UnsupportedFeature(
                "truncation: pairs are not cut; encode_pair(..., max_length=) cuts them at the left",
                param="truncation",
            )
        encoded = [
            self._encoded(first, second, add_special_tokens, limit)
            for first, second in zip(texts, pairs, strict=True)
        ]
        return self._collected(
            encoded, one, padding, max_length, pad_to_multiple_of, padding_side, return_tensors,
            return_token_type_ids, return_attention_mask,
        )  # fmt: skip

    def _limit(
        self, truncation: bool | str | None, max_length: int | None, padding: bool | str
    ) -> int | None:
        """Tokens that a text may have; None: any number."""
        if max_length is not None and (isinstance(max_length, bool) or max_length < 1):
            raise RequestError(
                f"max_length = {max_length!r}: must be at least 1, or None", param="max_length"
            )
        if truncation not in (None, True, False, "longest_first", "only_first", "do_not_truncate"):
            raise RequestError(
                f"truncation = {truncation!r:.100}: must be True, False, None, 'longest_first', "
                "'only_first' or 'do_not_truncate'",
                param="truncation",
            )
        if truncation in (False, "do_not_truncate"):
            return None
        if truncation is None and (max_length is None or padding):
            return None
        limit = self.model_max_length if max_length is None else max_length
        return None if limit > LONGEST_LIMIT else limit

    def _encoded(
        self, first: str, second: str | None, add_special_tokens: bool, limit: int | None
    ) -> tuple[list[int], list[int]]:
        """Ids and token types of one text, or of a pair."""
        if second is not None or limit is None:
            ids, types = self._tokenizer.encode_pair(
                first, second, add_special_tokens=add_special_tokens
            )
            return ids, types
        room = limit - (len(self._tokenizer.encode("")) if add_special_tokens else 0)
        if room < 0:
            raise RequestError(
                f"max_length = {limit}: must leave room for the special tokens", param="max_length"
            )
        if self._backend is None or self.truncation_side == "left":
            ids, types = self._tokenizer.encode_pair(
                first, add_special_tokens=add_special_tokens, max_length=limit
            )
            return ids, types
        part = self._backend.encode_batch([first], add_special_tokens=False)[0]
        part.truncate(room)
        whole = self._backend.post_process(part, None, add_special_tokens=add_special_tokens)
        return whole.ids, whole.type_ids

    def _collected(
        self,
        encoded: Sequence[tuple[list[int], list[int]]],
        one: bool,
        padding: bool | str,
        max_length: int | None,
        multiple: int | None,
        side: str | None,
        return_tensors: str | None,
        types: bool | None,
        mask: bool | None,
    ) -> TokenizedText:
        """Ids of texts in the form that was asked for."""
        side = self.padding_side if side is None else _side("padding_side", side)
        length = self._padded_length(
            [len(ids) for ids, _ in encoded], padding, max_length, multiple
        )
        names = self.model_input_names
        pad_id = self._id_of_named("pad_token")
        if length is not None and pad_id is None:
            raise RequestError(
                "padding: the tokenizer has no padding token; set one: "
                "tokenizer.pad_token = tokenizer.eos_token",
                param="padding",
            )
        rows: dict[str, list[list[int]]] = {"input_ids": []}
        if "token_type_ids" in names if types is None else types:
            rows["token_type_ids"] = []
        if "attention_mask" in names if mask is None else mask:
            rows["attention_mask"] = []
        for ids, kinds in encoded:
            whole = {"input_ids": ids, "token_type_ids": kinds, "attention_mask": [1] * len(ids)}
            for name, every in rows.items():
                fill = [pad_id or 0 if name == "input_ids" else 0] * ((length or 0) - len(ids))
                every.append([*fill, *whole[name]] if side == "left" else [*whole[name], *fill])
        if return_tensors is not None:
            return TokenizedText({n: _array(n, every, return_tensors) for n, every in rows.items()})
        return TokenizedText({n: every[0] if one else every for n, every in rows.items()})

    def _padded_length(
        self,
        lengths: Sequence[int],
        padding: bool | str,
        max_length: int | None,
        multiple: int | None,
    ) -> int | None:
        if padding in (False, "do_not_pad"):
            return None
        if padding not in (True, "longest", "max_length"):
            raise RequestError(
                f"padding = {padding!r:.100}: must be True, False, 'longest', 'max_length' or "
                "'do_not_pad'",
                param="padding",
            )
        length = max(lengths, default=0)
        if padding == "max_length":
            limit = self.model_max_length if max_length is None else max_length
            length = length if limit > LONGEST_LIMIT else limit
        return -(-length // multiple) * multiple if multiple else length

    # Ids to text.

    def decode(
        self,
        token_ids: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
        *,
        spaces_between_special_tokens: bool = True,
    ) -> Any:
        """The text of an id or of a list of ids; of a list of such lists the texts.

        Args:
            token_ids: integers, or an array of numpy or torch.
            clean_up_tokenization_spaces: leave out spaces before punctuation, for vocabularies of
                words; None: as the checkpoint says.
            spaces_between_special_tokens: see :meth:`headrace_core.text.Tokenizer.decode`.
        """
        ids = own_value(token_ids)
        if isinstance(ids, Mapping):
            ids = own_value(ids["input_ids"])
        if isinstance(ids, int):
            ids = [ids]
        ids = [own_value(one) for one in ids]
        if ids and isinstance(ids[0], Sequence):
            return [
                self.decode(
                    row,
                    skip_special_tokens,
                    clean_up_tokenization_spaces,
                    spaces_between_special_tokens=spaces_between_special_tokens,
                )
                for row in ids
            ]
        text = self._tokenizer.decode(
            ids,
            skip_special_tokens=skip_special_tokens,
            spaces_between_special_tokens=spaces_between_special_tokens,
        )
        clean = clean_up_tokenization_spaces
        if clean is None:
            clean = bool(self._config.get("clean_up_tokenization_spaces", False))
        if clean and self._backend is not None and type(self._backend.model).__name__ != "BPE":
            for spaced, plain in CLEANED_UP:
                text = text.replace(spaced, plain)
        return text

    def batch_decode(
        self,
        sequences: Any,
        skip_special_tokens: bool = False,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> list[str]:
        """The texts of lists of ids; arguments as :meth:`decode`."""
        text = self.decode(sequences, skip_special_tokens, clean_up_tokenization_spaces)
        return [text] if isinstance(text, str) else text

    # Chats.

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
                ids = self._tokenizer.encode(self._intake.render(chat), add_special_tokens=False)
            if limit is not None and len(ids) > limit:
                ids = ids[-limit:] if self.truncation_side == "left" else ids[:limit]
            encoded.append((ids, [0] * len(ids)))
        made = self._collected(
            encoded, one, padding, max_length, None, None, return_tensors, None, None
        )
        return made if return_dict else made["input_ids"]

    def __repr__(self) -> str:
        return f"{type(self).__name__}({self.name_or_path!r}, {len(self)} tokens)"


def _need_text(name: str, given: object) -> str:
    if not isinstance(given, str):
        raise RequestError(f"{name} = {given!r:.100}: must be text", param=name)
    return given


def _texts(name: str, given: object) -> list[Any]:
    """One text or several, as a list."""
    if isinstance(given, str):
        return [given]
    if not isinstance(given, Sequence) or isinstance(given, bytes | bytearray):
        raise RequestError(f"{name} = {given!r:.100}: must be text or a list of texts", param=name)
    return [_need_text(f"{name}[{index}]", one) for index, one in enumerate(given)]


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


def _side(name: str, side: str) -> str:
    if side not in SIDES:
        raise RequestError(f"{name} = {side!r:.100}: must be 'right' or 'left'", param=name)
    return side


def _array(name: str, rows: list[list[int]], kind: str) -> Any:
    """Rows as one int64 array [texts, tokens] of numpy or torch."""
    if kind not in ("pt", "np"):
        raise RequestError(
            f"return_tensors = {kind!r:.100}: must be 'pt', 'np' or None", param="return_tensors"
        )
    if len({len(row) for row in rows}) > 1:
        raise RequestError(
            f"return_tensors = {kind!r}: {name} of texts of different lengths cannot be one array; add "
            "padding=True",
            param="return_tensors",
        )
    if kind == "pt":
        import torch

        return torch.tensor(rows, dtype=torch.int64)
    import numpy

    return numpy.array(rows, dtype=numpy.int64)
