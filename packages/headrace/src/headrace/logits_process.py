"""Logits processors, under the name that users import."""

from headrace_core.logits_processor import (
    AdapterLogitsProcessor,
    AddedRequest,
    BatchUpdate,
    ForbiddenWords,
    LogitsProcessor,
    MoveDirectionality,
    MovedRequest,
    RequestLogitsProcessor,
    process_dict_updates,
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
