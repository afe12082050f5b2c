"""The walk of a token, as docs/architecture.md lists it, is that of a traced server."""

from __future__ import annotations

import importlib.util
import re
import sys
from pathlib import Path

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "architecture.md"
MOST_FILES = 35


def listed() -> list[str]:
    """The files of the page's list, as ``package/folder/module``."""
    text = PAGE.read_text(encoding="utf-8").partition("<!-- walk: begin -->")[2]
    found = re.findall(r"`(\w+)((?:/\w+)+)`", text.partition("<!-- walk: end -->")[0])
    return [f"headrace_{package}{module}" for package, module in found]


def test_a_token_passes_the_files_that_the_page_lists() -> None:
    spec = importlib.util.spec_from_file_location(
        "request_walk", ROOT / "tools" / "request_walk.py"
    )
    assert spec is not None
    assert spec.loader is not None
    tool = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(tool)
    traced, page = set(tool.trace().token), listed()
    assert len(page) == len(set(page)) <= MOST_FILES
    assert traced <= set(page), f"a token also passes {sorted(traced - set(page))}: list them"
    # Passed less often than each token: the first two where tokens that come together are written
    # together, the last where a text repeats tokens, whose bytes are remembered.
    rare = {
        "headrace_server/http/middleware",
        "headrace_server/http/h11_protocol",
        "headrace_engine/input_processing/tokenizer",
    }
    assert set(page) - traced <= rare, "the page lists what a token does not pass"
