#!/usr/bin/env python3
"""Trains the tiny speech model of the tests, from nothing, on speech that espeak-ng synthesizes.

    apt-get install espeak-ng
    python tools/train_speech_fixture.py --start --minutes 60   # begin, and write the checkpoint
    python tools/train_speech_fixture.py --minutes 30           # go on from the last state
    python tools/train_speech_fixture.py --evaluate             # the word error on voices held out

It is Whisper's shape with a few hundred thousand parameters, and hears spoken digits and a dozen words.
With it an end-to-end test plays audio and checks the words. Beside the checkpoint lie a few spoken clips
(FLAC) with their texts, as the tests' machines have no synthesizer. Needs `torch`, `transformers`,
`soundfile` and `soxr`.
"""

from __future__ import annotations

import argparse
from pathlib import Path

import torch
from speech_fixture.checkpoint import save
from speech_fixture.training import Trainer
from speech_fixture.voices import HELD_OUT, spoken

_ROOT = Path(__file__).resolve().parents[1]
_OUT = _ROOT / "tests-integration" / "data" / "speech-fixture"
_STATE = _ROOT / "build" / "speech-fixture" / "state.pt"


def main() -> None:
    arguments = _parser().parse_args()
    torch.set_num_threads(arguments.threads)
    trainer = Trainer(arguments.state, arguments.seed)
    if not arguments.start:
        trainer.resume()
    if not arguments.evaluate:
        print(f"{trainer.num_parameters / 1e3:.0f} thousand parameters")
        trainer.run(arguments.minutes)
        save(trainer.model, arguments.out, spoken(arguments.seed + 1, 8, HELD_OUT))
        print(f"{trainer.step} steps: {arguments.out}")
    print(f"word error on voices held out: {trainer.word_error(100):.1%}")


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--start", action="store_true", help="begin anew, not from the last state")
    parser.add_argument("--evaluate", action="store_true", help="measure only")
    parser.add_argument("--minutes", type=float, default=30.0, help="how long to train")
    parser.add_argument("--out", type=Path, default=_OUT, help="folder for the checkpoint")
    parser.add_argument("--state", type=Path, default=_STATE, help="file of the training's state")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--threads", type=int, default=1)
    return parser


if __name__ == "__main__":
    main()
