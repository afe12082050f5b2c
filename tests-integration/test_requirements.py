"""The list of promises is honest: tests name what exists, and what is said to be held is tested."""

from __future__ import annotations

import importlib.util
import json
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parent.parent


def _module(name):
    spec = importlib.util.spec_from_file_location(name, ROOT / f"tools/{name}.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="module")
def tool():
    return _module("requirements")


def test_tests_and_promises_agree(tool):
    assert tool.problems(tool.requirements(), tool.marks()) == []


def test_the_page_shows_the_list_as_it_is(tool):
    page = (ROOT / "docs/reliability.md").read_text(encoding="utf-8")
    assert tool.page_with_table(page, tool.requirements()) == page


def test_unknown_and_unproven_ids_are_told(tool):
    held = tool.Requirement("SEC-98", "x", "held")
    later = tool.Requirement("SEC-97", "x", "later", "why")
    mark = tool.Mark("SEC-99", "f.py", 3, "test_x")
    told = tool.problems([held, later], [mark])
    assert len(told) == 2
    assert "f.py:3" in told[0]
    assert "'SEC-99'" in told[0]
    assert "SEC-98 is said to be held" in told[1]


def test_marks_are_found_on_functions_classes_and_modules(tool, tmp_path):
    file = tmp_path / "test_x.py"
    file.write_text(
        "import pytest\n"
        "pytestmark = [pytest.mark.req('A')]\n"
        "@pytest.mark.req('B')\n"
        "class TestX:\n"
        "    @pytest.mark.req('C', 'D')\n"
        "    async def test_y(self): ...\n"
    )
    assert {m.id for m in tool.marks_of(file, tmp_path)} == set("ABCD")


@pytest.mark.req("REL-11")
def test_every_error_has_its_page_as_the_catalogue_says():
    pages = _module("error_pages").pages()
    folder = ROOT / "docs/errors"
    assert {path.name for path in folder.glob("*.md")} == set(pages)
    for name, text in pages.items():
        assert (folder / name).read_text(encoding="utf-8") == text, (
            f"{name}: run python tools/error_pages.py"
        )


def test_the_page_of_supported_models_is_made_of_the_catalogue() -> None:
    said = (ROOT / "docs" / "supported" / "models.md").read_text()
    assert said == _module("supported_models").page(), "run python tools/supported_models.py"


def test_the_table_of_quantization_methods_is_made_of_the_registry() -> None:
    tool, text = _module("quantization_table"), (ROOT / "docs" / "quantization.md").read_text()
    assert text == tool.page(text), "run python tools/quantization_table.py"
    figures = json.loads(tool.FIGURES.read_text())
    names = {name for row in tool.rows() for name in row.names}
    assert names >= set(figures["methods"])
