"""DeepSeek V3.1: name and bare arguments between tags."""

from __future__ import annotations

from headrace_server.tool_parsers.delimiters import Delimiters, DelimitersParser


class DeepSeekV31ToolParser(DelimitersParser):
    """DeepSeek V3.1: name and bare arguments between tags."""

    opens = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closes = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
    format = Delimiters(
        section="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>",
        name_end="<｜tool▁sep｜>",
        call_end="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
    )
