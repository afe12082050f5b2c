"""Reasoning formats, one module each; plug-ins of ``headrace.reasoning_parsers``."""
