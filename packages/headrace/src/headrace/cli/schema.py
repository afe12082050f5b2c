"""``headrace schema check``: which grammar backends can serve a constraint, and why others cannot."""

from __future__ import annotations

import dataclasses
import json
import sys
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.grammar import BACKEND_ALIASES
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig

if TYPE_CHECKING:
    from headrace_engine.structured.checking import Report

KINDS = ("json", "regex", "grammar", "choice", "structural_tag")
SUFFIXES: Mapping[str, str] = {
    ".json": "json", ".regex": "regex", ".ebnf": "grammar", ".gbnf": "grammar", ".lark": "grammar",
}  # fmt: skip
"""Ending of a file's name -> what it holds."""


def main(argv: Sequence[str]) -> int:
    args = _parser().parse_args(argv)
    if args.action != "check":
        raise ConfigError(f"headrace schema {args.action}: the only action is 'check'")
    try:
        from headrace_engine.structured.checking import check
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-engine",
            needed_for="headrace schema",
            install="pip install 'headrace[all]'",
        ) from error
    backends = [BACKEND_ALIASES.get(name, name) for name in args.backend]
    reports = check(_params(args), StructuredOutputsConfig(), backends)
    if args.json:
        print(json.dumps([dataclasses.asdict(report) for report in reports], indent=2))
    else:
        for report in reports:
            print("\n".join(_lines(report)))
    return 0 if any(report.supported for report in reports) else 1


def _parser() -> Parser:
    parser = Parser(
        prog="headrace schema",
        description="Show which grammar backends can serve an output constraint, without a "
        "model.\nPrints yes for each backend, or the keywords that it does not enforce and their "
        "JSON pointers.\nExit status: 0 if a backend can serve it, 1 if none can, 2 if the "
        "constraint is malformed.",
        epilog="Examples:\n"
        "  headrace schema check person.json               a JSON schema\n"
        "  headrace schema check zip.regex                 a regex, the whole file without its last "
        "line end\n"
        "  headrace schema check sql.ebnf                  EBNF (root ::= ...) or Lark (start: ...)\n"
        "  headrace schema check tags.json --kind structural_tag\n"
        '  echo \'{"type": "integer"}\' | headrace schema check - --kind json --backend guidance\n\n'
        "The same constraint in a request: "
        '{"structured_outputs": {"json": ...}} or response_format; see docs/structured-output.md.',
    )
    parser.add_argument("action", metavar="check", help="what to do: check")
    parser.add_argument("file", metavar="FILE", help="the constraint; - reads standard input")
    parser.add_argument(
        "--kind", choices=KINDS,
        help="format of the file; default: by its name (.json: JSON schema; .regex; .ebnf, .gbnf, "
        ".lark: grammar)",
    )  # fmt: skip
    parser.add_argument(
        "--backend", nargs="+", default=[], metavar="NAME",
        help="check only these backends: guidance, xgrammar, outlines, lm-format-enforcer, or a "
        "plug-in's name",
    )  # fmt: skip
    parser.add_argument("--json", action="store_true", help="print the answers as JSON")
    return parser


def _params(args: Namespace) -> StructuredOutputsParams:
    kind = args.kind or SUFFIXES.get(Path(args.file).suffix)
    if kind is None:
        raise ConfigError(f"{args.file}: its name does not say what it holds; add --kind, one of "
                          f"{', '.join(KINDS)}")  # fmt: skip
    try:
        text = sys.stdin.read() if args.file == "-" else Path(args.file).read_text("utf-8-sig")
    except (OSError, ValueError) as error:
        raise ConfigError(f"{args.file}: cannot be read as text: {error}") from error
    if kind == "regex":
        text = text.removesuffix("\n")
    if kind == "choice":
        try:
            return StructuredOutputsParams(choice=json.loads(text))
        except json.JSONDecodeError as error:
            raise ConfigError(f"{args.file}: must hold a JSON list of texts: {error}") from error
    fields: dict[str, Any] = {kind: text}
    return StructuredOutputsParams(**fields)


def _lines(report: Report) -> list[str]:
    name = f"{report.backend:<20}"
    if report.supported:
        return [f"{name} yes   (compiled in {report.seconds * 1000:.0f} ms)"]
    lines = [f"{name} no"] if report.reasons else [f"{name} not installed: {report.install}"]
    lines += [f"    {reason}" for reason in report.reasons]
    if report.reasons and report.install:
        lines.append(f"    (nor is it installed: {report.install})")
    return lines
