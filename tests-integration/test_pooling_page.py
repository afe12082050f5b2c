"""The examples of the page on pooling run as they stand."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest

from headrace_core import plugins
from headrace_core.pooling import io_processor

PAGE = Path(__file__).parents[1] / "docs" / "pooling.md"


def test_the_examples_run_one_after_the_other(monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    names: dict[str, Any] = {"__name__": "example"}
    load = plugins.load

    def installed(group: str, name: str) -> Any:
        """As if the page's package were installed."""
        wanted = (group, name) == (io_processor.GROUP, "products")
        return names["Products"] if wanted else load(group, name)

    monkeypatch.setattr(plugins, "load", installed)
    blocks = re.findall(r"^```python\n(.*?)^```", PAGE.read_text("utf-8"), re.MULTILINE | re.DOTALL)
    assert len(blocks) == 5
    for block in blocks:
        exec(compile(block, "pooling.md", "exec"), names)
