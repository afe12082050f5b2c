"""Tokens of a vocabulary that are pieces of images (Chameleon Team 2024, arXiv:2405.09818)."""

from __future__ import annotations

from collections.abc import Mapping

from headrace_core.errors import UnsupportedModel

_OF_IMAGES = "IMGIMG"
"""Beginning of their names."""


def image_tokens(vocabulary: object, number: int) -> Mapping[int, int]:
    """Number of a piece of an image -> its token; the names of tokens have letters for digits.

    Args:
        vocabulary: ``vocabulary_map`` of ``config.json``.
        number: tokens.

    Raises: UnsupportedModel: it is no object of names and ids, or a name has no number.
    """
    if not isinstance(vocabulary, Mapping):
        raise UnsupportedModel(
            "config.json: vocabulary_map must be an object of tokens and their ids"
        )
    found = {}
    for name, token in vocabulary.items():
        if not str(name).startswith(_OF_IMAGES):
            continue
        letters = str(name)[len(_OF_IMAGES) : -1]
        digits = [ord(letter) - ord("A") for letter in letters]
        if not digits or not all(0 <= digit <= 9 for digit in digits) or type(token) is not int:
            raise UnsupportedModel(
                f"config.json: vocabulary_map: {name!r} = {token!r}: must be the token of a piece of an image"
            )
        if not 0 <= token < number:
            raise UnsupportedModel(
                f"config.json: vocabulary_map: {name!r} = {token}: beyond vocab_size"
            )
        found[int("".join(map(str, digits)))] = token
    return found
