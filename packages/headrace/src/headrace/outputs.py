"""Outputs, under the name that users import."""

from headrace_core.output import (
    CompletionOutput,
    FlatLogprobs,
    Logprob,
    RequestMetrics,
    RequestOutput,
)

__all__ = ["CompletionOutput", "FlatLogprobs", "Logprob", "RequestMetrics", "RequestOutput"]
