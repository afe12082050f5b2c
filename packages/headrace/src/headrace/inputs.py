"""Prompts, under the name that users import."""

from headrace_core.request import (
    ChatPrompt,
    EmbedsPrompt,
    EncoderDecoderPrompt,
    Prompt,
    TextPrompt,
    TokensPrompt,
)

PromptType = Prompt

__all__ = [
    "ChatPrompt",
    "EmbedsPrompt",
    "EncoderDecoderPrompt",
    "PromptType",
    "TextPrompt",
    "TokensPrompt",
]
