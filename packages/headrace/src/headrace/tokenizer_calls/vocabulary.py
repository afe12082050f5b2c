"""The tokens of a model, and facts about them: :class:`Vocabulary`."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.tokenizer_calls.checks import (
    need_flag,
    need_ids,
    need_length,
    need_side,
    need_text,
    several,
)
from headrace_core.arrays import own_value
from headrace_core.errors import RequestError, UnsupportedFeature

if TYPE_CHECKING:
    from headrace_core.text import Tokenizer
    from headrace_engine.input_processing.input_processor import InputProcessor

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that have attributes: ``bos_token``, ``bos_token_id``, ..."""
LONGEST_LIMIT = int(1e20)
"""A ``max_length`` above this is no limit."""
MODEL_INPUTS = ("input_ids", "attention_mask")


PADDING_TYPE = 0
"""``token_type_ids`` of tokens that fill up a text."""


def _text_of(name: str) -> property:
    def text(self: Vocabulary) -> str | None:
        return self._named.get(name)

    def change(self: Vocabulary, token: Any) -> None:
        self._name_token(name, token)

    return property(text, change, doc=f"Text of the checkpoint's ``{name}``, None if it has none.")


def _id_of(name: str) -> property:
    def token_id(self: Vocabulary) -> int | None:
        return self._id_of_named(name)

    def change(self: Vocabulary, given: Any) -> None:
        self._name_token(name, self._token_of(f"{name}_id", given))

    return property(token_id, change, doc=f"Id of the checkpoint's ``{name}``, None if none.")


