"""From dialogues to token ids: the chat template, the tokenizer, and which tokens to learn.

The pre-tokenizer departs from the usual in two places, both so that copying is easy for a small
model. Digits stand alone. A capital letter never takes the space before it into its token, so
that `Paris` is the same tokens in a sentence, after a quote and at the start of an answer.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable
from pathlib import Path
from typing import Any, NamedTuple

from jinja2.sandbox import ImmutableSandboxedEnvironment
from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from demo_model.turns import Dialogue

TEMPLATE = Path(__file__).with_name("chat_template.jinja")

END_OF_TEXT, IM_START, IM_END = "<|endoftext|>", "<|im_start|>", "<|im_end|>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END)
VISIBLE = ("<think>", "</think>", "<tool_call>", "</tool_call>")

_PIECES = r" ?\p{Ll}+|\p{L}\p{Ll}*|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s"


def train_tokenizer(texts: Iterable[str], vocabulary: int) -> Tokenizer:
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(_PIECES), behavior="isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary - len(VISIBLE),
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    marks = re.compile("|".join(map(re.escape, SPECIAL + VISIBLE)))
    pieces = (piece for text in texts for piece in marks.split(text) if piece)
    tokenizer.train_from_iterator(pieces, trainer)
    tokenizer.add_tokens([AddedToken(token, special=False, normalized=False) for token in VISIBLE])
    return tokenizer


class Renderer:
    """The chat template, compiled as `transformers` compiles it."""

    def __init__(self) -> None:
        environment = ImmutableSandboxedEnvironment(trim_blocks=True, lstrip_blocks=True)
        environment.filters["tojson"] = _to_json
        self._template = environment.from_string(TEMPLATE.read_text(encoding="utf-8"))

    def __call__(
        self,
        messages: list[dict[str, Any]],
        tools: list[dict[str, Any]] | None = None,
        *,
        enable_thinking: bool = False,
        add_generation_prompt: bool = False,
    ) -> str:
        return self._template.render(
            messages=messages,
            tools=tools or None,
            enable_thinking=enable_thinking,
            add_generation_prompt=add_generation_prompt,
        )

    def dialogue(self, dialogue: Dialogue) -> str:
        return self(
            dialogue.messages(), dialogue.tools, enable_thinking=dialogue.enable_thinking
        ).rstrip("\n")


def _to_json(value: Any) -> str:
    return json.dumps(value, ensure_ascii=False)


class Encoded(NamedTuple):
    """Token ids, and for each whether it is the assistant's to say."""

    ids: list[int]
    answered: list[bool]


class Encoder:
    """Renders and tokenizes, and finds the assistant's spans in the result."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self.render = Renderer()
        self._start, self._end = tokenizer.encode(IM_START + IM_END).ids
        self._assistant = tokenizer.encode("assistant\n").ids

    def __call__(self, dialogue: Dialogue) -> Encoded:
        ids = self.tokenizer.encode(self.render.dialogue(dialogue)).ids
        spans = self._spans(ids)
        if dialogue.enable_thinking:
            # Earlier answers are shown without their thoughts: learning them would unlearn thinking.
            spans = spans[-2:] if dialogue.turns[-1].calls else spans[-1:]
        answered = [False] * len(ids)
        for start, stop in spans:
            answered[start:stop] = [True] * (stop - start)
        return Encoded(ids, answered)

    def _spans(self, ids: list[int]) -> list[tuple[int, int]]:
        header = len(self._assistant)
        return [
            (place + 1 + header, ids.index(self._end, place) + 1)
            for place, token in enumerate(ids)
            if token == self._start and ids[place + 1 : place + 1 + header] == self._assistant
        ]
