"""The examples of the pages on logits processors, embeddings and beam search run as they stand."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

DOCS = Path(__file__).parents[1] / "docs"


@pytest.mark.parametrize("page", ["logits-processors", "prompt-embeddings", "beam-search"])
def test_the_examples_of_a_page_run_one_after_the_other(page, capsys):
    text = (DOCS / f"{page}.md").read_text(encoding="utf-8")
    names: dict[str, object] = {"__name__": "example"}
    blocks = re.findall(r"^```python\n(.*?)^```", text, re.MULTILINE | re.DOTALL)
    assert blocks
    for block in blocks:
        exec(compile(block, f"{page}.md", "exec"), names)
