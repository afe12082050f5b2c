"""The conformance suite, with this package's resolver and loader."""

from __future__ import annotations

import re
import tempfile
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from adapter_files import choose, merge_files, stored_modules, with_adapters
from safetensors.torch import load_file
from torch import Tensor

from headrace_core.batch import ForwardBatch
from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_core.model import BuildContext, CausalLM, LaunchesPasses, ModelInfo, RunsParts
from headrace_core.parallel import Communicator
from headrace_core.platform import CpuPlatform
from headrace_models.layers.base import Layer
from headrace_models.layers.decoder import Decoder
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.resolve import resolve
from headrace_models.stages.cut import AbsentBlock
from headrace_models.stages.stage import Link, Stage
from headrace_testing.model.adapters import linear_modules, matches, merged, write_adapter
from headrace_testing.model.decoders import (
    Checkpoint,
    ModelConformance,
    PagedDriver,
    build_context,
    run_ranks,
)


def stage_of_two(pair: Communicator) -> Stage:
    """A rank's stage of two."""
    there, back = Link(pair, 0), Link(pair, 1)
    if pair.rank == 0:
        return Stage(0, 2, after=there, result=back)
    return Stage(1, 2, before=there, result=back)


def run_part(part: RunsParts, batch: ForwardBatch) -> Tensor:
    """A stage's part of a pass; of the first one, what comes of it."""
    handed_on = part.run_part(batch)
    if not isinstance(part, LaunchesPasses):
        return handed_on
    rows = batch.input_ids if batch.logits_rows is None else batch.logits_rows
    return part.expect(len(rows)).result(60)()


class FamilyConformance(ModelConformance):
    """What is left for a family: its config and its transformers class."""

    without_adapters: ClassVar[tuple[str, ...]] = ()
    """Patterns of names of linear modules that take no adapters: they are refused by name."""
    no_stages: ClassVar[str] = ""
    """Pattern of the reason why its layers cannot be on several stages."""
    takes_adapters: ClassVar[bool] = True
    """False: the class is refused where adapters are to be taken."""

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

    def test_two_stages(self, checkpoint: Checkpoint, model: CausalLM) -> None:
        """Layers on two ranks give the same bits as on one, also in passes that say nothing of shapes."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        steps = [{"a": self.prompt(9)}, {"b": self.prompt(5, seed=1), "a": [7]}]

        def work(pair: Communicator) -> list[Tensor]:
            part = self.load(info, replace(build_context(info), stage=stage_of_two(pair)))
            assert isinstance(part, Decoder)
            assert isinstance(part, RunsParts)
            present = [not isinstance(layer, AbsentBlock) for layer in part.layers]
            assert set(present) == {True, False}
            found = []
            with torch.inference_mode():
                for run in (part.forward, partial(run_part, part)):
                    driver = PagedDriver(part)
                    found += [run(driver.batch(step, rows=[0, 4])) for step in steps]
                return [] if pair.rank else [part.compute_logits(x).float() for x in found]

        if self.no_stages:
            with pytest.raises(UnsupportedModel, match=self.no_stages):
                run_ranks(2, work)
            return
        driver = PagedDriver(model)
        expected = [driver.step(step, rows=[0, 4]) for step in steps]
        found, _ = run_ranks(2, work)
        assert len(found) == 2 * len(steps)
        assert all(map(torch.equal, found, [*expected, *expected]))

    def test_an_adapter_of_all_linear_modules(self, checkpoint: Checkpoint, tmp_path: Path) -> None:
        """In a slot it computes what the model with its product in its weights does; a request without
        beside it is the base's."""
        info = self.resolve(checkpoint.path, max_model_len=self.max_model_len)
        context, slots = with_adapters(build_context(info))
        if not self.takes_adapters:
            with pytest.raises(UnsupportedModel, match="takes no low-rank adapters"):
                self.load(info, context)
            return
        model = self.load(info, context)
        modules = self.modules_of(checkpoint, slots)
        left = {n: size for n, size in modules.items() if matches(n, self.without_adapters)}
        added = write_adapter(
            tmp_path / "adapter", {n: size for n, size in modules.items() if n not in left}
        )
        prompt = self.prompt(13)
        slots.place(1, slots.read(str(tmp_path / "adapter")))
        choose(slots, [1] * 13 + [-1] * 13)
        logits = PagedDriver(model).step({"a": prompt, "b": prompt})
        base, expected = (
            checkpoint.logprobs(prompt),
            self.with_added(checkpoint, slots, added, prompt),
        )
        assert float((expected - base).abs().max()) > 0.1
        self.assert_close(logits[:13], expected)
        self.assert_close(logits[13:], base)
        for pattern in self.without_adapters:
            name = next(name for name in left if matches(name, (pattern,)))
            write_adapter(tmp_path / "adapter", {name: left[name]})
            with pytest.raises(UnsupportedModel, match=re.escape(name)):
                slots.read(str(tmp_path / "adapter"))

    def modules_of(self, checkpoint: Checkpoint, slots: Adapters) -> dict[str, tuple[int, int]]:
        """Linear modules of the reference, or where it is another model of the published one: those of its
        matrices that are no tables."""
        if isinstance(checkpoint.reference, torch.nn.Module):
            return linear_modules(checkpoint.reference)
        return stored_modules(checkpoint.path, slots)

    def with_added(
        self, checkpoint: Checkpoint, slots: Adapters, added: dict[str, Tensor], prompt: list[int]
    ) -> Tensor:
        """Log-probabilities of the model with these terms in its weights: the reference's, or where that is
        another model than the published one headrace's own."""
        if isinstance(checkpoint.reference, torch.nn.Module):
            changed = merged(checkpoint.reference, added)
            return Checkpoint(changed, checkpoint.path).logprobs(prompt)
        with tempfile.TemporaryDirectory() as folder:
            merge_files(checkpoint.path, Path(folder), slots, added)
            logits = PagedDriver(self.open(Path(folder))).step({"a": prompt})
        return torch.log_softmax(logits, dim=-1)
