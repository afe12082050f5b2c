"""docs/scaling-model.md says what the model of scaling says."""

from __future__ import annotations

import importlib.util
from pathlib import Path

from headrace.planning.scaling import ASSUMPTIONS

ROOT = Path(__file__).resolve().parent.parent
TOOL = ROOT / "tools" / "scaling_tables.py"
PAGE = ROOT / "docs" / "scaling-model.md"


def test_predictions_are_the_models() -> None:
    spec = importlib.util.spec_from_file_location("scaling_tables", TOOL)
    assert spec is not None
    assert spec.loader is not None
    tool = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    text = PAGE.read_text(encoding="utf-8")
    assert text == tool.page(text), "run python tools/scaling_tables.py"


def test_every_assumption_is_listed() -> None:
    text = PAGE.read_text(encoding="utf-8")
    for name, assumed in ASSUMPTIONS.items():
        assert f"| `{name}` | {assumed} |" in text
