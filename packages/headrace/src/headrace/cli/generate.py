"""``headrace generate``: many prompts offline, results as text or JSON lines.

With ``--output`` an interrupted run goes on where it stopped: answers are kept in a journal as they come
(:mod:`headrace.batch.journal`).
"""

from __future__ import annotations

import dataclasses
import json
import sys
import tempfile
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser, json_object
from headrace.batch.journal import Journal, journal_beside
from headrace.batch.prompts import FORMATS, Prompt, Prompts, read_prompts
from headrace.engine_args import EngineArgs
from headrace.interrupts import ending_at_once
from headrace.logs import configure
from headrace.progress import prompt_bar
from headrace.suggestions import near_names
from headrace_core.errors import RequestError
from headrace_core.sampling.params import (
    CONSTRAINTS,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)

if TYPE_CHECKING:
    from headrace.batch.generating import Answers
    from headrace.llm import LLM

SOME_FAILED = 1
"""Exit status: everything was done, and some of the prompts failed."""
MOST_SHOWN = 20
"""Lines that are named; of others the number is said."""
NOT_WRITTEN = ("logprobs", "prompt_logprobs", "logprob_token_ids")
"""Fields that ask for something which the output has no place for."""
SAMPLING_FIELDS = tuple(
    field.name
    for field in dataclasses.fields(SamplingParams)
    if field.name
    not in (*NOT_WRITTEN, "output_kind", "flat_logprobs", "logits_processors", "skip_clone")
)
"""Keys of ``--sampling``: the fields that mean something to a command."""

CONSTRAINT_NAMES: Mapping[str, str] = {
    **{name: name for name in CONSTRAINTS},
    "json_schema": "json",
    "schema": "json",
    "response_format": "json",
    "ebnf": "grammar",
    "gbnf": "grammar",
    "guided_json": "json",
    "guided_regex": "regex",
    "guided_choice": "choice",
    "guided_grammar": "grammar",
    "guided_json_object": "json_object",
    "guided_decoding": "json",
}
"""Names by which the server's clients ask for a constraint -> the field of structured_outputs."""


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.output == "-":
        args.output = "/dev/stdout"
    configure("WARNING")
    sampling = _sampling_of(args)
    prompts = read_prompts(args.prompt, args.input, args.input_format)
    _list_faulty(prompts)
    if args.output is None:
        failed = _print_answers(args, prompts, sampling)
        return _status_of(len(failed), failed, prompts)
    with tempfile.TemporaryDirectory(prefix="headrace-generate-") as folder:
        return _keep_answers(args, prompts, sampling, Path(folder))


def _parser() -> Parser:
    parser = Parser(
        prog="headrace generate",
        description="Complete many prompts in one batch and print the results in order. With --output, "
        "running the same command again resumes an interrupted run.",
        epilog="Try: headrace generate --prompt 'Hello' --max-tokens 20\n"
        "     headrace generate --chat --input questions.txt --output answers.jsonl",
    )
    parser.add_model()
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; repeatable")
    parser.add_argument(
        "-i", "--input", metavar="FILE",
        help='prompts, one a line: plain text, or JSON objects with "prompt" (and "custom_id", which is '
        "copied to the output) if the file's name ends in .jsonl or .ndjson; - for standard input",
    )  # fmt: skip
    parser.add_argument(
        "--input-format", choices=FORMATS, default="auto",
        help="format of --input: text, jsonl, or auto, which goes by the file's name (default: auto)",
    )  # fmt: skip
    parser.add_argument(
        "-o", "--output", metavar="FILE", help="write JSON lines here; - is standard output"
    )
    parser.add_argument(
        "--restart", action="store_true", help="discard the results of an interrupted run"
    )
    parser.add_argument("--json", action="store_true", help="print JSON lines")
    parser.add_argument("--chat", action="store_true", help="each prompt is a user's message")
    parser.add_argument("--max-tokens", type=int, help="most tokens of an output")
    parser.add_argument("--temperature", type=float, help="0 = always the likeliest token")
    parser.add_argument("--sampling-seed", type=int, help="makes random choices repeatable")
    parser.add_argument(
        "--sampling", type=json_object, default={}, metavar="JSON",
        help="any other fields of SamplingParams, e.g. '{\"top_p\": 0.9}'",
    )  # fmt: skip
    return EngineArgs.add_cli_args(parser)


def _sampling_of(args: Namespace) -> dict[str, Any]:
    """The sampling fields that were given, in Python's form.

    Raises:
        RequestError: ``--sampling`` has a field that does not exist, or contradicts another flag.
    """
    flags = {
        "max_tokens": ("--max-tokens", args.max_tokens),
        "temperature": ("--temperature", args.temperature),
        "seed": ("--sampling-seed", args.sampling_seed),
    }
    given = dict(args.sampling)
    for name, (flag, value) in flags.items():
        if value is None:
            continue
        if name in given and given[name] != value:
            raise RequestError(
                f"--sampling: {name} = {given[name]!r:.100}: contradicts {flag} {value}; give one of "
                "the two",
                param=name,
            )
        given[name] = value
    for name in NOT_WRITTEN:
        if args.sampling.get(name) is not None:
            raise RequestError(
                f"--sampling: {name}: the output has no field for it; `headrace run-batch` and "
                "LLM.generate give log-probabilities",
                param=name,
            )
    _refuse_unknown("", args.sampling, SAMPLING_FIELDS)
    bias = given.get("logit_bias")
    if isinstance(bias, Mapping):  # JSON's names are text
        given["logit_bias"] = {int(k) if k.isdecimal() else k: v for k, v in bias.items()}
    constraint = given.get("structured_outputs")
    if isinstance(constraint, Mapping):
        known = [field.name for field in dataclasses.fields(StructuredOutputsParams)]
        _refuse_unknown("structured_outputs.", constraint, known)
        given["structured_outputs"] = StructuredOutputsParams(**constraint)
    return {name: value for name, value in given.items() if value is not None}


