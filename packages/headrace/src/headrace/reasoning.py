"""Names that a file for ``--reasoning-parser-plugin`` imports."""

from headrace_server.parsing.plugin_file import (
    DeltaMessage,
    ReasoningParser,
    ReasoningParserManager,
)

__all__ = ["DeltaMessage", "ReasoningParser", "ReasoningParserManager"]
