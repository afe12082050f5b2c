#!/usr/bin/env python3
"""Trains an EAGLE head for the demo model, on what the demo model says, and measures its guesses.

    python tools/train_eagle_head.py                        # train, write the head, measure
    python tools/train_eagle_head.py train --steps 200
    python tools/train_eagle_head.py measure                # acceptance, tokens a step and a second

The head guesses how the model goes on, so its data are answers of the model itself: to questions of
`tools/train_demo_model.py`, drawn with a temperature. Nothing is downloaded; it took 20 minutes on one
CPU core that others used, too. It needs `torch`, `jinja2` and `safetensors`, and headrace with its demo
model. The head is a folder in SafeAILab's layout, for
`--speculative-config '{"method": "eagle", "model": "build/eagle-head", "num_speculative_tokens": 3}'`.

Li et al. 2024, arXiv:2401.15077: a smooth L1 loss between the head's states and the model's, and the cross
entropy of their tokens; states are disturbed a little, as later guesses are made from the head's own.
"""

from __future__ import annotations

import argparse
import json
import time
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch.nn.functional as F
from demo_model.mixture import dialogues
from demo_model.network import Layer, Llama, Shape
from demo_model.text import Renderer
from demo_model.words import Draw
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace import LLM, SamplingParams, demo

_HEAD = Path(__file__).resolve().parents[1] / "build/eagle-head"
_NOISE, _RATE = 0.1, 2e-3
_BATCH = 16
_MEASURED_SEED = 1 << 20
"""Of the questions that are measured with: training draws others."""


class Text(NamedTuple):
    """A question, and what the model said."""

    ids: Tensor
    """[n] int64."""
    num_prompt_tokens: int
    states: Tensor
    """[n, H] bfloat16; the model's."""


