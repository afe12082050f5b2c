"""Accuracy by skill on scenes drawn anew, through `transformers`, by greedy decoding."""

from __future__ import annotations

import random
import re
from collections import defaultdict
from pathlib import Path
from typing import Any

import numpy as np
import torch
from tqdm import tqdm
from transformers import AutoTokenizer, LlavaForConditionalGeneration

from vision_demo.network import IMAGE_TOKENS
from vision_demo.pictures import Scene, draw_scene, paint
from vision_demo.questions import Exchange, ask
from vision_demo.text import IMAGE
from vision_demo.training import pixels_of

_BATCH = 50
_FIGURES = re.compile(r"(<!-- figures -->\n).*?(<!-- end of figures -->)", re.DOTALL)


def evaluate(path: Path, count: int, seed: int) -> str:
    """Asks one question about each of `count` scenes; returns the table, in Markdown."""
    tokenizer = AutoTokenizer.from_pretrained(path)
    model: Any = LlavaForConditionalGeneration.from_pretrained(path, dtype=torch.bfloat16)
    rng = random.Random(f"evaluation {seed}")
    scores: dict[str, list[bool]] = defaultdict(list)
    for _ in tqdm(range(0, count, _BATCH), unit="batch"):
        scenes = [draw_scene(rng) for _ in range(_BATCH)]
        asked = [ask(scene, rng) for scene in scenes]
        answers = _answers(model, tokenizer, scenes, asked, rng)
        for exchange, answer in zip(asked, answers, strict=True):
            scores[exchange.skill].append(answer == exchange.answer)
    return _table(scores)


@torch.inference_mode()
def _answers(
    model: Any, tokenizer: Any, scenes: list[Scene], asked: list[Exchange], rng: random.Random
) -> list[str]:
    prompts = [
        tokenizer.apply_chat_template(
            [
                {
                    "role": "user",
                    "content": [{"type": "image"}, {"type": "text", "text": each.question}],
                }
            ],
            add_generation_prompt=True,
            tokenize=False,
        ).replace(IMAGE, IMAGE * IMAGE_TOKENS)
        for each in asked
    ]
    inputs = tokenizer(prompts, return_tensors="pt", padding=True, padding_side="left")
    pixels = pixels_of([np.asarray(paint(scene, rng)) for scene in scenes]).to(torch.bfloat16)
    output = model.generate(
        input_ids=inputs["input_ids"],
        attention_mask=inputs["attention_mask"],
        pixel_values=pixels,
        do_sample=False,
        max_new_tokens=40,
    )
    answers = output[:, inputs["input_ids"].shape[1] :]
    return [str(text) for text in tokenizer.batch_decode(answers, skip_special_tokens=True)]


def _table(scores: dict[str, list[bool]]) -> str:
    rows = ["| skill | right |", "| --- | --- |"]
    for skill in sorted(scores):
        right = scores[skill]
        rows.append(f"| {skill} | {sum(right) / len(right):.0%} of {len(right)} |")
    return "\n".join(rows) + "\n"


def write_card(path: Path, table: str) -> None:
    """Puts the table between the marks that `export` left in the card."""
    card = path / "README.md"
    text = _FIGURES.sub(lambda match: match[1] + table + match[2], card.read_text("utf-8"))
    card.write_text(text, "utf-8")
