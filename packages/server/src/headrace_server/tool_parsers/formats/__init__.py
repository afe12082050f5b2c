"""Tool-call formats, one module each, named as users type them (``headrace.tool_parsers``)."""
