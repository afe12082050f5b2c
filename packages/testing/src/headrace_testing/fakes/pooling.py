"""Vectors of :class:`~headrace_testing.fakes.engine.FakeEngine` for texts: vectors that can be
reckoned in one's head.

A token weighs its code point, a special token nothing. An embedding's number ``j`` is the sum of the
weights at positions ``j``, ``j + size``, ... of the text: of ``"Hi"`` it is ``[72, 105, 0, 0]``,
divided by its length if it is normalised. A token's own vector is ``[weight, position, 0, ...]``.
Label ``j`` has as many votes as characters have code point modulo ``num_labels`` = ``j``. The score of a
pair is the share of the second text's characters that are in the first one.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

from headrace_core.arrays import PackedArray
from headrace_core.pooling import PoolingInfo, PoolingParams
from headrace_core.served_model import ServedModel

SIZE = 4
"""Numbers of an embedding, unless the model says otherwise."""
LAST_CHARACTER = 0x10FFFF


def fake_pooling_info(**changes: Any) -> PoolingInfo:
    """A :class:`PoolingInfo` for tests; ``changes`` replace fields."""
    info = PoolingInfo(
        tasks=("embed", "token_embed"),
        pooling_type="MEAN",
        causal=False,
        embedding_size=SIZE,
        matryoshka=(),
        scoring="cosine",
    )
    return replace(info, **changes)


def fake_pooling_model(*tasks: str, **changes: Any) -> ServedModel:
    """A :class:`ServedModel` that pools, for tests.

    Args:
        tasks: what it does; default: ``embed`` and ``token_embed``.
        changes: replace fields of its :class:`PoolingInfo`, or of itself.
    """
    tasks = tasks or ("embed", "token_embed")
    pooled = {n: changes.pop(n) for n in list(changes) if n in PoolingInfo.__dataclass_fields__}
    cross = "score" in tasks
    defaults: dict[str, Any] = {"tasks": tasks}
    if cross:
        defaults |= {"scoring": "cross", "num_labels": 1, "embedding_size": 0, "matryoshka": None}
    elif "classify" in tasks:
        defaults |= {"scoring": "", "num_labels": 2, "embedding_size": 0, "matryoshka": None}
    model = ServedModel(
        name="fake-model",
        names=("fake-model",),
        root="fake-model",
        architecture="FakeModel",
        max_model_len=4096,
        vocab_size=LAST_CHARACTER + 3,
        max_logprobs=20,
        eos_token_ids=(),
        tasks=tasks,
        has_tokenizer=True,
        has_chat_template=True,
        default_sampling_params={},
        runner="pooling",
        pooling=fake_pooling_info(**{**defaults, **pooled}),
        class_path="fake.model:FakeModel",
    )
    return replace(model, **changes)


def fake_pooled(
    task: str, token_ids: Sequence[int], params: PoolingParams, info: PoolingInfo | None
) -> PackedArray:
    """The result of one request, see the module's docstring. ``params`` is verified."""
    info = info or fake_pooling_info()
    weights = [token if token <= LAST_CHARACTER else 0 for token in token_ids]
    if task == "embed":
        return _packed([_embedding(weights, params, info)], ())
    if task == "token_embed":
        rows = [[float(weight), float(position)] for position, weight in enumerate(weights)]
        return _packed([_fitted(row, params, info) for row in rows], (len(rows),))
    labels = max(1, info.num_labels)
    if task == "token_classify":
        return _packed([_votes([w], labels, params) for w in weights], (len(weights),))
    return _packed([_votes(weights, labels, params)], ())


def fake_score(text_1: str, text_2: str, params: PoolingParams) -> float:
    """Without activation: the number of characters in place of their share."""
    shared = sum(character in text_1 for character in text_2)
    return float(shared) if params.use_activation is False else shared / max(1, len(text_2))


def _embedding(weights: Sequence[int], params: PoolingParams, info: PoolingInfo) -> list[float]:
    size = info.embedding_size or SIZE
    return _fitted([float(sum(weights[j::size])) for j in range(size)], params, info)


def _fitted(row: list[float], params: PoolingParams, info: PoolingInfo) -> list[float]:
    size = info.embedding_size or SIZE
    row = [*row, *[0.0] * (size - len(row))][: params.dimensions or size]
    length = math.hypot(*row) if params.normalize else 0.0
    return [number / length for number in row] if length else row


def _votes(weights: Sequence[int], labels: int, params: PoolingParams) -> list[float]:
    votes = [float(sum(weight % labels == j for weight in weights)) for j in range(labels)]
    if not params.use_activation:
        return votes
    if labels == 1:
        return [1 / (1 + math.exp(-votes[0]))]
    powers = [math.exp(vote - max(votes)) for vote in votes]
    return [power / sum(powers) for power in powers]


def _packed(rows: Sequence[Sequence[float]], shape: tuple[int, ...]) -> PackedArray:
    """Rows of one length as an array of ``shape`` (+ that length)."""
    width = len(rows[0]) if rows else 0
    data = array("f", (number for row in rows for number in row)).tobytes()
    return PackedArray("float32", (*shape, width), data)
