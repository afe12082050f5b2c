"""No family has an operation on the path of a step that cannot be recorded.

Checkpoints are those of the suites that test parity in the package of the models, with each feature on;
in bfloat16, where more is converted than in float32.
"""

from __future__ import annotations

import importlib
import logging
import sys
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch
from captured import Comparison, make_worker

from headrace_kernels.cpu import library
from headrace_models.catalogue import ARCHITECTURES
from headrace_testing.model.decoders import randomise

if library.path() is None:
    pytest.skip("the native library is not built", allow_module_level=True)

HERE = Path(__file__).parent
SUITES = HERE.parent / "packages" / "models" / "tests"
GENERATING = [
    row.name for row in ARCHITECTURES.values() if row.task == "generate" and not row.alias_of
]

SEEN_ONLY = {
    "BagelTextForCausalLM": ("test_vision_bagel", "TestBagel", 120),
    "Molmo2TextForCausalLM": ("test_vision_molmo2", "TestMolmo2", 100),
    "Step3TextForCausalLM": ("test_vision_step", "TestStep3VL", 100),
}
"""Language models that are published with towers only: module and suite of the whole, tokens to draw from."""


class WithTowers:
    """A suite of the whole model, as one of a language model."""

    max_model_len = 64

    def __init__(self, module: str, name: str, tokens: int) -> None:
        self.suite = getattr(importlib.import_module(module), name)()
        self.tokens = tokens

    def make_checkpoint(self, folder: Path) -> None:
        torch.manual_seed(0)
        reference = self.suite.hf_class()(self.suite.hf_config()).eval()
        randomise(reference)
        self.suite.save(reference, folder)

    def hf_config(self) -> SimpleNamespace:
        return SimpleNamespace(vocab_size=self.tokens)


@pytest.fixture(scope="module")
def suites():
    """Architecture -> classes that test it."""
    sys.path.append(str(SUITES))
    try:
        shared = importlib.import_module("model_families_conformance")
        for path in sorted(SUITES.glob("test_*.py")):
            if "Conformance)" in path.read_text() and not (HERE / path.name).exists():
                importlib.import_module(path.stem)
        found = {name: [WithTowers(*suite)] for name, suite in SEEN_ONLY.items()}
    finally:
        sys.path.remove(str(SUITES))
    classes = [shared.FamilyConformance]
    while classes:
        children = classes.pop().__subclasses__()
        classes += children
        for suite in children:
            if suite.__name__.startswith("Test"):
                found.setdefault(suite().architecture(), []).append(suite())
    return found


@pytest.mark.keep(50, every_value=False)
@pytest.mark.parametrize("architecture", GENERATING)
def test_steps_are_captured_and_replay_gives_their_bits(
    suites, architecture, tmp_path, caplog
) -> None:
    caplog.set_level(logging.INFO, "headrace_engine.execution.capture")
    for number, suite in enumerate(suites[architecture]):
        folder = tmp_path / str(number)
        folder.mkdir()
        suite.make_checkpoint(folder)
        worker = make_worker(folder, dtype="bfloat16", max_model_len=suite.max_model_len)
        try:
            assert worker._ready().graph is not None, caplog.messages
            compared = Comparison(worker, suite.hf_config().vocab_size)
            compared.check(compared.batch([(1, 5), (7, 30), (1, 40), (3, 3)]))
            compared.check(compared.batch([(1, 33)], seed=1))
        finally:
            worker.close()
