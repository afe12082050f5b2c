"""Configuration classes, under the name that users import."""

from headrace_core.config import LoadConfig, ModelConfig
from headrace_engine.config import (
    AttentionConfig,
    CacheConfig,
    DeviceConfig,
    EngineConfig,
    ObservabilityConfig,
    SchedulerConfig,
    StructuredOutputsConfig,
)
from headrace_engine.multiproc.config import ParallelConfig

__all__ = [
    "AttentionConfig",
    "CacheConfig",
    "DeviceConfig",
    "EngineConfig",
    "LoadConfig",
    "ModelConfig",
    "ObservabilityConfig",
    "ParallelConfig",
    "SchedulerConfig",
    "StructuredOutputsConfig",
]
