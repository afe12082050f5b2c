#!/usr/bin/env python3
"""Trains an EAGLE head for the demo model, on what the demo model says, and measures its guesses.

    python tools/train_eagle_head.py                        # train, write the head, measure
    python tools/train_eagle_head.py train --steps 200
    python tools/train_eagle_head.py train --resume         # go on with the head that is there
    python tools/train_eagle_head.py measure                # acceptance, tokens a step and a second

The head guesses how the model goes on, so its data are answers of the model itself: to questions of
`tools/train_demo_model.py`, drawn with a temperature. Nothing is downloaded. It needs `torch`, `jinja2` and
`safetensors`, and headrace with its demo model. The head is a folder in SafeAILab's layout, for
`--speculative-config '{"method": "eagle", "model": "build/eagle-head", "num_speculative_tokens": 3}'`.

Li et al. 2024, arXiv:2401.15077: a smooth L1 loss between the head's states and the model's, and the cross
entropy of their tokens; states are disturbed a little. Later guesses are made from the head's own states, so
each batch is passed through it again with what came out of it, shifted by a token (as Zhang et al. 2024,
arXiv:2408.15766, in its simplest form).
"""

from __future__ import annotations

import argparse
import json
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_model.answers import TextBatch, answers, batches, load_demo
from demo_model.guessing import measure
from demo_model.network import Layer, Llama, Shape
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

_HEAD = Path(__file__).resolve().parents[1] / "build/eagle-head"
_NOISE, _RATE = 0.1, 2e-3


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


def loss_of(
    model: Llama, head: EagleHead, batch: TextBatch, passes: int
) -> tuple[Tensor, list[float]]:
    """The loss of a batch over the passes, and in each the share of tokens that the head guesses."""
    counts, length = batch.counts, batch.ids.shape[1] - 1
    with torch.no_grad():
        vectors = model.model.embed_tokens(batch.ids[:, 1:])
        wanted = model.logits(batch.states[:, 1:])
    states = batch.states[:, :-1]
    loss, shares = torch.zeros(()), []
    for number in range(passes):
        disturbed = states + (torch.rand_like(states) - 0.5) * 2 * _NOISE
        found = head(disturbed, vectors, model.cos[:length], model.sin[:length])
        # The nth pass guesses after n - 1 guesses: its first tokens have not been guessed before.
        asked = counts & (torch.arange(length) >= number)
        logits, likely = model.logits(found[asked]), wanted[asked]
        entropy = F.cross_entropy(logits, likely.softmax(-1))
        loss = loss + F.smooth_l1_loss(found[asked], batch.states[:, 1:][asked]) + 0.5 * entropy
        shares.append(float((logits.argmax(-1) == likely.argmax(-1)).float().mean()))
        states = torch.cat([batch.states[:, :1], found[:, :-1]], dim=1)
    return loss / passes, shares


def train(out: Path, *, count: int, steps: int, passes: int, seed: int, resume: bool) -> None:
    """Train a head, and write it.

    Args:
        count: questions.
        steps: of training, a batch each.
        passes: of a batch through the head in the last part of the training; in the first part one.
        resume: begin with the head that is in ``out``.
    """
    torch.manual_seed(seed)
    begin, model = time.perf_counter(), load_demo()
    texts = answers(model, seed, count)
    print(f"{count} answers, {sum(len(t.ids) for t in texts)} tokens with their questions, "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    head = EagleHead(model.shape)
    with torch.no_grad():  # begins as the model's last layer, once more, on its last state
        head.layers[0].load_state_dict(model.model.layers[-1].state_dict(), strict=False)
        head.fc.weight.zero_()[:, model.shape.hidden_size :] = torch.eye(model.shape.hidden_size)
    if resume:
        head.load_state_dict(
            {n: t.float() for n, t in load_file(out / "model.safetensors").items()}
        )
    optimizer = torch.optim.AdamW(head.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01)
    start = time.perf_counter()
    drawn = batches(texts, torch.Generator().manual_seed(seed))
    for step, batch in enumerate(islice(drawn, steps)):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50) * max(0.02, 1 - step / steps)
        # What comes out of an untrained head is no state: later passes begin once earlier ones are learnt.
        loss, shares = loss_of(model, head, batch, 1 + passes * step // steps)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(head.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            told = ", ".join(f"{share:.0%}" for share in shares)
            print(f"step {step}: loss {loss.item():.3f}, guessed by pass {told}", flush=True)
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


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["train", "measure"], help="default: both")
    parser.add_argument("--out", type=Path, default=_HEAD, help="folder of the head")
    parser.add_argument("--questions", type=int, default=4000, help="to train on")
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument(
        "--passes", type=int, default=3, help="of a batch through the head, at the end of training"
    )
    parser.add_argument("--resume", action="store_true", help="begin with the head that is there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--guesses", type=int, default=4, help="measure: at most, a step")
    parser.add_argument("--measured", type=int, default=60, help="measure: questions")
    parser.add_argument("--rounds", type=int, default=2, help="measure: turns")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.command != "measure":
        train(arguments.out, count=arguments.questions, steps=arguments.steps,
              passes=arguments.passes, seed=arguments.seed, resume=arguments.resume)  # fmt: skip
    if arguments.command != "train":
        config = {"method": "eagle", "model": str(arguments.out),
                  "num_speculative_tokens": arguments.guesses}  # fmt: skip
        measure({"eagle": config}, count=arguments.measured, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
