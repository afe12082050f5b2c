"""Suites of reasoning and tool-call parsers."""
