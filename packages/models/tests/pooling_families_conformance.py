"""The conformance suite of pooling models, with this package's resolver and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import BuildContext, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.pooling import PoolingConformance


class PoolingFamilyConformance(PoolingConformance):
    """What is left for a family: its config and its transformers class."""

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> Any:
        return load_model(info, context, load=LoadConfig(**settings))
