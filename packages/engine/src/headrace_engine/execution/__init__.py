"""Execution: from a scheduled step to sampled tokens, on one device."""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

from headrace_engine.execution.memory import CachePlan, fit_max_model_len, plan_cache

if TYPE_CHECKING:
    from headrace_engine.weights.worker import ModelWorker

__all__ = ["CachePlan", "ModelWorker", "fit_max_model_len", "plan_cache"]


def __getattr__(name: str) -> Any:
    """The worker imports torch, which a core without a model does not need."""
    if name == "ModelWorker":
        from headrace_engine.weights.worker import ModelWorker

        return ModelWorker
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
