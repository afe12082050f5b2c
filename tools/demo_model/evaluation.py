"""Accuracy by skill, measured the way the model is used: through `transformers`, by greedy decoding.

Sums, names, places, things and invented tools are held out. What can only be known by
heart (small talk, the table of facts, spelling) is asked again as it was learnt, and so are counts,
whose ranges are not split; the card says which is which.
"""

from __future__ import annotations

import json
import re
from collections import defaultdict
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from tqdm import tqdm
from transformers import AutoModelForCausalLM, AutoTokenizer

from demo_model.mixture import examination
from demo_model.turns import Dialogue

_BATCH = 64
_LONGEST_ANSWER = 320
_CALL = re.compile(r"<tool_call>\n(.*?)\n</tool_call>", re.DOTALL)
_FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)


@dataclass(frozen=True)
class Question:
    """One prompt and its one right answer: text, or a list of tool calls."""

    skill: str
    prompt: str
    thinking: bool
    expected: str | list[dict[str, Any]]

    def is_right(self, text: str) -> bool:
        """Whether the text, less its reasoning, is the answer; missing tags are a mistake."""
        thought, closed, answer = text.partition("</think>")
        if self.thinking != bool(closed and thought.startswith("<think>\n")):
            return False
        answer = (answer if self.thinking else text).strip()
        return (answer if isinstance(self.expected, str) else _calls(answer)) == self.expected


def _calls(text: str) -> list[dict[str, Any]] | None:
    """The calls in an answer that is nothing but calls, else None."""
    if _CALL.sub("", text).strip():
        return None
    try:
        return [json.loads(call) for call in _CALL.findall(text)]
    except ValueError:
        return None


def evaluate(model_path: Path, count: int, seed: int) -> str:
    """Decodes `count` dialogues of each skill and returns the table, in Markdown."""
    tokenizer = AutoTokenizer.from_pretrained(model_path)
    model: Any = AutoModelForCausalLM.from_pretrained(model_path, dtype=torch.bfloat16)
    questions = [
        question
        for skill, made in examination(seed, count).items()
        for dialogue in made
        for question in _questions(tokenizer, skill, dialogue)
    ]
    scores: dict[tuple[str, bool], list[bool]] = defaultdict(list)
    for question, text in _answers(model, tokenizer, questions):
        scores[question.skill, question.thinking].append(question.is_right(text))
    return _table(scores)


def _questions(tokenizer: Any, skill: str, dialogue: Dialogue) -> Iterator[Question]:
    """The last answer of a dialogue; and if it came by a tool, first the call."""
    messages = dialogue.messages()
    turn = dialogue.turns[-1]
    if turn.calls:
        asked = messages[: -2 - len(turn.calls)]
        calls = [{"name": call.name, "arguments": call.arguments} for call in turn.calls]
        yield _question(tokenizer, "tool call", asked, dialogue, calls)
        skill = "tool result"
    yield _question(tokenizer, skill, messages[:-1], dialogue, turn.answer)


def _question(
    tokenizer: Any,
    skill: str,
    messages: list[dict[str, Any]],
    dialogue: Dialogue,
    expected: str | list[dict[str, Any]],
) -> Question:
    prompt = tokenizer.apply_chat_template(
        messages,
        tools=dialogue.tools or None,
        enable_thinking=dialogue.enable_thinking,
        add_generation_prompt=True,
        tokenize=False,
    )
    return Question(skill, prompt, dialogue.enable_thinking, expected)


def _answers(
    model: Any, tokenizer: Any, questions: list[Question]
) -> Iterator[tuple[Question, str]]:
    """Greedy answers, in batches of like answers so that none waits long for the longest."""
    questions = sorted(questions, key=lambda each: (each.thinking, len(str(each.expected))))
    for start in tqdm(range(0, len(questions), _BATCH), unit="batch"):
        batch = questions[start : start + _BATCH]
        yield from zip(batch, generate(model, tokenizer, [each.prompt for each in batch]))


@torch.inference_mode()
def generate(model: Any, tokenizer: Any, prompts: list[str]) -> list[str]:
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        do_sample=False,
        temperature=None,
        top_p=None,
        top_k=None,
        max_new_tokens=_LONGEST_ANSWER,
    )
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def _table(scores: dict[tuple[str, bool], list[bool]]) -> str:
    lines = ["| skill | direct | with reasoning |", "| --- | --- | --- |"]
    for skill in sorted({skill for skill, _ in scores}):
        cells = [_cell(scores.get((skill, thinking), [])) for thinking in (False, True)]
        lines.append(f"| {skill} | {cells[0]} | {cells[1]} |")
    return "\n".join(lines) + "\n"


def _cell(right: list[bool]) -> str:
    return f"{sum(right) / len(right):.1%} of {len(right)}" if right else ""


def write_card(model_path: Path, table: str) -> None:
    """Puts the table between the marks that `export` left in the card."""
    card = model_path / "README.md"
    text = _FIGURES.sub(lambda match: match[1] + table + match[2], card.read_text("utf-8"))
    card.write_text(text, "utf-8")
