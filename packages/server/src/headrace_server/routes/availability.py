"""The APIs that clients know, the tasks that a model needs for them, and why one is absent."""

from __future__ import annotations

from collections.abc import Mapping
from typing import NamedTuple

from headrace_core.errors import UnsupportedFeature
from headrace_core.served_model import ServedModel


class Api(NamedTuple):
    """Purpose of a route."""

    name: str
    tasks: tuple[str, ...]
    """Any of these tasks is enough."""


_GENERATE = ("generate",)
_SCORE = ("score", "embed", "token_embed")
_RERANK = Api("Rerank", _SCORE)
_POOL = ("token_embed", "token_classify", "embed", "classify", "plugin")

INFERENCE_ROUTES: Mapping[str, Api] = {
    "/v1/completions": Api("Completions", _GENERATE),
    "/v1/chat/completions": Api("Chat Completions", _GENERATE),
    "/v1/chat/completions/batch": Api("Chat Completions", _GENERATE),
    "/v1/responses": Api("Responses", _GENERATE),
    "/v1/messages": Api("Messages", _GENERATE),
    "/inference/v1/generate": Api("Generate", _GENERATE),
    "/v1/audio/transcriptions": Api("Transcriptions", ("transcription",)),
    "/v1/audio/translations": Api("Translations", ("transcription",)),
    "/v1/embeddings": Api("Embeddings", ("embed",)),
    "/v2/embed": Api("Embed", ("embed",)),
    "/classify": Api("Classification", ("classify",)),
    "/score": Api("Score", _SCORE),
    "/v1/score": Api("Score", _SCORE),
    "/rerank": _RERANK,
    "/v1/rerank": _RERANK,
    "/v2/rerank": _RERANK,
    "/pooling": Api("Pooling", _POOL),
}
"""POST routes that clients know; those that nobody serves here answer 400 saying why."""


def can_score(model: ServedModel) -> bool:
    """True if pairs can be scored: by the model itself, or by its embeddings."""
    if model.pooling is not None:
        return bool(model.pooling.scoring)
    return bool({"score", "embed"} & set(model.tasks))


def unserved(path: str, model: ServedModel) -> UnsupportedFeature:
    """The refusal of a route of :data:`INFERENCE_ROUTES`: which class the model is, what it does, and
    what it lacks if it comes close."""
    api = INFERENCE_ROUTES[path]
    kind = model.class_path.rpartition(":")[2] or model.architecture
    tasks = ", ".join(sorted(model.tasks)) or "(none)"
    needed = " or ".join(api.tasks)
    if set(api.tasks) & set(model.tasks):
        needed += f", and {_CONDITIONS.get(path, 'vectors of a kind that can be compared')}"
    reasons = [reason for task in api.tasks for reason in model.unmet.get(task, ())]
    text = f"this model does not support {api.name} API: {kind} has the tasks {tasks}"
    return UnsupportedFeature("; ".join([text, f"the API needs {needed}", *reasons]))


_CONDITIONS = dict.fromkeys(
    (
        "/v1/chat/completions",
        "/v1/chat/completions/batch",
        "/v1/responses",
        "/v1/messages",
    ),
    "a chat template (--chat-template)",
)
"""Needs of routes beside a task."""
