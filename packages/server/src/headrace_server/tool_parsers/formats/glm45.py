"""GLM 4.5 to 4.7: a name, and keys and values each between their own tags.

Users name it ``glm45`` and ``glm47``.
"""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParameterFormat, ParametersParser


class Glm45ToolParser(ParametersParser):
    """GLM 4.5 to 4.7: a name, and keys and values each between their own tags.

    The new line behind the name may be missing, and so may the parameters, as in 4.7.
    """

    format = ParameterFormat(
        call=("<tool_call>",),
        name_end=("\n", "<arg_key>", "</tool_call>"),
        key="<arg_key>",
        key_end={"</arg_key>": None},
        value="<arg_value>",
        value_end="</arg_value>",
        call_end=("</tool_call>",),
    )
