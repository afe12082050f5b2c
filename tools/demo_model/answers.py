"""What the demo model says to questions of its own data: texts that its guessers are trained on."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from itertools import islice
from typing import NamedTuple

import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from demo_model.mixture import dialogues
from demo_model.network import Llama, Shape
from demo_model.text import Renderer
from demo_model.words import Draw
from headrace import LLM, SamplingParams, demo

_BATCH = 16


class Text(NamedTuple):
    """A question, and what the model said."""

    ids: Tensor
    """[n] int64."""
    num_prompt_tokens: int
    states: Tensor
    """[n, H] bfloat16; the model's."""


class TextBatch(NamedTuple):
    """Texts of about one length, padded to the longest."""

    ids: Tensor
    """[B, n] int64."""
    states: Tensor
    """[B, n, H] float32; the model's."""
    counts: Tensor
    """[B, n - 1] bool; True where the model said the next token."""


def load_demo() -> Llama:
    """The demo model, in float32."""
    config = json.loads((demo.path() / "config.json").read_text(encoding="utf-8"))
    shape = Shape(**{name: config[name] for name in Shape().as_dict()})
    model = Llama(shape).eval().requires_grad_(False)
    tensors = load_file(demo.path() / "model.safetensors")
    model.load_state_dict({name: tensor.float() for name, tensor in tensors.items()})
    return model


def questions(seed: int, count: int) -> list[str]:
    """Prompts that end where the model is to answer: the last question of conversations."""
    render, found = Renderer(), []
    for made in islice(dialogues(Draw(seed)), count):
        messages = made.messages()
        last = max(i for i, message in enumerate(messages) if message["role"] == "user")
        found.append(
            render(
                messages[: last + 1],
                made.tools,
                enable_thinking=made.enable_thinking,
                add_generation_prompt=True,
            )
        )
    return found


def answers(model: Llama, seed: int, count: int) -> list[Text]:
    """What the demo model says to so many questions, drawn with a temperature."""
    params = SamplingParams(temperature=0.7, max_tokens=160, seed=seed)
    with LLM(max_model_len=1024, num_threads=torch.get_num_threads()) as llm:
        outputs = llm.generate(questions(seed, count), params)
    found = []
    with torch.no_grad():
        for output in outputs:
            ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
            states = model(ids[None])[0].bfloat16()
            found.append(Text(ids, len(output.prompt_token_ids), states))
    return found


def batches(texts: Sequence[Text], generator: torch.Generator) -> Iterator[TextBatch]:
    """Texts of about one length together, in another order each time, without end."""
    ordered = sorted(texts, key=lambda text: len(text.ids))
    groups = [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]
    while True:
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield _padded(groups[index])


def _padded(texts: Sequence[Text]) -> TextBatch:
    ids = nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    states = nn.utils.rnn.pad_sequence([text.states for text in texts], batch_first=True)
    after = torch.arange(1, ids.shape[1])
    counts = torch.stack(
        [(after >= text.num_prompt_tokens) & (after < len(text.ids)) for text in texts]
    )
    return TextBatch(ids, states.float(), counts)
