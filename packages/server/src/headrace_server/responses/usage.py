"""Token counts of a response, turn by turn."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

from headrace_server.conversation import Counts


@dataclass
class TurnUsage:
    """Tokens per turn of the model."""

    turns: list[Counts] = field(default_factory=list)

    def tool_tokens(self) -> list[int]:
        """Tokens that tools added before each turn: what is neither the last prompt nor output."""
        found = [0] if self.turns else []
        for before, now in zip(self.turns, self.turns[1:], strict=False):
            found.append(max(0, now.prompt - before.prompt - before.output))
        return found

    @property
    def output(self) -> int:
        """Tokens that the model wrote."""
        return sum(turn.output for turn in self.turns)

    def body(self) -> dict[str, Any]:
        """``usage`` of the response object."""
        prompts = [turn.prompt for turn in self.turns]
        cached = [turn.cached for turn in self.turns]
        outputs = [turn.output for turn in self.turns]
        tools = self.tool_tokens()
        return {
            "input_tokens": sum(prompts),
            "input_tokens_details": {
                "cached_tokens": sum(cached),
                "cache_write_tokens": 0,
                "input_tokens_per_turn": prompts,
                "cached_tokens_per_turn": cached,
            },
            "output_tokens": sum(outputs),
            "output_tokens_details": {
                "reasoning_tokens": sum(turn.reasoning for turn in self.turns),
                "tool_output_tokens": sum(tools),
                "output_tokens_per_turn": outputs,
                "tool_output_tokens_per_turn": tools,
            },
            "total_tokens": sum(prompts) + sum(outputs),
        }
