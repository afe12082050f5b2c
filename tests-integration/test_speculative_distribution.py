"""What is drawn with guesses follows the model's distribution, as transformers computes it."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import pytest
import torch
from families import save_model
from modes import SETTINGS
from transformers import AutoModelForCausalLM

from headrace import LLM, SamplingParams
from headrace_core import plugins
from headrace_core.speculation import DraftProposer, DraftTask

PROMPT = [5, 17, 40, 5, 17, 40, 5, 17]
NUM_SAMPLES = 20_000
NUM_TOKENS = 4
"""Of an output, that are compared."""
NUM_DRAWN = 8
"""More, so that guesses are not cut by the output's end."""
TOP_K = 3
Paths = dict[tuple[int, ...], float]
"""Output -> its probability."""


class Gambler(DraftProposer):
    """Guesses a way that the model may go, each as likely as another."""

    ways: ClassVar[list[tuple[int, ...]]] = []

    def __init__(self, settings: Mapping[str, Any]) -> None:
        self._random = random.Random(3)

    def propose(self, tasks: Sequence[DraftTask]) -> Sequence[Sequence[int]]:
        return [self._guess(task) for task in tasks]

    def _guess(self, task: DraftTask) -> list[int]:
        done = tuple(task.token_ids[task.num_prompt_tokens :].tolist())
        ways = [way for way in self.ways if way[: len(done)] == done and len(way) > len(done)]
        return list(self._random.choice(ways)[len(done) :]) if ways else []


@pytest.fixture(scope="module")
def target(tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("target-")
    save_model("llama", folder)
    return folder


@pytest.fixture(scope="module")
def paths(target: Path) -> Paths:
    """Each of the 81 outputs: temperature 1, three tokens at every place."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32).eval()
    found: Paths = {(): 1.0}
    for _ in range(NUM_TOKENS):
        longer: Paths = {}
        with torch.no_grad():
            logits = model(torch.tensor([PROMPT + list(path) for path in found])).logits[:, -1]
        for (path, so_far), (values, ids) in zip(
            found.items(), zip(*logits.topk(TOP_K), strict=True), strict=True
        ):
            for share, token in zip(values.softmax(0).tolist(), ids.tolist(), strict=True):
                longer[(*path, token)] = so_far * share
        found = longer
    return found


@pytest.fixture(scope="module")
def similar(target: Path, tmp_path_factory) -> Path:
    """A model that differs from the target a little: it often guesses right, and often not."""
    model = AutoModelForCausalLM.from_pretrained(target, dtype=torch.float32)
    generator = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for weight in model.parameters():
            noise = torch.randn(weight.shape, generator=generator)
            weight.add_(noise, alpha=0.3 * float(weight.std() if weight.dim() > 1 else 0))
    folder = tmp_path_factory.mktemp("similar-")
    model.save_pretrained(folder)
    return folder


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("method", ["gambler", "draft_model", "ngram"])
def test_samples_follow_the_distribution(target, paths, similar, method):
    config: dict[str, Any] = {
        "method": method, "num_speculative_tokens": NUM_TOKENS - 1, "adaptive": False,
    }  # fmt: skip
    if method == "ngram":
        config["prompt_lookup_max"] = 2
    if method == "draft_model":
        config["model"] = str(similar)
    plugins.register("headrace.draft_proposers", "gambler", Gambler)
    Gambler.ways = list(paths)
    params = [
        SamplingParams(temperature=1.0, top_k=TOP_K, seed=seed, max_tokens=NUM_DRAWN, ignore_eos=True)
        for seed in range(NUM_SAMPLES)
    ]  # fmt: skip
    with LLM(str(target), speculative_config=config, **SETTINGS) as llm:
        outputs = llm.generate([PROMPT] * NUM_SAMPLES, params, use_tqdm=False)
        stats = llm.engine.stats()
    drawn = Counter(tuple(output.outputs[0].token_ids[:NUM_TOKENS]) for output in outputs)
    assert probability(drawn, paths) > 0.001
    accepted = sum(stats.num_accepted_per_position)
    assert 5000 < accepted < stats.num_draft_tokens - 5000, "guesses came true and did not"


def test_the_test_sees_a_distribution_that_is_off(paths):
    """Drawn from one in which a quarter of the guesses were taken unseen."""
    ways = list(paths)
    chances = torch.tensor([0.75 * paths[way] + 0.25 / len(ways) for way in ways])
    draws = torch.multinomial(
        chances, NUM_SAMPLES, replacement=True, generator=torch.Generator().manual_seed(2)
    )
    assert probability(Counter(ways[i] for i in draws.tolist()), paths) < 1e-6


def probability(drawn: Counter[tuple[int, ...]], paths: Paths) -> float:
    """Of draws at least as far from the distribution as these (Pearson's chi-square test)."""
    assert set(drawn) <= set(paths)
    expected = torch.tensor([paths[way] for way in paths], dtype=torch.float64) * drawn.total()
    assert float(expected.min()) > 5
    counted = torch.tensor([drawn[way] for way in paths], dtype=torch.float64)
    distance = ((counted - expected) ** 2 / expected).sum()
    freedom = torch.tensor((len(paths) - 1) / 2, dtype=torch.float64)
    return float(torch.special.gammaincc(freedom, distance / 2))
