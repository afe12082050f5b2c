"""Texts to be scored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from headrace_core.request import TextPrompt, TokensPrompt

ScoreInput = str | TextPrompt | TokensPrompt | Mapping[str, Any]
"""One side of a pair: text, tokens, or ``{"content": [...]}`` with parts as in a chat message."""
