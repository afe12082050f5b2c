"""Markers of a multi-vector checkpoint's texts. No torch.

Three spellings: PyLate's (``query_prefix`` and others in ``config_sentence_transformers.json``), Sentence
Transformers' (``query_expansion`` in the first module's settings, markers as prompts), and ColBERT's own
(``artifact.metadata``).
"""

from __future__ import annotations

import string
from collections.abc import Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_core.pooling import DenseModule, LateInteraction
from headrace_models.checkpoint.vocabulary import read_vocabulary
from headrace_models.config.json_object import read_object
from headrace_models.config.settings import Settings
from headrace_models.formats.header import TensorEntry
from headrace_models.pooling.sentence_transformers import SentenceModules

_LENGTHS = (32, 180)
"""Default lengths of queries and documents."""


def late_interaction(
    folder: Path, sentence: SentenceModules, max_model_len: int
) -> LateInteraction:
    """Settings of late interaction in a checkpoint's files.

    Args:
        max_model_len: no text is longer.

    Raises:
        UnsupportedModel: a file is unreadable, or a value wrong.
    """
    stated = _stanford(folder) if not sentence.markers else _stated(sentence)
    settings = Settings(stated)
    expansion = stated["expansion"]
    known = _known(folder)
    query, document = str(stated["query"] or ""), str(stated["document"] or "")
    words = _words(stated["skip"])
    return LateInteraction(
        query_marker=query,
        document_marker=document,
        query_marker_id=_id_of(query, known),
        document_marker_id=_id_of(document, known),
        query_length=min(settings.integer("query_length", _LENGTHS[0]), max_model_len),
        document_length=min(settings.integer("document_length", _LENGTHS[1]), max_model_len),
        expand_queries=expansion is not None,
        attend_to_expansion=bool(expansion),
        skip_words=words,
        skip_ids=tuple(known[word] for word in words if word in known),
        expansion_id=_filler(stated["filler"], known),
    )


def projected(
    sentence: SentenceModules,
    entries: Iterable[TensorEntry],
    name: str = "linear",
    *,
    bias: bool = False,
) -> SentenceModules:
    """ColBERT's own checkpoints have their one Dense layer among the encoder's tensors, as ColPali's have.

    Args:
        name: of that layer.

    Raises:
        UnsupportedModel: there is none.
    """
    if sentence.dense:  # said in both ways
        return sentence
    shape = next((entry.shape for entry in entries if entry.name == f"{name}.weight"), ())
    if len(shape) != 2:
        raise UnsupportedModel(f"the checkpoint has no {name}.weight, the projection of each token")
    dense = DenseModule("", in_features=shape[1], out_features=shape[0], bias=bias)
    return replace(sentence, dense=(dense,), multi_vector=True)


def _stanford(folder: Path) -> dict[str, Any]:
    """ColBERT's own file, whose absence means its defaults."""
    found = read_object(folder / "artifact.metadata", required=False)
    return {
        "query": found.get("query_token_id") or "[unused0]",
        "document": found.get("doc_token_id") or "[unused1]",
        "query_length": found.get("query_maxlen"),
        "document_length": found.get("doc_maxlen"),
        "expansion": bool(found.get("attend_to_mask_tokens")),
        "filler": None,
        "skip": string.punctuation if found.get("mask_punctuation", True) else "",
    }


def _stated(sentence: SentenceModules) -> dict[str, Any]:
    given = sentence.markers
    expansion, length, filler = _expansion(given)
    skip = given.get("skiplist_words")
    return {
        "query": given.get("query_prefix", sentence.prompts.get("query")),
        "document": given.get("document_prefix", sentence.prompts.get("document")),
        "query_length": length,
        "document_length": given.get("document_length") or sentence.max_seq_length,
        "expansion": expansion,
        "filler": filler,
        "skip": string.punctuation if skip is None else skip,
    }


def _expansion(given: Mapping[str, Any]) -> tuple[bool | None, Any, Any]:
    """Three settings of filled-up queries: True if filled-up tokens are attended to (None: queries are not
    filled up), the length of queries, and the token that fills them up (None: the mask token)."""
    length = given.get("query_length")
    if "query_expansion" not in given:
        fills = given.get("do_query_expansion", True)
        return (bool(given.get("attend_to_expansion_tokens")) if fills else None), length, None
    block = given["query_expansion"]
    if block is None:
        return None, length, None
    if not isinstance(block, Mapping) or block.get("strategy", "fixed") != "fixed":
        raise UnsupportedModel(
            f"query_expansion = {block!r}: must be null, or an object whose strategy is fixed"
        )
    return bool(block.get("attend")), block.get("length") or length, block.get("token")


def _filler(token: object, known: Mapping[str, int]) -> int | None:
    if token is None:
        return None
    if not isinstance(token, str) or token not in known:
        raise UnsupportedModel(
            f"query_expansion.token = {token!r}: must be null, or a token of tokenizer.json"
        )
    return known[token]


def _words(given: object) -> tuple[str, ...]:
    """Each character of a string is a word."""
    if given is None or isinstance(given, str):
        return tuple(given or "")
    if not isinstance(given, list) or not all(isinstance(word, str) for word in given):
        raise UnsupportedModel(f"skiplist_words = {given!r:.200}: must be a list of words")
    return tuple(given)


def _known(folder: Path) -> Mapping[str, int]:
    path = folder / "tokenizer.json"
    return read_vocabulary(path) if path.is_file() else {}


def _id_of(marker: str, known: Mapping[str, int]) -> int | None:
    """PyLate's tokens end in the space that others put behind theirs."""
    return known.get(marker, known.get(marker.strip())) if marker else None
