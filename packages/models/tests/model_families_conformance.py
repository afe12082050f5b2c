"""The conformance suite, with this package's resolver and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any

from safetensors.torch import load_file

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.layers.base import Layer
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.decoders import Checkpoint, ModelConformance


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

    def test_its_weights_have_names(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """They are what functions of ``LLM.apply_model`` see. Some families keep a little less than their
        checkpoints store (tables that are computed), or more (weights in two forms)."""
        assert isinstance(model, Layer)
        named = list(model.named_parameters())
        assert len(dict(named)) == len(named)
        files = checkpoint.path.glob("*.safetensors")
        stored = sum(t.numel() for file in files for t in load_file(file).values())
        assert sum(tensor.numel() for _, tensor in named) > 0.85 * stored
