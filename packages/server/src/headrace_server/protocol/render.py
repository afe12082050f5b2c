"""``/v1/chat/completions/render`` and ``/v1/completions/render``: requests as tokens."""

from __future__ import annotations

from pydantic import BaseModel, Field

from headrace_server.protocol.base import FreeObject
from headrace_server.protocol.sampling import StreamOptions


class RenderedRequest(BaseModel):
    """A request as ``POST /inference/v1/generate`` takes it."""

    request_id: str
    token_ids: list[int]
    sampling_params: FreeObject = Field(
        description="Every parameter that is not its default, the model's own defaults included."
    )
    model: str
    stream: bool = False
    stream_options: StreamOptions | None = None
    cache_salt: str | None = None
    priority: int = 0
