#!/usr/bin/env python3
"""Trains a draft model for the demo model, on what the demo model says, and measures its guesses.

    python tools/train_draft_model.py                        # train, write the draft model, measure
    python tools/train_draft_model.py train --layers 1 --steps 200
    python tools/train_draft_model.py train --resume         # go on with the draft model that is there
    python tools/train_draft_model.py measure                # acceptance, tokens a step and a second

The draft model is some of the demo model's layers, trained until they say what all of them say (Hinton et
al. 2015, arXiv:1503.02531: the cross entropy with the larger model's probabilities), on answers of the demo
model as `tools/train_eagle_head.py` has them. Nothing is downloaded. It needs `torch`, `jinja2` and
`safetensors`, and headrace with its demo model. The draft model is a checkpoint of its own, for
`--speculative-config '{"method": "draft_model", "model": "build/draft-model", "num_speculative_tokens": 4}'`.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import shutil
import time
from itertools import islice
from pathlib import Path

import torch
import torch.nn.functional as F
from demo_model.answers import TextBatch, answers, batches, load_demo
from demo_model.guessing import measure
from demo_model.network import Llama
from safetensors.torch import load_file, save_file
from torch import Tensor, nn

from headrace import demo

_DRAFT = Path(__file__).resolve().parents[1] / "build/draft-model"
_RATE = 2e-3


def smaller(model: Llama, num_layers: int) -> Llama:
    """A model of the first layers and the last one."""
    draft = Llama(dataclasses.replace(model.shape, num_hidden_layers=num_layers))
    draft.model.embed_tokens.load_state_dict(model.model.embed_tokens.state_dict())
    draft.model.norm.load_state_dict(model.model.norm.state_dict())
    kept = [*range(num_layers - 1), len(model.model.layers) - 1]
    for layer, number in zip(draft.model.layers, kept, strict=True):
        layer.load_state_dict(model.model.layers[number].state_dict())
    return draft


def loss_of(model: Llama, draft: Llama, batch: TextBatch) -> tuple[Tensor, float]:
    """The loss of a batch, and the share of tokens that the draft model guesses."""
    # What follows a token is guessed where the model said what follows.
    with torch.no_grad():
        wanted = model.logits(batch.states[:, :-1][batch.counts])
    logits = draft.logits(draft(batch.ids[:, :-1])[batch.counts])
    right = (logits.argmax(-1) == wanted.argmax(-1)).float().mean()
    return F.cross_entropy(logits, wanted.softmax(-1)), float(right)


def train(out: Path, *, layers: int, count: int, steps: int, seed: int, resume: bool) -> None:
    """Train a draft model, and write it.

    Args:
        layers: of the draft model.
        count: questions.
        steps: of training, a batch each.
        resume: begin with the draft model that is in ``out``.
    """
    torch.manual_seed(seed)
    begin, model = time.perf_counter(), load_demo()
    texts = answers(model, seed, count)
    print(f"{count} answers, {sum(len(t.ids) for t in texts)} tokens with their questions, "
          f"{time.perf_counter() - begin:.0f} s")  # fmt: skip
    draft = smaller(model, layers)
    if resume:
        draft.load_state_dict(
            {n: t.float() for n, t in load_file(out / "model.safetensors").items()}
        )
    optimizer = torch.optim.AdamW(
        draft.parameters(), lr=_RATE, betas=(0.9, 0.95), weight_decay=0.01
    )
    start = time.perf_counter()
    drawn = batches(texts, torch.Generator().manual_seed(seed))
    for step, batch in enumerate(islice(drawn, steps)):
        for group in optimizer.param_groups:
            group["lr"] = _RATE * min(1.0, (step + 1) / 50) * max(0.02, 1 - step / steps)
        loss, right = loss_of(model, draft, batch)
        optimizer.zero_grad()
        loss.backward()
        nn.utils.clip_grad_norm_(draft.parameters(), 1.0)
        optimizer.step()
        if step % 50 == 0:
            print(f"step {step}: loss {loss.item():.3f}, {right:.1%} of tokens guessed", flush=True)
    write(out, draft)
    print(f"{steps} steps, {time.perf_counter() - start:.0f} s; the draft model is in {out}")


def write(out: Path, draft: Llama) -> None:
    """A checkpoint with the demo model's tokenizer."""
    out.mkdir(parents=True, exist_ok=True)
    for name in ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja",
                 "generation_config.json"):  # fmt: skip
        shutil.copyfile(demo.path() / name, out / name)
    tensors = {n: p.detach().to(torch.bfloat16).contiguous() for n, p in draft.named_parameters()}
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    config = json.loads((demo.path() / "config.json").read_text(encoding="utf-8"))
    config["num_hidden_layers"] = draft.shape.num_hidden_layers
    (out / "config.json").write_text(json.dumps(config, indent=2) + "\n", encoding="utf-8")


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("command", nargs="?", choices=["train", "measure"], help="default: both")
    parser.add_argument("--out", type=Path, default=_DRAFT, help="folder of the draft model")
    parser.add_argument("--layers", type=int, default=2, help="of the draft model")
    parser.add_argument("--questions", type=int, default=4000, help="to train on")
    parser.add_argument("--steps", type=int, default=700, help="of training")
    parser.add_argument("--resume", action="store_true", help="begin with the one that is there")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    parser.add_argument("--guesses", type=int, default=4, help="measure: at most, a step")
    parser.add_argument("--measured", type=int, default=60, help="measure: questions")
    parser.add_argument("--rounds", type=int, default=2, help="measure: turns")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.command != "measure":
        train(arguments.out, layers=arguments.layers, count=arguments.questions, steps=arguments.steps,
              seed=arguments.seed, resume=arguments.resume)  # fmt: skip
    if arguments.command != "train":
        config = {"method": "draft_model", "model": str(arguments.out),
                  "num_speculative_tokens": arguments.guesses}  # fmt: skip
        measure({"draft_model": config}, count=arguments.measured, rounds=arguments.rounds)


if __name__ == "__main__":
    main()
