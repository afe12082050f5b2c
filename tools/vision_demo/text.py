"""Conversations as token ids, and which of them the model is to say."""

from __future__ import annotations

import random
from pathlib import Path
from typing import NamedTuple

from tokenizers import AddedToken, Regex, Tokenizer, decoders, models, pre_tokenizers, trainers

from vision_demo.pictures import Scene, draw_scene
from vision_demo.questions import WITHOUT_PICTURE, Exchange, ask

END_OF_TEXT, IM_START, IM_END, IMAGE = "<|endoftext|>", "<|im_start|>", "<|im_end|>", "<image>"
SPECIAL = (END_OF_TEXT, IM_START, IM_END, IMAGE)
"""Their ids are their places."""
TEMPLATE = Path(__file__).with_name("chat_template.jinja")
_PIECES = r" ?\p{L}+|\p{N}| ?[^\s\p{L}\p{N}]+|\n+|\s"
_VOCABULARY = 640


class Encoded(NamedTuple):
    """Token ids, and for each whether it is the model's to say."""

    ids: list[int]
    answered: list[bool]


def train_tokenizer(seed: int) -> Tokenizer:
    """Of a few thousand exchanges; the same seed gives the same one."""
    tokenizer = Tokenizer(models.BPE())
    split = pre_tokenizers.Split(Regex(_PIECES), behavior="isolated")
    bytes_ = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([split, bytes_])
    tokenizer.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=_VOCABULARY,
        special_tokens=[AddedToken(token, special=True) for token in SPECIAL],
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
        show_progress=False,
    )
    rng = random.Random(seed)
    asked = [ask(draw_scene(rng), rng) for _ in range(5000)]
    texts = [text for exchange in asked for text in exchange[:2]]
    tokenizer.train_from_iterator(
        [*texts, *("user\n", "assistant\n") * 100, *(t for pair in WITHOUT_PICTURE for t in pair)],
        trainer,
    )
    return tokenizer


class Encoder:
    """Writes conversations as the chat template does."""

    def __init__(self, tokenizer: Tokenizer) -> None:
        self.tokenizer = tokenizer
        self._known: dict[str, list[int]] = {}

    def conversation(self, exchanges: list[Exchange], image_tokens: int) -> Encoded:
        """The picture stands before the first question; 0 tokens: there is none."""
        ids: list[int] = []
        answered: list[bool] = []
        for turn, (question, answer, _) in enumerate(exchanges):
            asked = self._of(f"{IM_START}user\n")
            asked = asked + [SPECIAL.index(IMAGE)] * (image_tokens if turn == 0 else 0)
            asked = asked + self._of(f"{question}{IM_END}") + self._of("\n")
            asked = asked + self._of(f"{IM_START}assistant\n")
            said = self._of(f"{answer}{IM_END}")
            line = self._of("\n")
            ids += asked + said + line
            answered += [False] * len(asked) + [True] * len(said) + [False] * len(line)
        return Encoded(ids, answered)

    def _of(self, text: str) -> list[int]:
        if text not in self._known:
            self._known[text] = self.tokenizer.encode(text).ids
        return self._known[text]


def about(scene: Scene, rng: random.Random, turns: int) -> list[Exchange]:
    """A few exchanges about a scene."""
    return [ask(scene, rng) for _ in range(turns)]


def without_picture(rng: random.Random) -> list[Exchange]:
    """An exchange in which nothing is shown."""
    question, answer = rng.choice(WITHOUT_PICTURE)
    return [Exchange(question, answer, "no picture")]
