"""``GET /v1/models``."""

from __future__ import annotations

import uuid
from typing import Literal

from pydantic import BaseModel, Field


def _permission_id() -> str:
    return f"modelperm-{uuid.uuid4().hex}"


class ModelPermission(BaseModel):
    """Kept for clients that look at it; permissions are not managed here."""

    id: str = Field(default_factory=_permission_id)
    object: Literal["model_permission"] = "model_permission"
    created: int
    allow_create_engine: bool = False
    allow_sampling: bool = True
    allow_logprobs: bool = True
    allow_search_indices: bool = False
    allow_view: bool = True
    allow_fine_tuning: bool = False
    organization: str = "*"
    group: str | None = None
    is_blocking: bool = False


class ModelCard(BaseModel):
    """One served name."""

    id: str
    object: Literal["model"] = "model"
    created: int
    owned_by: str = "headrace"
    root: str
    parent: str | None = None
    max_model_len: int | None
    supported_tasks: list[str]
    """``generate``, ``transcription``, ``embed``, ``classify``, ``score``, ..."""
    permission: list[ModelPermission]


class ModelList(BaseModel):
    """All served names."""

    object: Literal["list"] = "list"
    data: list[ModelCard]
