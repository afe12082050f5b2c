"""DeepSeek V3-0324 and R1-0528: kind, name, and fenced arguments between tags."""

from __future__ import annotations

from headrace_server.tool_parsers.delimiters import Delimiters, DelimitersParser


class DeepSeekV3ToolParser(DelimitersParser):
    """DeepSeek V3-0324 and R1-0528: kind, name, and fenced arguments between tags."""

    opens = ("<｜tool▁calls▁begin｜>", "<｜tool▁call▁begin｜>")
    closes = ("<｜tool▁calls▁end｜>", "<｜tool▁call▁end｜>")
    format = Delimiters(
        section="<｜tool▁calls▁begin｜>",
        call="<｜tool▁call▁begin｜>",
        kind="function<｜tool▁sep｜>",
        name_end="\n",
        fence=("```json", "```"),
        call_end="<｜tool▁call▁end｜>",
        section_end="<｜tool▁calls▁end｜>",
    )
