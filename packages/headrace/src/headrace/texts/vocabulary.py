"""The tokens of a model, and facts about them: :class:`Vocabulary`."""

from __future__ import annotations

import functools
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.texts.checks import need_ids, need_side, need_text, several
from headrace_core.errors import RequestError
from headrace_core.foreign import own_value

if TYPE_CHECKING:
    from headrace_core.text import Tokenizer
    from headrace_engine.intake.intake import Intake

NAMED_TOKENS = ("bos", "eos", "unk", "sep", "pad", "cls", "mask")
"""Special tokens that have attributes: ``bos_token``, ``bos_token_id``, ..."""
LONGEST_LIMIT = int(1e20)
"""A ``max_length`` above this is no limit."""
MODEL_INPUTS = ("input_ids", "attention_mask")


def _text_of(name: str) -> property:
    def text(self: Vocabulary) -> str | None:
        return self._named.get(name)

    return property(text, doc=f"Text of the checkpoint's ``{name}``, None if it has none.")


def _id_of(name: str) -> property:
    def token_id(self: Vocabulary) -> int | None:
        return self._id_of_named(name)

    return property(token_id, doc=f"Id of the checkpoint's ``{name}``, None if it has none.")


class Vocabulary:
    """The tokens of a running model.

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
            RequestError: an id is not an integer from 0 to :data:`~headrace.texts.checks.LARGEST_ID`.
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
        if need_text("pad_token", token) not in self._vocab:
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
        """The checkpoint's chat template, None if it has none."""
        return self._tokenizer.chat_template

    @property
    def model_max_length(self) -> int:
        """The longest text in tokens: the checkpoint's ``model_max_length`` or the engine's
        ``max_model_len``, whichever is smaller."""
        context = self._intake.model.max_model_len
        return min(int(self._config.get("model_max_length") or context), context)

    @functools.cached_property
    def model_input_names(self) -> list[str]:
        """Names of a call's results: as the checkpoint says; else ids and mask, and token types where the
        model reads them."""
        stated = self._config.get("model_input_names")
        if stated is not None:
            return list(stated)
        pooling = self._intake.model.pooling
        types = pooling is not None and pooling.token_types
        return [*MODEL_INPUTS, "token_type_ids"] if types else list(MODEL_INPUTS)


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
