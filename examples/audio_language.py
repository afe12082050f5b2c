"""Ask a model about recordings.

    python examples/audio_language.py --model-type qwen2_audio
    python examples/audio_language.py -m qwen2_audio --num-audios 2 --audio speech.wav song.flac
    python examples/audio_language.py -m qwen2_audio --num-audios 0
    python examples/audio_language.py -m whisper --audio speech.wav

Tones are made where there are fewer files than recordings. Every engine setting may be given; it wins over
that of the model's row in media_prompts.py. Files of any length are transcribed by ``LLM.transcribe``.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from media_calls import Question, add_model_type, ask, parse
from media_files import recording
from media_prompts import AUDIO

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser

QUESTIONS = {
    0: "What is 1 + 1?",
    1: "What is said in the recording?",
    2: "Which sport is the first recording about, and which nursery rhyme is the second?",
}


def main() -> None:
    parser = arguments()
    args, row = parse(parser, AUDIO, lambda args: ("audio", args.num_audios))
    if len(args.audio) > args.num_audios:
        parser.error(
            f"argument --audio: {len(args.audio)} files for --num-audios {args.num_audios}"
        )
    if args.num_prompts < 1:
        parser.error("argument --num-prompts: must be at least 1")
    params = SamplingParams(
        temperature=0.2, max_tokens=64, seed=args.seed, stop_token_ids=list(row.stop_token_ids)
    )
    questions = [Question(QUESTIONS[args.num_audios], recordings(args))] * args.num_prompts
    with LLM(**EngineArgs.from_cli_args(args).settings) as llm:
        for output in ask(llm, row, "audio", questions, params):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


def arguments() -> Parser:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    flag = parser.add_argument
    add_model_type(parser, AUDIO, "qwen2_audio")
    flag("--num-prompts", type=int, default=1, help="how often it is asked")
    flag("--num-audios", type=int, default=1, choices=[0, 1, 2], help="recordings of a prompt")
    flag(
        "--audio", type=Path, nargs="+", default=[], metavar="FILE",
        help="the first recordings; needs headrace[audio]",
    )  # fmt: skip
    return parser


def recordings(args: argparse.Namespace) -> list[Any]:
    files = [*args.audio, *[None] * args.num_audios][: args.num_audios]
    return [recording(file, number) for number, file in enumerate(files)]


if __name__ == "__main__":
    main()
