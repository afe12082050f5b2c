"""Run and serve language models.

Names are imported when they are first used, so that ``import headrace`` is quick and starts nothing.
"""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

__version__ = "0.1.0"
__version_tuple__ = (0, 1, 0)

_HOMES = {
    "LLM": "headrace.llm",
    "LLMEngine": "headrace.llm_engine",
    "AsyncLLM": "headrace.async_llm",
    "AsyncLLMEngine": "headrace.async_llm",
    "EngineArgs": "headrace.engine_args",
    "AsyncEngineArgs": "headrace.engine_args",
    "LoRARequest": "headrace_core.lora",
    "ModelRegistry": "headrace_core.plugins",
    "SamplingParams": "headrace_core.sampling.params",
    "PoolerConfig": "headrace_core.pooling",
    "PoolingParams": "headrace_core.pooling",
    "ClassificationOutput": "headrace.outputs",
    "ClassificationRequestOutput": "headrace.outputs",
    "CompletionOutput": "headrace_core.output",
    "EmbeddingOutput": "headrace.outputs",
    "EmbeddingRequestOutput": "headrace.outputs",
    "PoolingOutput": "headrace_core.output",
    "PoolingRequestOutput": "headrace_core.output",
    "RequestOutput": "headrace_core.output",
    "ScoringOutput": "headrace_core.output",
    "ScoringRequestOutput": "headrace_core.output",
    "PromptType": "headrace.inputs",
    "TextPrompt": "headrace_core.request",
    "TokensPrompt": "headrace_core.request",
}

__all__ = [
    "LLM",
    "AsyncEngineArgs",
    "AsyncLLM",
    "AsyncLLMEngine",
    "ClassificationOutput",
    "ClassificationRequestOutput",
    "CompletionOutput",
    "EmbeddingOutput",
    "EmbeddingRequestOutput",
    "EngineArgs",
    "LLMEngine",
    "LoRARequest",
    "ModelRegistry",
    "PoolerConfig",
    "PoolingOutput",
    "PoolingParams",
    "PoolingRequestOutput",
    "PromptType",
    "RequestOutput",
    "SamplingParams",
    "ScoringOutput",
    "ScoringRequestOutput",
    "TextPrompt",
    "TokensPrompt",
    "__version__",
    "__version_tuple__",
]

if TYPE_CHECKING:
    from headrace.async_llm import AsyncLLM, AsyncLLMEngine
    from headrace.engine_args import AsyncEngineArgs, EngineArgs
    from headrace.inputs import PromptType
    from headrace.llm import LLM
    from headrace.llm_engine import LLMEngine
    from headrace.outputs import (
        ClassificationOutput,
        ClassificationRequestOutput,
        EmbeddingOutput,
        EmbeddingRequestOutput,
    )
    from headrace_core.lora import LoRARequest
    from headrace_core.output import (
        CompletionOutput,
        PoolingOutput,
        PoolingRequestOutput,
        RequestOutput,
        ScoringOutput,
        ScoringRequestOutput,
    )
    from headrace_core.plugins import ModelRegistry
    from headrace_core.pooling import PoolerConfig, PoolingParams
    from headrace_core.request import TextPrompt, TokensPrompt
    from headrace_core.sampling.params import SamplingParams


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    value = getattr(importlib.import_module(_HOMES[name]), name)
    globals()[name] = value
    return value


def __dir__() -> list[str]:
    return sorted(__all__)
