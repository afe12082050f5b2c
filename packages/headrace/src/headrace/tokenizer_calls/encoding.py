"""Texts to token ids: :class:`EncodingMixin`."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from headrace.tokenizer_calls.checks import need_ids, need_text, need_texts, several
from headrace.tokenizer_calls.cutting import Cut
from headrace.tokenizer_calls.filling import PaddingMixin, TextEncoding, TokenizedText
from headrace.tokenizer_calls.options import CALL_OPTIONS, CallOptions
from headrace.tokenizer_calls.vocabulary import LONGEST_LIMIT
from headrace_core.errors import RequestError, UnsupportedFeature

if TYPE_CHECKING:
    from headrace_core.text import EncodedPair

Words = str | Sequence[str]
"""A text, or its words."""


class EncodingMixin(PaddingMixin):
    """Makes token ids of texts."""

    def tokenize(
        self, text: str, pair: str | None = None, add_special_tokens: bool = False, **options: Any
    ) -> list[str]:
        """The tokens of a text, as the vocabulary spells them; unknown parts as the text does, where
        the vocabulary tells.

        Args:
            pair: the second text of a pair.
            options: ``truncation``, ``max_length`` and ``stride``, as a call of the object.

        Raises:
            RequestError: an argument is wrong.
            TypeError: an option is another one.
        """
        need_text("text", text)
        if pair is not None:
            need_text("pair", pair)
        for name in options:
            if name not in ("truncation", "max_length", "stride"):
                raise _refused("tokenize", name)
        wanted = CallOptions(add_special_tokens=add_special_tokens, **options)
        if self._backend is None:
            ids = self._piece(text, pair, wanted, self._cut(wanted)).ids
            return [self._tokenizer.token_string(token_id) for token_id in ids]
        return list(self._encoding(text, pair or None, wanted, self._cut(wanted)).tokens)

    def encode(
        self,
        text: Words,
        text_pair: Words | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        **options: Any,
    ) -> Any:
        """Token ids of one text, or of a pair: a list; arguments and errors as a call of the object.

        Args:
            options: further arguments of a call.
        """
        words = options.get("is_split_into_words", False)
        for name, given in (("text", text), ("text_pair", text_pair)):
            if not words and (given is not None or name == "text"):
                need_text(name, given)
        wanted = self._options(
            "encode",
            options,
            add_special_tokens=add_special_tokens,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            stride=stride,
            padding_side=padding_side,
            return_tensors=return_tensors,
        )
        return self._called(text, text_pair, wanted, "text")["input_ids"]

    def encode_pair(self, first: str, second: str | None = None, **options: Any) -> EncodedPair:
        """Ids and token types of one text, or of two.

        Args:
            options: ``add_special_tokens``, ``max_length`` and ``truncation_side``, see
                :meth:`headrace_core.text.Tokenizer.encode_pair`.

        Raises:
            RequestError: a text is not one.
        """
        need_text("first", first)
        if second is not None:
            need_text("second", second)
        return self._tokenizer.encode_pair(first, second, **options)

    def token_string(self, token_id: int) -> str:
        """See :meth:`headrace_core.text.Tokenizer.token_string`."""
        return self._tokenizer.token_string(token_id)

    def __call__(
        self,
        text: Words | Sequence[Words] | None = None,
        text_pair: Words | Sequence[Words] | None = None,
        text_target: Words | Sequence[Words] | None = None,
        text_pair_target: Words | Sequence[Words] | None = None,
        add_special_tokens: bool = True,
        padding: bool | str = False,
        truncation: bool | str | None = None,
        max_length: int | None = None,
        stride: int = 0,
        is_split_into_words: bool = False,
        pad_to_multiple_of: int | None = None,
        padding_side: str | None = None,
        return_tensors: str | None = None,
        return_token_type_ids: bool | None = None,
        return_attention_mask: bool | None = None,
        return_overflowing_tokens: bool = False,
        return_special_tokens_mask: bool = False,
        return_offsets_mapping: bool = False,
        return_length: bool = False,
        verbose: bool = True,
        tokenizer_kwargs: Mapping[str, Any] | None = None,
        **options: Any,
    ) -> TokenizedText:
        """Tokenize one text or a list of texts.

        Args:
            text_pair: the second texts of pairs, as many as ``text``.
            text_target, text_pair_target: texts that the model is to answer: their ids come as
                ``labels``, or as the whole result where ``text`` is None.
            padding: True or ``longest``: fill up to the longest text; ``max_length``: up to that.
            truncation: cut to ``max_length`` tokens, special ones kept. True or ``longest_first``: of a
                pair the longer text; ``only_first``, ``only_second``: that text of a pair; None: only if
                ``max_length`` is given without padding.
            max_length: tokens; None: :attr:`model_max_length`.
            stride: tokens that an overflowing part repeats of the part before.
            is_split_into_words: each text is a list of words.
            pad_to_multiple_of: round the filled length up.
            padding_side: None: :attr:`padding_side`.
            return_tensors: ``pt`` for torch, ``np`` for numpy; None: lists.
            return_token_type_ids, return_attention_mask: None: as :attr:`model_input_names` says.
            return_overflowing_tokens: parts that were cut off follow their text, as rows of their own;
                ``overflow_to_sample_mapping`` says whose they are.
            return_special_tokens_mask: ``special_tokens_mask``: 1 for tokens around the texts.
            return_offsets_mapping: ``offset_mapping``: first character of each token in its text, and the
                one behind its last.
            return_length: ``length``: tokens of each row.
            verbose: nothing is logged in either case.
            tokenizer_kwargs: arguments by name; they win over those that are given themselves.
            options: only ``split_special_tokens=False``, which changes nothing; True is refused.

        Raises:
            RequestError: an argument is wrong; there is no padding token; texts of different lengths
                are to be one array; ``max_length`` leaves no room for a token.
            TypeError: an option is not known.
            UnsupportedFeature: it is not built, or the plug-in's tokenizer cannot do it.
        """
        wanted = self._options(
            "__call__",
            options,
            checked_kwargs(tokenizer_kwargs),
            add_special_tokens=add_special_tokens,
            padding=padding,
            truncation=truncation,
            max_length=max_length,
            stride=stride,
            is_split_into_words=is_split_into_words,
            pad_to_multiple_of=pad_to_multiple_of,
            padding_side=padding_side,
            return_tensors=return_tensors,
            return_token_type_ids=return_token_type_ids,
            return_attention_mask=return_attention_mask,
            return_overflowing_tokens=return_overflowing_tokens,
            return_special_tokens_mask=return_special_tokens_mask,
            return_offsets_mapping=return_offsets_mapping,
            return_length=return_length,
            verbose=verbose,
        )
        if text_pair_target is not None and text_target is None:
            raise RequestError(
                "text_pair_target: must not be given without text_target", param="text_pair_target"
            )
        if text_target is None:
            return self._called(text, text_pair, wanted, "text")
        target = self._called(text_target, text_pair_target, wanted, "text_target")
        if text is None:
            return target
        made = self._called(text, text_pair, wanted, "text")
        made["labels"] = target["input_ids"]
        return made

    def encode_plus(self, text: Words, text_pair: Words | None = None, **options: Any) -> Any:
        """A call of the object with one text; the name of older versions of transformers."""
        if not options.get("is_split_into_words", False):
            need_text("text", text)
        return self(text, text_pair, **options)

    def batch_encode_plus(
        self, batch_text_or_text_pairs: Sequence[Any], **options: Any
    ) -> TokenizedText:
        """A call of the object with a list of texts; the name of older versions of transformers.

        Args:
            batch_text_or_text_pairs: texts, or (text, text) pairs.
        """
        given = several(
            "batch_text_or_text_pairs", batch_text_or_text_pairs, "a list of texts or pairs"
        )
        if given and all(isinstance(one, tuple) and len(one) == 2 for one in given):
            return self([one[0] for one in given], [one[1] for one in given], **options)
        return self(given, **options)

    def num_special_tokens_to_add(self, pair: bool = False) -> int:
        """Number of special tokens that a call puts around a text, or around the texts of a pair."""
        if self._backend is not None:
            return int(self._backend.num_special_tokens_to_add(pair))
        texts = ("a", "a") if pair else ("a",)
        plain = self._tokenizer.encode_pair(*texts, add_special_tokens=False)
        return len(self._tokenizer.encode_pair(*texts).token_ids) - len(plain.token_ids)

    @property
    def max_len_single_sentence(self) -> int:
        """:attr:`model_max_length` less the special tokens of one text."""
        return self.model_max_length - self.num_special_tokens_to_add()

    @property
    def max_len_sentences_pair(self) -> int:
        """:attr:`model_max_length` less the special tokens of a pair."""
        return self.model_max_length - self.num_special_tokens_to_add(pair=True)

    def build_inputs_with_special_tokens(
        self, token_ids_0: Sequence[int], token_ids_1: Sequence[int] | None = None
    ) -> list[int]:
        """Ids of one text, or of two, with the special tokens around them that a call puts there.

        Raises:
            RequestError: they are not ids.
            UnsupportedFeature: the tokenizer is a plug-in's.
        """
        parts = [need_ids("token_ids_0", several("token_ids_0", token_ids_0, "token ids"))]
        if token_ids_1 is not None:
            parts.append(need_ids("token_ids_1", several("token_ids_1", token_ids_1, "token ids")))
        if self._backend is None:
            raise self._not_of_plugins("build_inputs_with_special_tokens()")
        sample = self._encoding("a", None if token_ids_1 is None else "a", CallOptions(), None)
        made: list[int] = []
        before: int | None = None
        for token_id, index in zip(sample.ids, sample.sequence_ids, strict=True):
            if index is None:
                made.append(token_id)
            elif index != before:
                made += parts[index]
            before = index
        return made

    def get_special_tokens_mask(
        self,
        token_ids_0: Sequence[int],
        token_ids_1: Sequence[int] | None = None,
        already_has_special_tokens: bool = False,
    ) -> list[int]:
        """1 for each special token, 0 for the others.

        Args:
            already_has_special_tokens: the ids are of a whole prompt. False: they are of a text, or of
                a pair; the mask has places for the special tokens that are yet to come around them.

        Raises:
            RequestError: they are not ids; or there are two lists of a whole prompt.
            UnsupportedFeature: False, and the tokenizer is a plug-in's.
        """
        if already_has_special_tokens:
            if token_ids_1 is not None:
                raise RequestError(
                    "token_ids_1: must be None with already_has_special_tokens = True",
                    param="token_ids_1",
                )
            special = set(self.all_special_ids)
            ids = need_ids("token_ids_0", several("token_ids_0", token_ids_0, "token ids"))
            return [int(token_id in special) for token_id in ids]
        plain = [0] * len(token_ids_0), None if token_ids_1 is None else [0] * len(token_ids_1)
        around = self.build_inputs_with_special_tokens([], None if plain[1] is None else [])
        if not around:
            return [*plain[0], *(plain[1] or [])]
        beyond = max(around) + 1
        marked = self.build_inputs_with_special_tokens(
            [beyond] * len(plain[0]), None if plain[1] is None else [beyond] * len(plain[1])
        )
        return [int(token_id != beyond) for token_id in marked]

    def _options(
        self,
        call: str,
        options: Mapping[str, Any],
        more: Mapping[str, Any] | None = None,
        **given: Any,
    ) -> CallOptions:
        """Checked arguments of a call.

        Args:
            options: keywords that the call does not name.
            more: its ``tokenizer_kwargs``: they win, as in transformers.

        Raises:
            TypeError: there is no such option.
            UnsupportedFeature: it is not built.
        """
        every = {**given, **options, **(more or {})}
        if not every.get("split_special_tokens", False):
            every.pop("split_special_tokens", None)
        for name in every:
            if name not in CALL_OPTIONS:
                raise _refused(call, name)
        wanted = CallOptions(**every)
        if wanted.details and self._backend is None:
            raise self._not_of_plugins(wanted.details[0])
        multiple = wanted.pad_to_multiple_of
        if wanted.cuts and wanted.pads and multiple is not None:
            limit = self.model_max_length if wanted.max_length is None else wanted.max_length
            if limit % multiple:
                raise RequestError(
                    f"pad_to_multiple_of = {multiple}: max_length = {limit} must be a multiple of it "
                    "where texts are cut",
                    param="pad_to_multiple_of",
                )
        return wanted

    def _not_of_plugins(self, name: str) -> UnsupportedFeature:
        return UnsupportedFeature(
            f"{name}: the tokenizer is a plug-in's, which gives token ids only", param=name
        )

    def _called(self, text: Any, text_pair: Any, options: CallOptions, name: str) -> TokenizedText:
        """Tokens of texts; ``name`` is that of the argument that holds them."""
        pair_name = name.replace("text", "text_pair")
        words = options.is_split_into_words
        texts, one = _texts(name, text, words)
        pairs: list[Any] = [None] * len(texts)
        if text_pair is not None and not (one and isinstance(text_pair, str) and not text_pair):
            pairs, one_pair = _texts(pair_name, text_pair, words)
            if len(pairs) != len(texts) or one != one_pair:
                raise RequestError(
                    f"{pair_name}: must hold a text for each of {name}, which holds {len(texts)}",
                    param=pair_name,
                )
        cut = self._cut(options)
        encoded = [
            self._piece(first, second, options, cut)
            for first, second in zip(texts, pairs, strict=True)
        ]
        return self._collected(encoded, one, options)

    def _cut(self, options: CallOptions) -> Cut | None:
        """Rule for cutting texts; None: they are not cut."""
        if options.cuts is None:
            return None
        limit = self.model_max_length if options.max_length is None else options.max_length
        if limit > LONGEST_LIMIT:
            return None
        return Cut(limit, options.cuts, self.truncation_side, options.stride)

    def _piece(
        self, first: Words, second: Words | None, options: CallOptions, cut: Cut | None
    ) -> TextEncoding:
        """Tokens of one text, or of a pair."""
        special = options.add_special_tokens
        if self._backend is not None and (cut is not None or options.details):
            return as_piece(self._encoding(first, second, options, cut))
        assert isinstance(first, str)
        assert second is None or isinstance(second, str)
        if cut is None:
            return TextEncoding(
                *self._tokenizer.encode_pair(first, second, add_special_tokens=special)
            )
        if second is not None or cut.side != "left":
            raise self._not_of_plugins("truncation")
        if special and cut.limit < self.num_special_tokens_to_add():
            raise RequestError(
                f"max_length = {cut.limit}: must leave room for the special tokens",
                param="max_length",
            )
        return TextEncoding(
            *self._tokenizer.encode_pair(first, add_special_tokens=special, max_length=cut.limit)
        )

    def _encoding(
        self, first: Words, second: Words | None, options: CallOptions, cut: Cut | None
    ) -> Any:
        """One text or a pair as the ``tokenizers`` library encodes it: ids, offsets, masks."""
        special, words = options.add_special_tokens, options.is_split_into_words
        if cut is None:
            given = first if second is None else (first, second)
            return self._backend.encode_batch(
                [given], is_pretokenized=words, add_special_tokens=special
            )[0]
        parts = self._backend.encode_batch(
            [first] if second is None else [first, second],
            is_pretokenized=words,
            add_special_tokens=False,
        )
        around = self.num_special_tokens_to_add(second is not None) if special else 0
        cut.shorten(parts, around)
        return self._backend.post_process(*parts, add_special_tokens=special)


def as_piece(encoding: Any) -> TextEncoding:
    """An encoding of the ``tokenizers`` library, with its overflowing parts."""
    return TextEncoding(
        encoding.ids,
        encoding.type_ids,
        encoding.special_tokens_mask,
        encoding.offsets,
        overflowing=[as_piece(part) for part in encoding.overflowing],
    )


def _texts(name: str, given: Any, words: bool) -> tuple[list[Any], bool]:
    """One text or several, as a list; True if it was one."""
    if not words:
        return need_texts(name, given), isinstance(given, str)
    several_texts = isinstance(given, list | tuple) and bool(given)
    if several_texts and all(isinstance(one, list | tuple) for one in given):
        return [need_texts(f"{name}[{i}]", list(one)) for i, one in enumerate(given)], False
    if isinstance(given, str):
        raise RequestError(
            f"{name} = {given!r:.100}: must be a list of words, or a list of such lists, with "
            "is_split_into_words = True",
            param=name,
        )
    return [need_texts(name, given)], True


def checked_kwargs(given: Any) -> Mapping[str, Any]:
    """Further arguments of a call.

    Raises:
        RequestError: they are not a mapping.
    """
    if given is None:
        return {}
    if not isinstance(given, Mapping):
        raise RequestError(
            f"tokenizer_kwargs = {given!r:.100}: must be a mapping of arguments to values, or None",
            param="tokenizer_kwargs",
        )
    return given


def _refused(call: str, name: str) -> UnsupportedFeature | TypeError:
    """The error for an argument that is not known."""
    if name == "split_special_tokens":
        return UnsupportedFeature(
            "split_special_tokens = True: not built; apply_chat_template(sanitize_control_tokens=True) "
            "keeps text of special tokens in messages apart",
            param=name,
        )
    return TypeError(f"ModelTokenizer.{call}() got an unexpected keyword argument {name!r}")
