"""The page on the offline API: its examples run, and the names in it exist. So does the example program."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from lora_adapters import demo_adapter, demo_folder

from headrace.tokenizer import ModelTokenizer

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "offline.md"


def test_the_examples_run_one_after_the_other(
    capsys: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "base").symlink_to(demo_folder())
    demo_adapter(tmp_path / "adapters" / "french", 1)
    monkeypatch.chdir(tmp_path)
    names: dict[str, Any] = {"__name__": "example"}
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 12
    for block in blocks:
        exec(compile(block, "offline.md", "exec"), names)
    said = capsys.readouterr().out
    assert "What is 2 + 3? ->" in said
    assert re.search(r"^error .*no token is possible", said, re.MULTILINE)
    assert "headrace:prompt_tokens {'model_name': 'headrace-demo', 'engine': '0'} " in said


def test_every_name_of_the_tokenizer_exists() -> None:
    text = PAGE.read_text("utf-8")
    listed = text[text.index("It has `encode`") : text.index("Each argument of these")]
    names = re.findall(r"`(\w+)`", listed)
    assert len(names) > 25
    missing = [
        n
        for n in names
        if not hasattr(ModelTokenizer, n) and not hasattr(ModelTokenizer, f"{n}_token")
    ]
    assert missing == []


def test_the_example_program() -> None:
    done = subprocess.run(
        [sys.executable, str(ROOT / "examples" / "offline_metrics.py"), "--max-model-len", "512"],
        capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert "'Hello' ->" in done.stdout
    assert "headrace:request_success {'finished_reason': 'error'} = 0" in done.stdout
    assert re.search(r"^headrace:request_prompt_tokens: 4 observations", done.stdout, re.MULTILINE)
