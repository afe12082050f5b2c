"""Logits processors, under the name that users import."""

from headrace_core.sampling.logits_processor import (
    AddedRequest,
    BatchUpdate,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    process_dict_updates,
)
from headrace_engine.logits_adapter import (
    AdapterLogitsProcessor,
    ForbiddenWords,
    RequestLogitsProcessor,
)

__all__ = [
    "AdapterLogitsProcessor",
    "AddedRequest",
    "BatchUpdate",
    "ForbiddenWords",
    "LogitsProcessor",
    "MoveDirectionality",
    "MovedRequest",
    "RequestLogitsProcessor",
    "process_dict_updates",
]