def _refuse_unknown(prefix: str, given: Mapping[str, Any], known: Sequence[str]) -> None:
    for name in given:
        if name not in known:
            constraint = CONSTRAINT_NAMES.get(name)
            near = near_names(name, known, 2)
            if prefix and constraint in known:
                hint = f"did you mean {constraint}?"
            elif constraint is not None:
                hint = f'send {{"structured_outputs": {{"{constraint}": ...}}}}'
            elif near:
                hint = f"did you mean {' or '.join(near)}?"
            else:
                hint = f"fields are {', '.join(known)}"
            raise RequestError(
                f"--sampling: {prefix}{name:.100}: unknown field; {hint}", param=prefix + name
            )


def _list_faulty(prompts: Prompts) -> None:
    """Name the lines that cannot be used, before a model is loaded."""
    faulty = prompts.faulty
    if not faulty:
        return
    for prompt in faulty[:MOST_SHOWN]:
        _say(f"{prompt.place}: {prompt.fault}")
    _say(f"{len(faulty)} of {len(prompts.every)} prompts cannot be used; the others are answered")


def _print_answers(
    args: Namespace, prompts: Prompts, sampling: Mapping[str, Any]
) -> list[tuple[Prompt, Exception]]:
    """Answer all, and print each answer once those before it are there."""
    from tqdm import tqdm

    from headrace.batch.generating import PromptOrderPrinter

    def show(text: str) -> None:
        tqdm.write(text, file=sys.stdout)  # past the bar
        sys.stdout.flush()

    return _answer(args, prompts, sampling, PromptOrderPrinter(show, as_json=args.json), 0)


def _keep_answers(
    args: Namespace, prompts: Prompts, sampling: Mapping[str, Any], folder: Path
) -> int:
    """Answer what the journal does not have, then write the output."""
    from headrace.batch.generating import JournalWriter

    path = journal_beside(args.output, folder, "output", _file(args.input))
    if args.restart:
        path.unlink(missing_ok=True)
    model = args.model or "the demo model"
    total = len(prompts.every)
    with Journal(path, prompts.source, model, _options(args), field="output") as journal:
        if journal.num_resumed:
            _say(f"{journal.num_resumed} of {total} prompts are answered already")
        failed: list[tuple[Prompt, Exception]] = []
        num_failed = sum("error" in json.loads(each) for each in journal.outputs())
        if len(journal) < total:
            try:
                failed = _answer(args, prompts, sampling, JournalWriter(journal), len(journal))
            except BaseException:
                if path.parent != folder and len(journal):
                    _say(
                        f"stopped: {len(journal)} of {total} prompts are answered; run the same "
                        "command to go on"
                    )
                raise
        journal.write_output(Path(args.output))
        journal.remove()
    return _status_of(num_failed + len(failed), failed, prompts)


def _file(given: str | None) -> str | None:
    """The input's path; None: there is none, or it is standard input."""
    return None if given == "-" else given


def _options(args: Namespace) -> str:
    """The options that answers depend on, besides the model."""
    given = {
        "chat": args.chat,
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.sampling_seed,
        "sampling": args.sampling,
    }
    return json.dumps(given, sort_keys=True)


def _answer(
    args: Namespace, prompts: Prompts, sampling: Mapping[str, Any], answers: Answers, resumed: int
) -> list[tuple[Prompt, Exception]]:
    """Load the model and answer what has no answer; returns what failed."""
    from headrace.batch.generating import GenerateRun

    with ending_at_once():
        from headrace.llm import LLM

        model = LLM(**EngineArgs.from_cli_args(args).settings)
    with model as llm:
        params = _params(llm, sampling)
        with prompt_bar(len(prompts.every), True, done=resumed) as show:
            assert show is not None
            run = GenerateRun(
                llm.engine, params, answers, chat=args.chat, done=show,
                # Enough that a step is never short of requests.
                at_once=2 * (llm.engine_config.scheduler.max_num_seqs or 128),
            )  # fmt: skip
            run.run(prompts.every)
    return run.failed


def _params(llm: LLM, sampling: Mapping[str, Any]) -> SamplingParams:
    """The model's defaults with what was given.

    Raises:
        RequestError: a value is wrong, or the model does not generate.
    """
    from headrace_engine.input_processing.pooling import check_generates

    check_generates(llm.engine.model, "headrace generate")
    return dataclasses.replace(
        llm.get_default_sampling_params(), **sampling, output_kind=RequestOutputKind.FINAL_ONLY
    )


def _status_of(
    num_failed: int, failed: Sequence[tuple[Prompt, Exception]], prompts: Prompts
) -> int:
    """The exit status, and a last word on what failed.

    Raises:
        Exception: nothing but failed; the first error.
    """
    if not num_failed:
        return 0
    if len(failed) == len(prompts.every):
        raise failed[0][1]
    failures = [
        each for each in failed if each[0].fault is None
    ]  # faulty lines were named at start
    for prompt, error in failures[:MOST_SHOWN]:
        _say(f"{prompt.place}: {error}")
    _say(f"{num_failed} of {len(prompts.every)} prompts failed")
    return SOME_FAILED


def _say(text: str) -> None:
    """A line for whoever watches; answers alone go to standard output."""
    print(f"headrace generate: {text}", file=sys.stderr, flush=True)
