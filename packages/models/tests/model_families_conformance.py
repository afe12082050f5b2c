"""The conformance suite, with this package's resolver and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_core.testing.model import ModelConformance
from headrace_models.loader import load_model
from headrace_models.resolve import resolve


class FamilyConformance(ModelConformance):
    """What is left for a family: its config and its transformers class."""

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> CausalLM:
        return load_model(info, context, load=LoadConfig(**settings))

    def architecture(self) -> str:
        """The row of the catalogue that the class tests; override it where the reference has another
        name than the checkpoints."""
        name: str = self.hf_class().__name__
        return name
