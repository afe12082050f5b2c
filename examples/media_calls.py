"""What the scripts about media share: their command line, and the call that asks about media."""

from __future__ import annotations

import argparse
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple

from media_prompts import Row

from headrace import LLM, RequestOutput, SamplingParams
from headrace.arguments import Parser
from headrace.inputs import TextPrompt

MODALITIES = ("image", "video", "audio")


class Question(NamedTuple):
    """A question about some items of one modality.

    Attributes:
        text: the question.
        items: the media; None in place of an item that is known by its name.
        names: a name for each item, () for none.
    """

    text: str
    items: Sequence[Any]
    names: Sequence[str] = ()


def add_model_type(parser: Parser, rows: Mapping[str, Row], default: str) -> None:
    """Add ``--model-type``, whose help and whose error list the keys of a table."""
    parser.add_argument(
        "--model-type", "-m", default=default, choices=list(rows), metavar="KEY",
        help=f"row of the table in media_prompts.py: {', '.join(rows)} (default: {default})",
    )  # fmt: skip


def parse(
    parser: Parser,
    rows: Mapping[str, Row],
    modality_and_count: Callable[[argparse.Namespace], tuple[str, int]],
) -> tuple[argparse.Namespace, Row]:
    """The command line, and the row of ``--model-type``, whose settings hold where flags are not given.

    Other modalities, and more items than there are, are refused by the engine: their limit is 0.
    """
    args = parser.parse_args()
    row, size = rows[args.model_type], args.tensor_parallel_size
    if size < 1:
        parser.error(f"argument --tensor-parallel-size: {size}: must be at least 1")
    modality, count = modality_and_count(args)
    if modality not in row.media:
        parser.error(f"argument --modality: {args.model_type} takes {', '.join(row.media)} only")
    if row.most is not None and count != row.most:
        parser.error(f"argument --num-{modality}s: {count}: {args.model_type} takes {row.most}")
    limits = {**dict.fromkeys(MODALITIES, 0), modality: count}
    defaults = {"model": row.checkpoint, "limit_mm_per_prompt": limits, **row.settings}
    parser.set_defaults(**defaults)
    return parser.parse_args(), row


def ask(
    llm: LLM, row: Row, modality: str, questions: Sequence[Question], params: SamplingParams
) -> list[RequestOutput]:
    """Answers to questions, by the prompt of the row, or by the checkpoint's template where it has none."""
    if row.prompt is not None:
        return llm.generate([_prompt(row, modality, q) for q in questions], params, use_tqdm=False)
    chats = [conversation(row, q.text, _parts(q)) for q in questions]
    return llm.chat(chats, params, use_tqdm=False)


def conversation(row: Row, text: str, parts: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Messages: the row's system turn, and one of media and a question about them."""
    content = [*parts, {"type": "text", "text": text}]
    system = [{"role": "system", "content": row.system}] if row.system else []
    return [*system, {"role": "user", "content": content}]


def _prompt(row: Row, modality: str, question: Question) -> TextPrompt:
    prompt: TextPrompt = {"prompt": row.text(question.text, modality, len(question.items))}
    if question.items:
        prompt["multi_modal_data"] = {modality: list(question.items)}
    if question.names:
        prompt["multi_modal_uuids"] = {modality: list(question.names)}
    return prompt


def _parts(question: Question) -> list[dict[str, Any]]:
    parts: list[dict[str, Any]] = [{"type": "image_pil", "image_pil": i} for i in question.items]
    for part, name in zip(parts, question.names, strict=False):
        part["uuid"] = name
    return parts
