"""Prompts, under the name that users import."""

from headrace_core.request import ChatPrompt, Prompt, TextPrompt, TokensPrompt

PromptType = Prompt

__all__ = ["ChatPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
