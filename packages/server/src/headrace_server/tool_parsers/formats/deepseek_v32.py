"""DeepSeek V3.2: as MiniMax M2's with a prefix; a key says whether its value is a string."""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParametersParser, invoke_tags


class DeepSeekV32ToolParser(ParametersParser):
    """DeepSeek V3.2: as MiniMax M2's with a prefix; a key says whether its value is a string."""

    format = invoke_tags(
        "｜DSML｜",
        ("<｜DSML｜function_calls>", "</｜DSML｜function_calls>"),
        key_end={'" string="true">': "string", '" string="false">': "json", '">': None},
    )