class Vocabulary:
    """The tokens of a running model.

    Args:
        input_processor: reads the engine's prompts; it has a tokenizer.
    """

    is_fast = True

    def __init__(self, input_processor: InputProcessor) -> None:
        tokenizer = input_processor.tokenizer
        assert tokenizer is not None
        self._input_processor = input_processor
        self._tokenizer: Tokenizer = tokenizer
        self._backend: Any = getattr(tokenizer, "backend", None)
        self._config = input_processor.model.tokenizer_info
        self._named = {
            f"{name}_token": tokenizer.special_tokens[f"{name}_token"]
            for name in NAMED_TOKENS
            if f"{name}_token" in tokenizer.special_tokens
        }
        self.name_or_path = input_processor.model.root
        self._own_template: str | None = None
        self._has_own_template = False
        self._max_length: int | None = None
        self._cleans_up: bool | None = None
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
            (self._tokenizer.token_string(i), i)
            for i in range(self._input_processor.model.vocab_size)
        )
        return {token: i for token, i in tokens if token}

    def get_added_vocab(self) -> dict[str, int]:
        """Tokens that are found in a text before it is cut into others, with their ids."""
        if self._backend is None:
            return {self._tokenizer.token_string(i): i for i in self.special_token_ids}
        return {token.content: i for i, token in self._backend.get_added_tokens_decoder().items()}

    def convert_tokens_to_ids(self, tokens: str | Iterable[str]) -> Any:
        """The id of a token, or a list of ids; of an unknown one that of ``unk_token``, else None.

        Raises:
            RequestError: the tokens are not texts.
        """
        if isinstance(tokens, str):
            return self._id_of_text(tokens)
        return [self._id_of_text(token) for token in _tokens(tokens)]

    def _id_of_text(self, token: str) -> int | None:
        return self._vocab.get(token, self._id_of_named("unk_token"))

    def convert_ids_to_tokens(self, ids: Any, skip_special_tokens: bool = False) -> Any:
        """The vocabulary's spelling of an id, or a list of them; None for an unknown id.

        Raises:
            RequestError: an id is not an integer from 0 to
                :data:`~headrace.tokenizer_calls.checks.LARGEST_ID`.
        """
        given = own_value(ids)
        if isinstance(given, int):
            need_ids("ids", [given])
            return self._tokenizer.token_string(given) or None
        skipped = set(self.all_special_ids) if skip_special_tokens else ()
        every = need_ids("ids", several("ids", given, "a token id, or a list of them"))
        return [self._tokenizer.token_string(i) or None for i in every if i not in skipped]

    def convert_tokens_to_string(self, tokens: Sequence[str]) -> str:
        """The text of tokens, given by their spelling.

        Raises:
            RequestError: the tokens are not texts.
        """
        tokens = [need_text(f"tokens[{i}]", token) for i, token in enumerate(_tokens(tokens))]
        decoder = getattr(self._backend, "decoder", None)
        if decoder is not None:
            return str(decoder.decode(tokens))
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
    pad_token = _text_of("pad_token")
    """The token that fills up shorter texts, None if there is none. It can be set to any token."""
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

    def _token_of(self, name: str, given: Any) -> str | None:
        """The spelling of a token that is given by its id.

        Raises:
            RequestError: there is no such token.
        """
        token_id = own_value(given)
        if token_id is None:
            return None
        found = self.convert_ids_to_tokens(token_id) if isinstance(token_id, int) else None
        if not isinstance(found, str):
            raise RequestError(
                f"{name} = {given!r:.100}: must be the id of a token of the vocabulary", param=name
            )
        return found

    def _name_token(self, name: str, given: Any) -> None:
        """Set a named special token: the padding token to any token or None; of the others, which the
        engine's chat templates and stops use, only the present value is accepted.

        Raises:
            RequestError: the text is not a token.
            AttributeError: the token cannot be changed.
        """
        token = None if given is None else need_text(name, _content(given))
        if token is not None and token not in self._vocab:
            raise RequestError(
                f"{name} = {token!r:.100}: must be a token of the vocabulary; a loaded model cannot "
                "get further ones",
                param=name,
            )
        if name == "pad_token":
            self._named.pop(name, None)
            if token is not None:
                self._named[name] = token
        elif token != self._named.get(name):
            raise AttributeError(
                f"{name} = {token!r:.100}: cannot be changed from {self._named.get(name)!r}: the running "
                "engine's templates and stops use it; " + self._elsewhere()
            )

    def _elsewhere(self) -> str:
        """Where to find what this tokenizer cannot do."""
        return f"use transformers.AutoTokenizer.from_pretrained({self.name_or_path!r})"

    @property
    def additional_special_tokens(self) -> list[str]:
        """Special tokens that the checkpoint lists without a name."""
        return [token for token in self.all_special_tokens if token not in self._named.values()]

    @property
    def extra_special_tokens(self) -> list[str]:
        """See :attr:`additional_special_tokens`."""
        return self.additional_special_tokens

    @property
    def pad_token_type_id(self) -> int:
        """``token_type_ids`` of tokens that fill up a text."""
        return PADDING_TYPE

    def add_tokens(self, new_tokens: Any, special_tokens: bool = False) -> int:
        """Accept tokens that the vocabulary has already; a loaded model cannot get others.

        Args:
            new_tokens: a text or an ``AddedToken``, or a list of them.
            special_tokens: True: they must be special tokens already.

        Returns:
            0, the number of tokens that were added.

        Raises:
            RequestError: they are not tokens.
            UnsupportedFeature: one is not in the vocabulary, or is to become special.
        """
        one = isinstance(new_tokens, str) or hasattr(new_tokens, "content")
        for token in [new_tokens] if one else several("new_tokens", new_tokens, "tokens"):
            text = need_text("new_tokens", _content(token))
            if text not in self._vocab:
                raise UnsupportedFeature(
                    f"new_tokens: {text!r:.100} is not in the vocabulary, and a loaded model has no "
                    f"weights for further tokens; {self._elsewhere()} and train a model with it",
                    param="new_tokens",
                )
            if special_tokens and self._vocab[text] not in self.special_token_ids:
                raise UnsupportedFeature(
                    f"new_tokens: {text!r:.100} is not a special token, and the running engine cannot "
                    f"make it one; {self._elsewhere()}",
                    param="new_tokens",
                )
        return 0

    def add_special_tokens(
        self, special_tokens_dict: Mapping[str, Any], replace_extra_special_tokens: bool = True
    ) -> int:
        """Name tokens that the vocabulary has already: ``{"pad_token": "</s>"}``.

        Args:
            special_tokens_dict: ``pad_token`` and any token; other names with their present token;
                ``additional_special_tokens`` or ``extra_special_tokens`` with special tokens.
            replace_extra_special_tokens: makes no difference: special tokens remain special.

        Returns:
            0, the number of tokens that were added.

        Raises:
            RequestError: a name is not known.
            UnsupportedFeature: a token is not in the vocabulary.
            AttributeError: a name has another token, and cannot be changed.
        """
        if not isinstance(special_tokens_dict, Mapping):
            raise RequestError(
                f"special_tokens_dict = {special_tokens_dict!r:.100}: must be a mapping of names to tokens",
                param="special_tokens_dict",
            )
        for name, given in special_tokens_dict.items():
            if name in ("additional_special_tokens", "extra_special_tokens"):
                self.add_tokens(given, special_tokens=True)
            elif name.removesuffix("_token") in NAMED_TOKENS and name.endswith("_token"):
                self.add_tokens(given)
                self._name_token(name, given)
            else:
                raise RequestError(
                    f"special_tokens_dict: {name!r:.100} is not a name of a special token; names are "
                    + ", ".join([*(f"{n}_token" for n in NAMED_TOKENS), "extra_special_tokens"]),
                    param="special_tokens_dict",
                )
        return 0

    @property
    def padding_side(self) -> str:
        """``right`` or ``left``: where shorter texts are filled up. It can be set."""
        return self._sides["padding_side"]

    @padding_side.setter
    def padding_side(self, side: str) -> None:
        self._sides["padding_side"] = need_side("padding_side", side)

    @property
    def truncation_side(self) -> str:
        """``right`` or ``left``: where longer texts are cut. It can be set."""
        return self._sides["truncation_side"]

    @truncation_side.setter
    def truncation_side(self, side: str) -> None:
        self._sides["truncation_side"] = need_side("truncation_side", side)

    # What the checkpoint says.

    @property
    def chat_template(self) -> str | None:
        """The checkpoint's chat template, None if it has none. It can be set: :meth:`apply_chat_template`
        of this object renders the text from then on; the engine's own chats do not change.

        Raises:
            RequestError: on setting something else than text or None.
        """
        return self._own_template if self._has_own_template else self._tokenizer.chat_template

    @chat_template.setter
    def chat_template(self, template: str | None) -> None:
        self._own_template = None if template is None else need_text("chat_template", template)
        self._has_own_template = True

    @property
    def model_max_length(self) -> int:
        """The longest text in tokens: the checkpoint's ``model_max_length`` or the engine's
        ``max_model_len``, whichever is smaller. It can be set.

        Raises:
            RequestError: on setting something else than a number of at least 1.
        """
        if self._max_length is not None:
            return self._max_length
        context = self._input_processor.model.max_model_len
        return min(int(self._config.get("model_max_length") or context), context)

    @model_max_length.setter
    def model_max_length(self, length: int) -> None:
        given = need_length("model_max_length", length)
        if given is None:
            raise RequestError(
                "model_max_length = None: must be at least 1", param="model_max_length"
            )
        self._max_length = given

    @property
    def clean_up_tokenization_spaces(self) -> bool:
        """True if :meth:`decode` leaves out spaces before punctuation. It can be set.

        Raises:
            RequestError: on setting something else than True or False.
        """
        if self._cleans_up is not None:
            return self._cleans_up
        return bool(self._config.get("clean_up_tokenization_spaces", False))

    @clean_up_tokenization_spaces.setter
    def clean_up_tokenization_spaces(self, clean: bool) -> None:
        self._cleans_up = need_flag("clean_up_tokenization_spaces", clean)

    @property
    def init_kwargs(self) -> dict[str, Any]:
        """A copy of what ``tokenizer_config.json`` says."""
        return dict(self._config)

    @property
    def add_bos_token(self) -> bool:
        """True if a call puts ``bos_token`` before a text."""
        return bool(self._config.get("add_bos_token", False))

    @property
    def add_eos_token(self) -> bool:
        """True if a call puts ``eos_token`` behind a text."""
        return bool(self._config.get("add_eos_token", False))

    @functools.cached_property
    def backend_tokenizer(self) -> Any:
        """A copy of the ``tokenizers.Tokenizer`` underneath; changes to it do not reach the engine.

        Raises:
            AttributeError: the tokenizer is a plug-in's.
        """
        if self._backend is None:
            raise AttributeError("backend_tokenizer: the tokenizer is a plug-in's, and has none")
        return copy.deepcopy(self._backend)

    @property
    def added_tokens_decoder(self) -> dict[int, Any]:
        """Id -> ``tokenizers.AddedToken`` of each token of :meth:`get_added_vocab`, in order of ids.

        Raises:
            AttributeError: the tokenizer is a plug-in's.
        """
        if self._backend is None:
            raise AttributeError("added_tokens_decoder: the tokenizer is a plug-in's, and has none")
        return dict(sorted(self._backend.get_added_tokens_decoder().items()))

    @property
    def added_tokens_encoder(self) -> dict[str, int]:
        """Text -> id of each token of :meth:`get_added_vocab`, in order of ids."""
        return dict(sorted(self.get_added_vocab().items(), key=lambda item: item[1]))

    @functools.cached_property
    def model_input_names(self) -> list[str]:
        """Names of a call's results: as the checkpoint says; else ids and mask, and token types where the
        model reads them."""
        stated = self._config.get("model_input_names")
        if stated is not None:
            return list(stated)
        pooling = self._input_processor.model.pooling
        types = pooling is not None and pooling.token_types
        return [*MODEL_INPUTS, "token_type_ids"] if types else list(MODEL_INPUTS)


def _content(token: Any) -> object:
    """The text of an ``AddedToken``; whatever else as it is."""
    return getattr(token, "content", token)


def _tokens(given: object) -> list[str]:
    """Several tokens, by their spelling; a text's characters.

    Raises:
        RequestError: they are not texts.
    """
    if isinstance(given, str):
        return list(given)
    found = several("tokens", given, "a token's text, or a list of such")
    for index, token in enumerate(found):
        if not isinstance(token, str):
            raise RequestError(f"tokens[{index}] = {token!r:.100}: must be text", param="tokens")
    return found
