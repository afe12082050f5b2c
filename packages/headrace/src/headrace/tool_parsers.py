"""Names that a file for ``--tool-parser-plugin`` imports."""

from headrace_server.parsing.plugin_file import (
    DeltaFunctionCall,
    DeltaMessage,
    DeltaToolCall,
    ExtractedToolCallInformation,
    FunctionCall,
    ToolCall,
    ToolParser,
    ToolParserManager,
)

__all__ = [
    "DeltaFunctionCall",
    "DeltaMessage",
    "DeltaToolCall",
    "ExtractedToolCallInformation",
    "FunctionCall",
    "ToolCall",
    "ToolParser",
    "ToolParserManager",
]
