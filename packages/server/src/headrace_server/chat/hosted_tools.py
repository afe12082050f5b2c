"""Tools that are not functions: they run at the company that defined the API, or have no schema.

Coding clients offer them beside their functions and do without. So they are left out of the prompt, and a
warning says so once for each type; a request that says that one of them must be called is refused.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from typing import Any

_FOREIGN = re.compile(
    r"(?:custom|web_search|web_search_preview|web_fetch|bash|text_editor|computer|computer_use"
    r"|computer_use_preview|code_execution|code_interpreter|container|file_search|image_generation|memory"
    r"|local_shell|shell|apply_patch|advisor|mcp_toolset|namespace|tool_search|tool_search_tool_bm25"
    r"|tool_search_tool_regex)(?:_\d{4}_?\d\d_?\d\d)?"
)
"""Published types (OpenAI's and Anthropic's), many of which end with a date."""


def is_foreign(kind: Any) -> bool:
    """True if tools of this type are left out of the prompt."""
    return isinstance(kind, str) and _FOREIGN.fullmatch(kind) is not None


def without_foreign(
    tools: Sequence[Mapping[str, Any]], note: Callable[[str], None], own: Sequence[str] = ()
) -> list[tuple[int, Mapping[str, Any]]]:
    """The tools that are left, with their positions.

    Args:
        note: is told of what is left out.
        own: types that are kept.
    """
    kept = []
    for index, tool in enumerate(tools):
        kind = tool.get("type")
        if is_foreign(kind) and kind not in own:
            note(f"tools of type {kind}")
        else:
            kept.append((index, tool))
    return kept
