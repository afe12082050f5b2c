"""``examples/skip_loading_weights_in_engine_init.py``: random weights first, then those of a normal start."""

from __future__ import annotations

import importlib.util
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from headrace import LLM, SamplingParams

EXAMPLE = Path(__file__).parents[1] / "examples" / "skip_loading_weights_in_engine_init.py"


def example() -> Any:
    spec = importlib.util.spec_from_file_location(EXAMPLE.stem, EXAMPLE)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("options", [[], ["--engine-process"]])
def test_the_example_ends_with_the_weights_of_a_normal_start(options: list[str]) -> None:
    ran = subprocess.run(
        [sys.executable, str(EXAMPLE), "--max-model-len", "256", "--max-tokens", "8", *options],
        capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert ran.returncode == 0, ran.stderr
    before, after = ran.stdout.split("The checkpoint's:\n")
    with LLM(max_model_len=256) as llm:
        params = SamplingParams(temperature=0.0, max_tokens=8)
        outputs = llm.generate(example().PROMPTS, params, use_tqdm=False)
    for output in outputs:
        choice = output.outputs[0]
        line = f"{output.prompt!r} -> {choice.text!r} {choice.token_ids}\n"
        assert line in after
        assert line not in before
        assert f"{output.prompt!r} -> " in before
