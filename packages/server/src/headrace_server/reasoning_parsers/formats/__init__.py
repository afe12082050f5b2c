"""Reasoning formats, one module each, named as users type them (``headrace.reasoning_parsers``)."""
