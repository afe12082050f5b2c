"""``headrace generate``: many prompts offline, results as text or JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any, TextIO

from headrace.arguments import Parser, json_object
from headrace.engine_args import EngineArgs
from headrace.interrupts import ending_at_once
from headrace.logs import configure
from headrace_core.errors import RequestError
from headrace_core.output import RequestOutput
from headrace_core.sampling import SamplingParams


def main(words: Sequence[str]) -> int:
    args = _parser().parse_args(words)
    configure("WARNING")
    prompts = _prompts(args.prompt, args.input)
    if args.model_tag is not None:
        args.model = args.model_tag
    with ending_at_once():
        from headrace.llm import LLM

        model = LLM(**EngineArgs.from_cli_args(args).settings)
    given = {
        "max_tokens": args.max_tokens,
        "temperature": args.temperature,
        "seed": args.sampling_seed,
    }
    with model as llm:
        defaults = llm.get_default_sampling_params()
        for name, value in {**given, **args.sampling}.items():
            if value is not None:
                if not hasattr(defaults, name):
                    raise RequestError(
                        f"--sampling: SamplingParams has no field {name!r}", param=name
                    )
                setattr(defaults, name, value)
        defaults.validate()
        outputs = _run(llm, prompts, defaults, chat=args.chat)
    with _sink(args.output) as sink:
        for prompt, output in zip(prompts, outputs):
            print(_line(prompt, output, as_json=args.output is not None or args.json), file=sink)
    return 0


def _parser() -> Parser:
    parser = Parser(
        prog="headrace generate",
        description="Complete many prompts in one batch and print the results in order.",
        epilog="Try: headrace generate --prompt 'Hello' --max-tokens 20\n"
        "     headrace generate --chat --input questions.txt --output answers.jsonl",
    )
    parser.add_argument("model_tag", nargs="?", metavar="MODEL", help="folder or hub name")
    parser.add_argument(
        "--config", metavar="FILE", help="YAML file of flags; the command line wins"
    )
    parser.add_argument("--prompt", action="append", default=[], help="a prompt; repeatable")
    parser.add_argument(
        "--input", metavar="FILE",
        help='prompts: one a line, or JSON lines with "prompt"; - for standard input',
    )  # fmt: skip
    parser.add_argument("--output", metavar="FILE", help="write JSON lines here")
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


def _prompts(given: Sequence[str], file: str | None) -> list[str]:
    prompts = list(given)
    if file is not None:
        text = sys.stdin.read() if file == "-" else Path(file).read_text(encoding="utf-8")
        prompts += [_prompt_of(line) for line in text.splitlines() if line.strip()]
    if not prompts:
        raise RequestError("no prompts: give --prompt TEXT or --input FILE", param="prompt")
    return prompts


def _prompt_of(line: str) -> str:
    if line.startswith("{"):
        try:
            content = json.loads(line)
        except json.JSONDecodeError:
            return line
        if isinstance(content, dict) and isinstance(content.get("prompt"), str):
            return str(content["prompt"])
    return line


def _run(
    llm: Any, prompts: list[str], params: SamplingParams, *, chat: bool
) -> list[RequestOutput]:
    if chat:
        conversations = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs: list[RequestOutput] = llm.chat(conversations, params)
    else:
        outputs = llm.generate(prompts, params)
    return outputs


def _sink(output: str | None) -> Any:
    import contextlib

    return contextlib.nullcontext(sys.stdout) if output is None else _writer(Path(output))


def _writer(path: Path) -> TextIO:
    return path.open("w", encoding="utf-8")


def _line(prompt: str, output: RequestOutput, *, as_json: bool) -> str:
    if not as_json:
        return "\n".join(completion.text for completion in output.outputs)
    completions = [
        {"text": c.text, "finish_reason": c.finish_reason, "num_tokens": len(c.token_ids)}
        for c in output.outputs
    ]
    return json.dumps({"prompt": prompt, "outputs": completions}, ensure_ascii=False)
