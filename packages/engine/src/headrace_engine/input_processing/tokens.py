"""Checks of token ids and of the tokenizer, for every part of the input processor."""

from __future__ import annotations

from collections.abc import Iterable

from headrace_core.errors import RequestError
from headrace_core.text import Tokenizer


def need_tokenizer(tokenizer: Tokenizer | None, param: str) -> Tokenizer:
    """The tokenizer.

    Raises:
        RequestError: there is none, and ``param`` needs one.
    """
    if tokenizer is None:
        raise RequestError(
            f"{param}: must be token ids, because the engine runs without a tokenizer "
            "(skip_tokenizer_init)",
            param=param,
        )
    return tokenizer


def check_ids(param: str, ids: Iterable[object], vocab_size: int) -> None:
    """Refuse what is no token.

    Raises:
        RequestError: naming ``param`` and the first such id.
    """
    for token_id in ids:
        if type(token_id) is not int or not 0 <= token_id < vocab_size:
            raise RequestError(
                f"{param}: {token_id!r:.100} is not a token id; they are integers in "
                f"0..{vocab_size - 1}",
                param=param,
            )


def check_text(param: str, text: str) -> None:
    """Refuse what cannot be written as UTF-8, which no tokenizer takes.

    Raises:
        RequestError: naming ``param`` and the place.
    """
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise RequestError(
            f"{param}: character {error.start} is half of a surrogate pair, which is not text",
            param=param,
        ) from None
