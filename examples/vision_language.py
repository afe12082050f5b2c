"""Ask a model about an image or a video.

    python examples/vision_language.py --model-type llava
    python examples/vision_language.py -m qwen2_vl --model ./Qwen2-VL-2B-Instruct --image cat.png
    python examples/vision_language.py -m qwen2_5_vl --modality video --video clip.mp4 --num-frames 8
    python examples/vision_language.py -m llava --image-repeat-prob 0.5 --time-generate
    python examples/vision_language.py -m llava --verify-mm-cache-hit-with-uuids

Without a file a picture is drawn, and a video made of it. Every engine setting may be given; it wins over
that of the model's row in media_prompts.py.
"""

from __future__ import annotations

import argparse
import random
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from media_calls import Question, add_model_type, ask, parse
from media_files import frames_of, moving, picture
from media_prompts import ONE_ITEM, Row
from PIL import Image

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser
from headrace_core.errors import RequestError

QUESTIONS = {
    "image": [
        "What is in the picture?",
        "Describe the picture in detail.",
        "Which colours does the picture have?",
        "Where may the picture have been taken?",
    ],
    "video": ["What happens in the video?"],
}


def main() -> None:
    parser = arguments()
    args, row = parse(parser, ONE_ITEM, lambda args: (args.modality, 1))
    check(parser, args)
    if args.disable_mm_processor_cache:
        args.mm_processor_cache_gb = 0.0
    params = SamplingParams(
        temperature=0.2, max_tokens=64, seed=args.seed, stop_token_ids=list(row.stop_token_ids)
    )
    with LLM(**EngineArgs.from_cli_args(args).settings) as llm:
        questions = list(asked(args, row))
        start = time.perf_counter()
        outputs = ask(llm, row, args.modality, questions, params)
        if args.time_generate:
            print(f"{len(outputs)} prompts in {time.perf_counter() - start:.3f} s")
        for question, output in zip(questions, outputs, strict=True):
            print(f"{question.text!r} -> {output.outputs[0].text!r}")
        if args.verify_mm_cache_hit_with_uuids:
            verify(llm, row, args.modality, questions, params, outputs)


def arguments() -> Parser:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    flag = parser.add_argument
    add_model_type(parser, ONE_ITEM, "llava")
    flag("--num-prompts", type=int, default=4, help="prompts of the batch")
    flag("--modality", default="image", choices=["image", "video"], help="what is asked about")
    flag("--image", type=Path, metavar="FILE", help="the picture, or what the video is made of")
    flag("--video", type=Path, metavar="FILE", help="the video; needs headrace[video]")
    flag("--num-frames", type=int, default=16, help="frames of the video")
    flag(
        "--image-repeat-prob", type=float,
        help="0 to 1: probability that a prompt has the same picture as the one before; else one pixel "
        "of it is changed",
    )  # fmt: skip
    flag("--disable-mm-processor-cache", action="store_true", help="keep no processed media")
    flag("--time-generate", action="store_true", help="print the time of the batch")
    flag(
        "--use-different-prompt-per-request", action="store_true",
        help="go through all questions about pictures; else every prompt has the first",
    )  # fmt: skip
    flag(
        "--verify-mm-cache-hit-with-uuids", action="store_true",
        help="name the media, and ask again by their names alone",
    )  # fmt: skip
    return parser


def check(parser: Parser, args: argparse.Namespace) -> None:
    chance, video = args.image_repeat_prob, args.modality == "video"
    if chance is not None and not 0 <= chance <= 1:
        parser.error(f"argument --image-repeat-prob: {chance}: must be in 0..1")
    if chance is not None and video:
        parser.error("argument --image-repeat-prob: is for --modality image only")
    if args.video and not video:
        parser.error("argument --video: is for --modality video only")
    for name in ("num_prompts", "num_frames"):
        if getattr(args, name) < 1:
            parser.error(f"argument --{name.replace('_', '-')}: must be at least 1")


def asked(args: argparse.Namespace, row: Row) -> Iterator[Question]:
    """The batch: questions with the media that they are about."""
    texts = QUESTIONS[args.modality]
    for index, item in enumerate(media(args, row)):
        text = texts[index % len(texts)] if args.use_different_prompt_per_request else texts[0]
        names = [f"uuid_{index}"] if args.verify_mm_cache_hit_with_uuids else []
        yield Question(text, [item], names)


def media(args: argparse.Namespace, row: Row) -> Iterator[Any]:
    """An item for each prompt."""
    if args.modality == "video":
        count = args.num_frames
        video = frames_of(args.video, count) if args.video else moving(picture(args.image), count)
        yield from [video if row.with_metadata else video[0]] * args.num_prompts
    elif args.image_repeat_prob is None:
        yield from [picture(args.image)] * args.num_prompts
    else:
        yield from repeated(args)


def repeated(args: argparse.Namespace) -> Iterator[Image.Image]:
    """Pictures that repeat the former one by chance, or are it but for the first pixel."""
    image, draw = picture(args.image), random.Random(args.seed)
    for index in range(args.num_prompts):
        if draw.random() >= args.image_repeat_prob:
            image = image.copy()
            image.putpixel((0, 0), (index // 65536 % 256, index // 256 % 256, index % 256))
        yield image


def verify(
    llm: LLM, row: Row, modality: str, questions: Any, params: SamplingParams, outputs: Any
) -> None:
    """Ask again with names in place of media; other answers, or a name that is unknown, end the script."""
    named = [question._replace(items=[None] * len(question.items)) for question in questions]
    try:
        again = ask(llm, row, modality, named, params)
    except RequestError as error:
        sys.exit(f"Media were not found by their names: {error}")
    if [o.outputs[0].text for o in again] != [o.outputs[0].text for o in outputs]:
        sys.exit("Answers differ when media are found by their names.")
    print(f"{len(again)} prompts have the same answers with names in place of media.")


if __name__ == "__main__":
    main()
