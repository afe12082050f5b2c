#!/usr/bin/env python3
"""Trains the demo model that ships with headrace, from nothing, on data that this script makes.

    python tools/train_demo_model.py                       # train, then write the checkpoint
    python tools/train_demo_model.py --minutes 10 --out /tmp/model
    python tools/train_demo_model.py --resume              # go on after an interruption
    python tools/train_demo_model.py show --count 5        # look at the examples
    python tools/train_demo_model.py evaluate --model DIR  # accuracy by skill, by greedy decoding

Nothing is downloaded. Training should take about 45 minutes on two idle CPU cores (on busy ones, set
OMP_WAIT_POLICY=passive: threads then sleep while they wait for each other), and needs `torch`,
`tokenizers`, `safetensors`, `jinja2` and `tqdm`; `evaluate` needs `transformers` as well.
"""

from __future__ import annotations

import argparse
import sys
from itertools import islice
from pathlib import Path

import torch
from demo_model.export import Effort, export
from demo_model.mixture import dialogues
from demo_model.network import Llama, Shape
from demo_model.text import Encoder, Renderer, train_tokenizer
from demo_model.training import Settings, Trainer
from demo_model.words import Draw
from tokenizers import Tokenizer

_ROOT = Path(__file__).resolve().parents[1]
_MODEL = _ROOT / "packages/demo/src/headrace_demo/model"
_STATE = _ROOT / "build/demo-model/state.pt"
_TOKENIZER_TEXTS = 20_000


def main() -> None:
    arguments = _parser().parse_args(_with_default_command(sys.argv[1:]))
    torch.set_num_threads(arguments.threads)
    arguments.run(arguments)


def _with_default_command(words: list[str]) -> list[str]:
    """`train` is what the script is for, so it may be left out."""
    named = words and words[0] in ("train", "evaluate", "show", "-h", "--help")
    return words if named else ["train", *words]


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    _add_train(commands.add_parser("train", help="train and export (the default command)"))
    _add_evaluate(commands.add_parser("evaluate", help="measure an exported checkpoint"))
    _add_show(commands.add_parser("show", help="print training examples"))
    return parser


def _add_train(parser: argparse.ArgumentParser) -> None:
    default = Settings(_STATE)
    parser.set_defaults(run=_train)
    parser.add_argument("--out", type=Path, default=_MODEL, help="folder for the checkpoint")
    parser.add_argument("--state", type=Path, default=_STATE, help="file for the training state")
    parser.add_argument("--resume", action="store_true", help="go on from the training state")
    parser.add_argument("--steps", type=int, default=default.steps, help="updates to make")
    parser.add_argument(
        "--minutes", type=float, help="end after this time instead of after a number of steps"
    )
    parser.add_argument("--batch-tokens", type=int, default=default.batch_tokens)
    parser.add_argument("--vocabulary", type=int, default=1408, help="size of the tokenizer")
    parser.add_argument("--seed", type=int, default=default.seed, help="data and weights")
    _add_threads(parser)


def _add_threads(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--threads", type=int, default=2, help="CPU threads for torch")


def _add_evaluate(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_evaluate)
    parser.add_argument("--model", type=Path, default=_MODEL, help="folder of the checkpoint")
    parser.add_argument("--count", type=int, default=200, help="held-out dialogues for each skill")
    parser.add_argument("--seed", type=int, default=2, help="which held-out dialogues")
    parser.add_argument("--card", action="store_true", help="write the figures into the model card")
    _add_threads(parser)


def _add_show(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(run=_show)
    parser.add_argument("--count", type=int, default=10)
    parser.add_argument("--seed", type=int, default=1)
    _add_threads(parser)


def _train(arguments: argparse.Namespace) -> None:
    settings = Settings(
        state=arguments.state,
        steps=arguments.steps,
        minutes=arguments.minutes,
        seed=arguments.seed,
        batch_tokens=arguments.batch_tokens,
    )
    tokenizer = _tokenizer(arguments)
    trainer = Trainer(settings, Encoder(tokenizer), Shape(vocab_size=tokenizer.get_vocab_size()))
    if arguments.resume:
        trainer.resume()
    print(
        f"{_size(trainer.model) / 1e6:.2f} million parameters, {tokenizer.get_vocab_size()} tokens"
    )
    trainer.run()
    effort = Effort(trainer.step, trainer.tokens, trainer.seconds, arguments.seed)
    export(trainer.model, trainer.encoder.tokenizer, arguments.out, effort)
    print(
        f"{trainer.step} steps, {trainer.tokens / 1e6:.1f} million tokens, "
        f"{trainer.seconds / 60:.0f} minutes: {arguments.out}"
    )


def _tokenizer(arguments: argparse.Namespace) -> Tokenizer:
    """Trained anew each time: it is a matter of seconds, and the same seed gives the same one."""
    render = Renderer()
    source = islice(dialogues(Draw(arguments.seed)), _TOKENIZER_TEXTS)
    return train_tokenizer(map(render.dialogue, source), arguments.vocabulary)


def _size(model: Llama) -> int:
    return sum(parameter.numel() for parameter in model.parameters())


def _evaluate(arguments: argparse.Namespace) -> None:
    from demo_model.evaluation import evaluate, write_card  # transformers: slow, and not to train

    report = evaluate(arguments.model, arguments.count, arguments.seed)
    print(report)
    if arguments.card:
        write_card(arguments.model, report)


def _show(arguments: argparse.Namespace) -> None:
    render = Renderer()
    for made in islice(dialogues(Draw(arguments.seed)), arguments.count):
        print(f"{render.dialogue(made)}\n{'=' * 80}")


if __name__ == "__main__":
    main()
