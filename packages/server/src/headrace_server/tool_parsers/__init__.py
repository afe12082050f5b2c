"""Tool-call formats, one module each; plug-ins of ``headrace.tool_parsers``."""
