"""Execution: from a scheduled step to sampled tokens, on one device."""

from headrace_engine.execution.memory import CachePlan, fit_max_model_len, plan_cache
from headrace_engine.execution.worker import ModelWorker

__all__ = ["CachePlan", "ModelWorker", "fit_max_model_len", "plan_cache"]
