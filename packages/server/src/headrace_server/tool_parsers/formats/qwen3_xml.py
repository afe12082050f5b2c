"""Qwen3-Coder: ``<function=F>`` and ``<parameter=K>`` in ``<tool_call>``.

Users name it ``qwen3_xml`` and ``qwen3_coder``.
"""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParametersParser, function_tags


class Qwen3XmlToolParser(ParametersParser):
    """Qwen3-Coder: ``<function=F>`` and ``<parameter=K>`` in ``<tool_call>``."""

    format = function_tags("tool_call")
