"""A second ``tokenizers`` object over the same vocabulary, for texts with guards.

What a guard is: :mod:`headrace_engine.input_processing.control_tokens`. The library finds special tokens
before it normalizes a text, so a guard inside one's text hides it; then the guard is dropped, and what is
left goes through normalizer, pre-tokenizer and vocabulary as any text does.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping

import tokenizers
from tokenizers import AddedToken, normalizers, pre_tokenizers

Way = Callable[[tokenizers.Tokenizer, str], None]


def guarded_backend(
    backend: tokenizers.Tokenizer, guard: str, special_texts: Mapping[int, str]
) -> tokenizers.Tokenizer | None:
    """A backend that shares the vocabulary; None: it spells guarded texts with the tokens themselves.

    Special tokens of the kind ``normalized`` are sought in the text as it stands: in the normalized
    text there is no guard any more.

    Args:
        special_texts: tokens whose texts guards keep apart.
    """
    texts = [(i, text) for i, text in special_texts.items() if len(text) > 1]
    for drop in (_before_all, _between_pieces):
        made = _copied(backend)
        drop(made, guard)
        if _keeps_apart(made, guard, texts):
            return made
    return None


def _copied(backend: tokenizers.Tokenizer) -> tokenizers.Tokenizer:
    made = tokenizers.Tokenizer(backend.model)  # shares it
    for part in ("normalizer", "pre_tokenizer", "post_processor"):
        if getattr(backend, part) is not None:
            setattr(made, part, getattr(backend, part))
    made.add_tokens(
        [
            AddedToken(
                token.content,
                single_word=token.single_word,
                lstrip=token.lstrip,
                rstrip=token.rstrip,
                normalized=token.normalized and not token.special,
                special=token.special,
            )
            for _, token in sorted(backend.get_added_tokens_decoder().items())
        ]
    )
    return made


def _before_all(made: tokenizers.Tokenizer, guard: str) -> None:
    """The pieces around a guard may become one token, as they would without it."""
    steps = [normalizers.Replace(guard, "")]
    made.normalizer = normalizers.Sequence([*steps, *_given(made.normalizer)])


def _between_pieces(made: tokenizers.Tokenizer, guard: str) -> None:
    """The pieces around a guard stay apart: for vocabularies (Unigram, words) that hold special
    tokens' texts like any other."""
    cut = pre_tokenizers.Split(guard, "removed")
    made.pre_tokenizer = pre_tokenizers.Sequence([*_given(made.pre_tokenizer), cut])


def _given(part: object) -> list[object]:
    return [] if part is None else [part]


def _keeps_apart(
    made: tokenizers.Tokenizer, guard: str, texts: Collection[tuple[int, str]]
) -> bool:
    """True if no guarded text keeps its special token. A token that single characters of the text have
    anyway (the unknown token, bytes) does not count."""
    spelled = [text[0] + guard + text[1:] for _, text in texts]
    encodings = made.encode_batch_fast(spelled, add_special_tokens=False)
    same = [pair for pair, found in zip(texts, encodings, strict=True) if pair[0] in found.ids]
    return all(i in _ids_of_characters(made, text) for i, text in same)


def _ids_of_characters(made: tokenizers.Tokenizer, text: str) -> set[int]:
    encodings = made.encode_batch_fast(list(text), add_special_tokens=False)
    return {i for found in encodings for i in found.ids}
