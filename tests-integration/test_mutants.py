"""Wrong model files are refused by name, and end nothing (F8).

A sample of them; ``HEADRACE_MUTANTS=all`` for every one.
"""

from __future__ import annotations

import os
import random

import pytest
from mutants import SEED, Loader, Mutant, other_mutants, put, safetensors_mutants
from servers import SLACK

from headrace import demo

ALL = os.environ.get("HEADRACE_MUTANTS") == "all"
NUM_SAMPLED = 40 if os.environ.get("HEADRACE_TESTS") == "sampled" else 100
pytestmark = [
    pytest.mark.req("F8"),
    pytest.mark.req("SEC-22"),
    pytest.mark.req("REL-13"),
    pytest.mark.timeout(3600 if ALL else 300),
]


@pytest.fixture(scope="module")
def loader():
    loader = Loader()
    yield loader
    loader.close()


def _chosen(mutants) -> list[Mutant]:
    mutants = list(mutants)
    return mutants if ALL else random.Random(SEED).sample(mutants, NUM_SAMPLED)


def _problems(loader: Loader, mutants: list[Mutant], folder) -> list[str]:
    """Descriptions of all that went wrong."""
    right = loader.load(demo.path())
    assert right.kind == "loaded", right.text
    names = {mutant.file for mutant in mutants} | {file.name for file in demo.path().iterdir()}
    found = []
    for mutant in mutants:
        put(mutant, demo.path(), folder)
        outcome = loader.load(folder)
        said = f"{mutant.file}, {mutant.name}: {outcome.kind} {outcome.text[:300]}"
        if outcome.kind not in ("loaded", "refused"):
            found.append(said)
        elif outcome.kind == "loaded" and not mutant.harmless:
            found.append(f"{said}, but must be refused")
        elif outcome.kind == "refused" and not any(name in outcome.text for name in names):
            found.append(f"{said}, which does not name a file")
        if outcome.seconds > 5 * SLACK:
            found.append(f"{said}, after {outcome.seconds:.1f} s")
        if outcome.peak > right.peak + len(mutant.content) + 100 * 2**20:
            found.append(f"{said}, with {outcome.peak / 2**20:.0f} MiB at most")
    print(f"{len(mutants)} mutants, {len(found)} problems")
    return found


def test_safetensors(loader, tmp_path):
    mutants = list(safetensors_mutants(demo.path() / "model.safetensors"))
    assert len(mutants) >= 200
    problems = _problems(loader, _chosen(mutants), tmp_path / "m")
    assert not problems, "\n".join(problems)


def test_other_files(loader, tmp_path):
    mutants = list(other_mutants(demo.path()))
    assert len(mutants) >= 100
    problems = _problems(loader, _chosen(mutants), tmp_path / "m")
    assert not problems, "\n".join(problems)
