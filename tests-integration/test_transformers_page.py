"""The page of models by the transformers backend is that of the stored table."""

from __future__ import annotations

import importlib.util
from pathlib import Path

TOOL = Path(__file__).resolve().parent.parent / "tools" / "transformers_page.py"


def test_the_page_is_of_the_table() -> None:
    spec = importlib.util.spec_from_file_location("transformers_page", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    expected = tool.written()
    assert tool.PAGE.read_text(encoding="utf-8") == expected, (
        "run python tools/transformers_page.py"
    )