class EagleHead(nn.Module):
    """What `headrace_models.speculators.eagle` computes, with names as published."""

    def __init__(self, shape: Shape) -> None:
        super().__init__()
        self.fc = nn.Linear(2 * shape.hidden_size, shape.hidden_size, bias=False)
        layer = Layer(shape)
        layer.input_layernorm = nn.Identity()  # type: ignore[assignment]
        self.layers = nn.ModuleList([layer])

    def forward(self, states: Tensor, vectors: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
        """States and embeddings of the tokens behind them [B, n, H] -> the states of those [B, n, H]."""
        out: Tensor = self.layers[0](self.fc(torch.cat([vectors, states], dim=-1)), cos, sin)
        return out


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


def answers(seed: int, count: int) -> list[Text]:
    """What the demo model says to so many questions."""
    params = SamplingParams(temperature=0.7, max_tokens=160, seed=seed)
    with LLM(max_model_len=1024, num_threads=torch.get_num_threads()) as llm:
        outputs = llm.generate(questions(seed, count), params)
    model, found = load_demo(), []
    for output in outputs:
        ids = torch.tensor([*output.prompt_token_ids, *output.outputs[0].token_ids])
        found.append(Text(ids, len(output.prompt_token_ids), model(ids[None])[0].bfloat16()))
    return found


def batches(texts: Sequence[Text], generator: torch.Generator) -> Iterator[Sequence[Text]]:
    """Texts of about one length together, in another order each time, without end."""
    ordered = sorted(texts, key=lambda text: len(text.ids))
    groups = [ordered[start : start + _BATCH] for start in range(0, len(ordered), _BATCH)]
    while True:
        for index in torch.randperm(len(groups), generator=generator).tolist():
            yield groups[index]


def loss_of(model: Llama, head: EagleHead, texts: Sequence[Text]) -> tuple[Tensor, float]:
    """The loss of a batch, and the share of tokens that the head guesses."""
    ids = nn.utils.rnn.pad_sequence([text.ids for text in texts], batch_first=True)
    places = torch.arange(ids.shape[1] - 1)
    counts = torch.stack(
        [(places + 1 >= text.num_prompt_tokens) & (places + 1 < len(text.ids)) for text in texts]
    )
    with torch.no_grad():
        states = nn.utils.rnn.pad_sequence([t.states for t in texts], batch_first=True).float()
        vectors = model.model.embed_tokens(ids[:, 1:])
        wanted = model.logits(states[:, 1:])[counts]
    disturbed = states[:, :-1] + (torch.rand_like(states[:, :-1]) - 0.5) * 2 * _NOISE
    length = ids.shape[1] - 1
    found = head(disturbed, vectors, model.cos[:length], model.sin[:length])[counts]
    logits = model.logits(found)
    entropy = F.cross_entropy(logits, wanted.softmax(-1))
    right = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
    return F.smooth_l1_loss(found, states[:, 1:][counts]) + 0.5 * entropy, float(right)


def train(out: Path, *, count: int, steps: int, seed: int) -> None:
    """Train a head, and write it.

    Args:
        count: questions.
        steps: of training, a batch each.
    """
    torch.manual_seed(seed)
    begin = time.perf_counter()
    texts, model = answers(seed, count), load_demo()
    print(f"{count} answers, {sum(len(t.ids) for t in texts)} tokens with their questions, "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    head = EagleHead(model.shape)
    with torch.no_grad():  # begins as the model's last layer, once more, on its last state
        head.layers[0].load_state_dict(model.model.layers[-1].state_dict(), strict=False)
        head.fc.weight.zero_()[:, model.shape.hidden_size :] = torch.eye(model.shape.hidden_size)
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.perf_counter()
    drawn = batches(texts, torch.Generator().manual_seed(seed))
    for step, batch in enumerate(islice(drawn, steps)):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50) * max(0.02, 1 - step / steps)
        loss, right = loss_of(model, head, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 200 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {right:.1%} of tokens guessed", flush=True)
    write(out, head, model.shape)
    print(f"{steps} steps, {time.perf_counter() - start:.0f} s; the head is in {out}")


def write(out: Path, head: EagleHead, shape: Shape) -> None:
    """A head as published."""
    out.mkdir(parents=True, exist_ok=True)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in head.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = {"architectures": ["EagleLlamaForCausalLM"], "model_type": "llama", "hidden_act": "silu",
              **shape.as_dict(), "num_hidden_layers": 1, "torch_dtype": "bfloat16"}  # fmt: skip
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def measure(head: Path, *, count: int, guesses: int, rounds: int) -> None:
    """Print acceptance and speed on questions that were not trained on; answers must be the same."""
    config = {"method": "eagle", "model": str(head), "num_speculative_tokens": guesses}
    variants: dict[str, dict[str, Any] | None] = {
        "none": None, "all guesses": {**config, "adaptive": False}, "adaptive": config,
    }  # fmt: skip
    prompts = questions(_MEASURED_SEED, count)
    expected: list[list[int]] = []
    for name, speculative in variants.items():
        settings = {} if speculative is None else {"speculative_config": speculative}
        with LLM(max_model_len=1024, num_threads=torch.get_num_threads(), **settings) as llm:
            for temperature in (0.0, 0.7):
                found, line = _measured(llm, prompts, temperature, rounds)
                if temperature == 0:
                    expected = expected or found
                    line += f"; the same answers: {found == expected}"
                print(f"{name}, temperature {temperature}: {line}", flush=True)


def _measured(
    llm: LLM, prompts: Sequence[str], temperature: float, rounds: int
) -> tuple[list[list[int]], str]:
    """Answers one after the other: their tokens, and a line of figures."""
    params = SamplingParams(temperature=temperature, max_tokens=160, seed=1)
    llm.generate(prompts[:4], params, use_tqdm=False)
    before, best = llm.engine.stats(), float("inf")
    for _ in range(rounds):
        start = time.perf_counter()
        found = [llm.generate(p, params, use_tqdm=False)[0].outputs[0].token_ids for p in prompts]
        best = min(best, time.perf_counter() - start)
    after = llm.engine.stats()
    line = f"{sum(map(len, found)) / best:.0f} tokens/s"
    drafts = after.num_drafts - before.num_drafts
    if drafts:
        earlier = before.num_accepted_per_position
        earlier += [0] * (len(after.num_accepted_per_position) - len(earlier))
        right = [a - b for a, b in zip(after.num_accepted_per_position, earlier, strict=True)]
        shares = ", ".join(f"{n / drafts:.0%}" for n in right)
        line += f"; right by position {shares}; {1 + sum(right) / drafts:.2f} tokens in each of "
        line += f"{drafts} steps with guesses"
    return found, line


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["train", "measure"], help="default: both")
    parser.add_argument("--out", type=Path, default=_HEAD, help="folder of the head")
    parser.add_argument("--questions", type=int, default=4000, help="to train on")
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--guesses", type=int, default=4, help="measure: at most, a step")
    parser.add_argument("--measured", type=int, default=60, help="measure: questions")
    parser.add_argument("--rounds", type=int, default=2, help="measure: the fastest counts")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.command != "measure":
        train(arguments.out, count=arguments.questions, steps=arguments.steps, seed=arguments.seed)
    if arguments.command != "train":
        measure(arguments.out, count=arguments.measured, guesses=arguments.guesses,
                rounds=arguments.rounds)  # fmt: skip


if __name__ == "__main__":
    main()
