"""examples/training_loop.py: in each form the reward grows, which it does not if weights stay behind."""

from __future__ import annotations

import importlib.util
import re
from pathlib import Path
from types import ModuleType

import pytest
import torch

from headrace import LLM

FILE = Path(__file__).parents[1] / "examples" / "training_loop.py"
ROUNDS = 12
MARGIN = 0.3
"""Of the mean reward of the last two rounds over the first's. Seen: 0.52; without updates: 0.02."""


@pytest.fixture(scope="module")
def loop() -> ModuleType:
    spec = importlib.util.spec_from_file_location("training_loop", FILE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def gain(rewards: list[float]) -> float:
    return (rewards[-1] + rewards[-2]) / 2 - rewards[0]


@pytest.mark.parametrize("form", ["in-process", "colocated", "separate", "broadcast", "quantized"])
def test_the_reward_grows(loop: ModuleType, form: str, tmp_path: Path) -> None:
    assert form in loop.FORMS
    lines: list[str] = []
    rewards = loop.run(form, tmp_path / "policy", rounds=ROUNDS, tell=lines.append)
    assert gain(rewards) > MARGIN, rewards
    assert lines[-1].endswith(f"weights {ROUNDS - 1}")


def test_it_does_not_grow_where_weights_stay_behind(
    loop: ModuleType, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(LLM, "update_weights", lambda self, weights: {})
    assert gain(loop.run("in-process", tmp_path / "policy", rounds=ROUNDS)) < MARGIN / 2


def test_the_page_runs_as_written() -> None:
    """Every block of Python on docs/training-loops.md, in its order; of the shell's, the example's lines are
    those above."""
    page = (FILE.parents[1] / "docs" / "training-loops.md").read_text(encoding="utf-8")
    blocks = re.findall(r"^```python\n(.*?)^```", page, re.MULTILINE | re.DOTALL)
    assert len(blocks) > 6
    names: dict[str, object] = {"torch": torch}
    for block in blocks:
        exec(compile(block, "docs/training-loops.md", "exec"), names)
    assert callable(names["Extension"].put_zeros)  # type: ignore[attr-defined]
    for line in re.findall(r"^\$ python examples/training_loop.py (.*)$", page, re.MULTILINE):
        words = line.split()
        assert words[words.index("--rounds") + 1].isdigit()
        assert "--form" not in words or words[words.index("--form") + 1] in page
