"""Every epsilon that a config names is the one that its norms are made with: at their defaults, which the
families' own tests leave them at, logits do not show it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import test_families
import test_gated_families
import test_gpt_families
import test_latent_families
import test_moe_families
import test_more_families
import test_other_recurrences
import test_recurrent_families
from model_families_conformance import FamilyConformance

from headrace_testing.model.decoders import PagedDriver

_MODULES = (
    test_families, test_gated_families, test_gpt_families, test_latent_families, test_moe_families,
    test_more_families, test_other_recurrences, test_recurrent_families,
)  # fmt: skip
_LARGE = 0.05


def _suites() -> dict[str, type[FamilyConformance]]:
    """One for each architecture that transformers has and configures."""
    found: dict[str, type[FamilyConformance]] = {}
    for module in _MODULES:
        for name, suite in vars(module).items():
            if name.startswith("Test") and issubclass(suite, FamilyConformance):
                architecture = suite().hf_class().__name__
                if suite().architecture() == architecture:
                    found.setdefault(architecture, suite)
    return found


@pytest.mark.keep(38, every_value=False)
@pytest.mark.parametrize(("architecture", "suite"), _suites().items())
def test_epsilons(architecture: str, suite: Any, tmp_path: Path) -> None:
    tests = suite()
    settings = tests.hf_config().to_dict()
    named = [key for key, value in settings.items() if "eps" in key and value is not None]
    made = tests.make_checkpoint(tmp_path, **dict.fromkeys(named, _LARGE))
    prompt = tests.prompt(11)
    logits = PagedDriver(tests.open(tmp_path)).step({"a": prompt})
    tests.assert_close(logits, made.logprobs(prompt))
