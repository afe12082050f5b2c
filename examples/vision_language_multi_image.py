"""Ask a model about several images in one prompt.

    python examples/vision_language_multi_image.py --model-type qwen2_vl
    python examples/vision_language_multi_image.py -m pixtral_hf --method chat -n 4
    python examples/vision_language_multi_image.py -m qwen2_vl --model ./Qwen2-VL-2B-Instruct \\
        --image cat.png dog.png

``generate`` sends the prompt of the table in media_prompts.py with Pillow's images, or has the checkpoint's
chat template write it where the table has none; ``chat`` sends messages whose parts are URLs. Pictures are
drawn where there are fewer files than images. Every engine setting may be given; it wins over that of the
model's row.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from media_calls import Question, add_model_type, ask, conversation, parse
from media_files import data_url, picture
from media_prompts import SEVERAL_IMAGES, Row

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser

QUESTION = "What does each of the images show?"


def main() -> None:
    parser = arguments()
    args, row = parse(parser, SEVERAL_IMAGES, lambda args: ("image", args.num_images))
    if len(args.image) > args.num_images:
        parser.error(
            f"argument --image: {len(args.image)} files for --num-images {args.num_images}"
        )
    params = SamplingParams(temperature=0, max_tokens=256, stop_token_ids=list(row.stop_token_ids))
    with LLM(**EngineArgs.from_cli_args(args).settings) as llm:
        call = chat if args.method == "chat" else generate
        print(call(llm, row, pictures(args), params))


def arguments() -> Parser:
    # -n is --nnodes of the engine's flags, too: what is added last has it.
    parser = EngineArgs.add_cli_args(Parser(description=__doc__, conflict_handler="resolve"))
    flag = parser.add_argument
    add_model_type(parser, SEVERAL_IMAGES, "qwen2_5_vl")
    flag("--method", default="generate", choices=["generate", "chat"], help="the call to be made")
    flag("--num-images", "-n", type=int, default=2, choices=range(1, 13), help="1 to 12 images")
    flag("--image", type=Path, nargs="+", default=[], metavar="FILE", help="the first pictures")
    return parser


def pictures(args: argparse.Namespace) -> list[Any]:
    files = [*args.image, *[None] * args.num_images][: args.num_images]
    return [picture(file, number) for number, file in enumerate(files)]


def generate(llm: LLM, row: Row, images: list[Any], params: SamplingParams) -> str:
    [output] = ask(llm, row, "image", [Question(QUESTION, images)], params)
    return output.outputs[0].text


def chat(llm: LLM, row: Row, images: list[Any], params: SamplingParams) -> str:
    parts = [{"type": "image_url", "image_url": {"url": data_url(image)}} for image in images]
    [output] = llm.chat(conversation(row, QUESTION, parts), params, use_tqdm=False)
    return output.outputs[0].text


if __name__ == "__main__":
    main()
