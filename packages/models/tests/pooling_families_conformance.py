"""The conformance suite of pooling models, with this package's resolver and loader."""

from __future__ import annotations

from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from adapter_files import with_adapters

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.model import BuildContext, ModelInfo
from headrace_core.platform import CpuPlatform
from headrace_models.loading.loader import load_model
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import linear_modules, matches, merged, write_adapter
from headrace_testing.model.decoders import Checkpoint, build_context
from headrace_testing.model.pooling import PoolingConformance


class PoolingFamilyConformance(PoolingConformance):
    """What is left for a family: its config and its transformers class."""

    in_layers: ClassVar[str] = r"\b(layers?|h)\.\d"
    """Pattern of names of linear modules that take adapters; others are refused by name."""
    takes_adapters: ClassVar[bool] = True
    """False: the class is refused where adapters are to be taken."""

    def resolve(self, path: Path, **settings: Any) -> ModelInfo:
        return resolve(ModelConfig(model=str(path), **settings), LoadConfig(), CpuPlatform())

    def load(self, info: ModelInfo, context: BuildContext, **settings: Any) -> Any:
        return load_model(info, context, load=LoadConfig(**settings))

    def test_an_adapter_of_all_linear_modules(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        """In a slot it computes what the model with its product in its weights does; a prompt without
        beside it is the base's."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len, runner="pooling")
        context, slots = with_adapters(build_context(info))
        if not self.takes_adapters:
            with pytest.raises(UnsupportedModel, match="takes no low-rank adapters"):
                self.load(info, context)
            return
        modules = linear_modules(checkpoint.reference)
        taken = {name: size for name, size in modules.items() if matches(name, (self.in_layers,))}
        added = write_adapter(tmp_path, taken)
        model = self.load(info, context)
        prompts = [self.prompt(9), self.prompt(9)]
        slots.place(0, slots.read(str(tmp_path)))
        slots.choose(torch.tensor([0] * 9 + [-1] * 9, dtype=torch.int32))
        if self.makes == "vectors":
            results = self.hidden(model, prompts)
        else:
            params = [self.params(use_activation=False)] * 2
            results = list(self.pooled(model, prompts, params))
        changed = Checkpoint(merged(checkpoint.reference, added), checkpoint.path)
        expected, base = (self.expected(one, prompts[0]) for one in (changed, checkpoint))
        assert float((expected - base).abs().max()) > 1e-2
        self.assert_close(results[0], expected)
        self.assert_close(results[1], base)
        for name in [name for name in modules if name not in taken][:1]:
            write_adapter(tmp_path, {name: modules[name]})
            with pytest.raises(UnsupportedModel, match=name):
                slots.read(str(tmp_path))
