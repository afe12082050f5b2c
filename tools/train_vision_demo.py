#!/usr/bin/env python3
"""Trains the vision demo model that ships with headrace, from nothing, on pictures that this script paints.

    python tools/train_vision_demo.py --start                  # begin, and write the checkpoint
    python tools/train_vision_demo.py --resume --minutes 90    # go on after an interruption, or for longer
    python tools/train_vision_demo.py --evaluate               # accuracy by skill, by greedy decoding
    python tools/train_vision_demo.py --show pictures.png      # look at the pictures

Nothing is downloaded. It is LLaVA's class with a CLIP tower. Needs `torch`, `transformers`,
`tokenizers`, `safetensors`, `Pillow` and `tqdm`.
"""

from __future__ import annotations

import argparse
import random
from pathlib import Path

import torch
from vision_demo.evaluation import evaluate, write_card
from vision_demo.export import export, sheet
from vision_demo.training import Settings, Trainer, num_parameters

_ROOT = Path(__file__).resolve().parents[1]
_OUT = _ROOT / "packages" / "demo_vision" / "src" / "headrace_demo_vision" / "model"
_STATE = _ROOT / "build" / "vision-demo" / "state.pt"


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    if arguments.show is not None:
        sheet(random.Random(arguments.seed)).save(arguments.show)
        return
    if arguments.start or arguments.resume:
        _train(arguments)
    if arguments.evaluate or arguments.start or arguments.resume:
        report = evaluate(arguments.out, arguments.count, arguments.seed + 1)
        print(report)
        write_card(arguments.out, report)


def _train(arguments: argparse.Namespace) -> None:
    trainer = Trainer(Settings(arguments.state, arguments.minutes, arguments.seed))
    if arguments.resume:
        trainer.resume()
    print(f"{num_parameters(trainer.model) / 1e6:.2f} million parameters")
    trainer.run()
    export(trainer, arguments.out)
    print(f"{trainer.step} steps, {trainer.seconds / 60:.0f} minutes: {arguments.out}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    what = parser.add_mutually_exclusive_group(required=True)
    what.add_argument("--start", action="store_true", help="train anew")
    what.add_argument("--resume", action="store_true", help="train on from the last state")
    what.add_argument("--evaluate", action="store_true", help="measure a checkpoint only")
    what.add_argument("--show", type=Path, metavar="FILE", help="write a sheet of pictures only")
    parser.add_argument(
        "--minutes", type=float, default=60.0, help="of training, all runs together"
    )
    parser.add_argument("--out", type=Path, default=_OUT, help="folder of the checkpoint")
    parser.add_argument("--state", type=Path, default=_STATE, help="file of the training's state")
    parser.add_argument("--count", type=int, default=600, help="questions of the evaluation")
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
