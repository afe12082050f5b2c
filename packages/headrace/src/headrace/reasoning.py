"""What a file for ``--reasoning-parser-plugin`` imports."""

from headrace_server.parser_plugins import DeltaMessage, ReasoningParser, ReasoningParserManager

__all__ = ["DeltaMessage", "ReasoningParser", "ReasoningParserManager"]
