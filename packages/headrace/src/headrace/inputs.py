"""Prompts, under the name that users import."""

from headrace_core.request import ChatPrompt, EmbedsPrompt, Prompt, TextPrompt, TokensPrompt

PromptType = Prompt

__all__ = ["ChatPrompt", "EmbedsPrompt", "PromptType", "TextPrompt", "TokensPrompt"]
