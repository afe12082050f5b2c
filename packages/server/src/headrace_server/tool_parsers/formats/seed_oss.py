"""Seed-OSS: ``<function=F>`` and ``<parameter=K>`` in ``<seed:tool_call>``."""

from __future__ import annotations

from headrace_server.tool_parsers.parameters import ParametersParser, function_tags


class SeedOssToolParser(ParametersParser):
    """Seed-OSS: ``<function=F>`` and ``<parameter=K>`` in ``<seed:tool_call>``."""

    format = function_tags("seed:tool_call")
