"""Ask a model about a recording, an image and a video in one prompt.

    python examples/omni.py --model-type qwen2_5_omni
    python examples/omni.py --audio speech.wav --image cat.png --video clip.mp4
    python examples/omni.py --query-type multi_audios --audio speech.wav song.flac

Of Qwen's omni models the thinker answers in text. Where there are no files, tones, a picture and a video
are made. Every engine setting may be given; it wins over that of the model's row in media_prompts.py.
audio_language.py and vision_language.py ask about one modality.
"""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from media_calls import add_model_type
from media_files import frames_of, moving, picture, recording
from media_prompts import OMNI, Row

from headrace import LLM, EngineArgs, SamplingParams
from headrace.arguments import Parser
from headrace.inputs import TextPrompt


class Query(NamedTuple):
    """A question, and what it is about.

    Attributes:
        text: the question.
        counts: modality -> items, in the order of the prompt; these are the engine's limits, too.
    """

    text: str
    counts: Mapping[str, int]


QUERIES: Mapping[str, Query] = {
    "mixed_modalities": Query(
        "What is said in the recording? What is in the picture? What happens in the video?",
        {"audio": 1, "image": 1, "video": 1},
    ),
    "multi_audios": Query("Are these two recordings the same?", {"audio": 2}),
}


def main() -> None:
    parser = arguments()
    args = parser.parse_args()
    row, query = OMNI[args.model_type], QUERIES[args.query_type]
    limits = {**dict.fromkeys(("image", "video", "audio"), 0), **query.counts}
    parser.set_defaults(model=row.checkpoint, limit_mm_per_prompt=limits, **row.settings)
    args = parser.parse_args()
    params = SamplingParams(temperature=0.2, max_tokens=256, seed=args.seed)
    with LLM(**EngineArgs.from_cli_args(args).settings) as llm:
        prompts = [asked(row, query, args)] * args.num_prompts
        for output in llm.generate(prompts, params, use_tqdm=False):
            print(f"{output.prompt!r} -> {output.outputs[0].text!r}")


def arguments() -> Parser:
    parser = EngineArgs.add_cli_args(Parser(description=__doc__))
    flag = parser.add_argument
    add_model_type(parser, OMNI, "qwen2_5_omni")
    flag("--query-type", default="mixed_modalities", choices=list(QUERIES), help="the question")
    flag("--num-prompts", type=int, default=1, help="how often it is asked")
    flag(
        "--audio", type=Path, nargs="+", default=[], metavar="FILE",
        help="recordings; needs headrace[audio]",
    )  # fmt: skip
    flag("--image", type=Path, metavar="FILE", help="the picture")
    flag("--video", type=Path, metavar="FILE", help="the video; needs headrace[video]")
    flag("--num-frames", type=int, default=16, help="frames of the video")
    return parser


def asked(row: Row, query: Query, args: argparse.Namespace) -> TextPrompt:
    """The prompt, with its media in the order of the query."""
    assert row.prompt is not None
    marks = "".join(row.media[modality] * count for modality, count in query.counts.items())
    data = {modality: items(modality, count, args) for modality, count in query.counts.items()}
    text = row.prompt.format(media=marks, question=query.text)
    return {"prompt": text, "multi_modal_data": data}


def items(modality: str, count: int, args: argparse.Namespace) -> list[Any]:
    """Items from files, and made ones where there are fewer files."""
    if modality == "audio":
        files = [*args.audio, *[None] * count][:count]
        return [recording(file, number) for number, file in enumerate(files)]
    if modality == "image":
        return [picture(args.image)]
    if args.video is None:
        return [moving(picture(), args.num_frames)]
    return [frames_of(args.video, args.num_frames)]


if __name__ == "__main__":
    main()
