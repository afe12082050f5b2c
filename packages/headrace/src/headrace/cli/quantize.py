"""``headrace quantize``: a checkpoint written again in fewer bits, with a report of size and quality."""

from __future__ import annotations

import json
import shlex
import sys
from argparse import Namespace
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.arguments import Parser
from headrace.engine_args import EngineArgs
from headrace.interrupts import ending_at_once
from headrace.logs import configure
from headrace_core import plugins
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_models.loading.quantized_copy import Copied

EPILOG = """\
examples:
  headrace quantize ./Qwen3-0.6B --to q4_k --out ./Qwen3-0.6B-q4_k
  headrace quantize ./Qwen3-0.6B --to int4 --out ./Qwen3-0.6B-int4 --text sample.txt   # and measure it
  headrace serve ./Qwen3-0.6B-q4_k

No calibration data is used: each weight is rounded by itself. An interrupted run goes on where it stopped.
"""

_ROUNDING = ("quantization", "quantization_overrides", "quantization_activations")
"""Settings that would have the original measured as something else than it is."""
_OF_SOURCE = ("revision", "hf_config_path", "load_format", "model_loader_extra_config")
"""Settings that say how the original is found and read, and not how the copy is."""


def main(argv: Sequence[str]) -> int:
    parser = Parser(
        prog="headrace quantize",
        description="Write a checkpoint again with its linear layers in fewer bits.",
        epilog=EPILOG,
    )
    formats = sorted(plugins.installed("headrace.weight_encoders"))
    parser.add_model("folder or hub name of a checkpoint in floats (no GGUF file)")
    parser.add_argument("--to", required=True, metavar="FORMAT", help=f"of {', '.join(formats)}")
    parser.add_argument("--out", required=True, metavar="DIR", help="folder for the new checkpoint")
    parser.add_argument(
        "--with-head", action="store_true",
        help="quantize lm_head too (default: floats, as it always is where it is tied to the embedding)",
    )  # fmt: skip
    parser.add_argument(
        "--text", metavar="FILE",
        help="text to measure the quality with: perplexity, and divergence from the original",
    )  # fmt: skip
    parser.add_argument(
        "--tokens", type=int, default=4096, help="most tokens of it (default: 4096)"
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    EngineArgs.add_cli_args(parser)
    args = parser.parse_args(argv)
    configure()
    text = None if args.text is None else _text(args.text)
    if args.tokens < 2:
        raise ConfigError(f"--tokens {args.tokens}: must be at least 2")
    original = _original(args)
    try:
        with ending_at_once():
            print(_run(args, original, text))
    except KeyboardInterrupt:
        print(
            "headrace quantize: complete files are kept: the same command goes on", file=sys.stderr
        )
        raise
    return 0


def _original(args: Namespace) -> EngineArgs:
    """The checkpoint in floats.

    Raises:
        ConfigError: a setting rounds it while loading.
    """
    original = EngineArgs.from_cli_args(args)
    for name in _ROUNDING:
        if name in original.settings:
            raise ConfigError(
                f"--{name.replace('_', '-')} cannot be combined with --to: the checkpoint is read in floats, "
                f"and the new one is {args.to!r}",
                field=f"model.{name}",
            )
    return original


def _text(name: str) -> str:
    try:
        return Path(name).expanduser().read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ConfigError(f"--text {name!r}: is not UTF-8 text: {error}") from error


def _run(args: Namespace, original: EngineArgs, text: str | None) -> str:
    from headrace.quantizing.checkpoint import quantize_checkpoint
    from headrace.quantizing.quality import compare_quality, text_ids

    ids = None if text is None else text_ids(original, text, args.tokens)  # before hours of work
    copied = quantize_checkpoint(original, args.to, args.out, with_head=args.with_head)
    facts: dict[str, Any] = {
        "folder": str(copied.folder),
        "format": args.to,
        "quantized_layers": len(copied.encoded),
        "layers_in_floats": copied.left,
        "bytes_before": copied.source_bytes,
        "bytes_after": copied.written_bytes,
    }
    if ids is not None:
        kept = {k: v for k, v in original.settings.items() if k not in _OF_SOURCE}
        quantized = EngineArgs(**{**kept, "model": str(copied.folder)})
        before, after = compare_quality(original, quantized, ids)
        facts |= {"before": before._asdict(), "after": after._asdict()}
    return json.dumps(facts, indent=2) if args.json else _report(copied, facts)


def _report(copied: Copied, facts: dict[str, Any]) -> str:
    share = copied.written_bytes / max(1, copied.source_bytes)
    lines = [
        f"{facts['quantized_layers']} linear layers in {facts['format']}, {len(copied.left)} in floats",
        f"size          {_mib(copied.source_bytes)} -> {_mib(copied.written_bytes)} ({share:.0%})",
    ]
    if copied.resumed_files:
        lines.append(f"resumed       {copied.resumed_files} files were there from an earlier run")
    if "after" in facts:
        before, after = facts["before"], facts["after"]
        perplexities = f"{before['perplexity']:.4f} -> {after['perplexity']:.4f}"
        lines += [
            f"perplexity    {perplexities} over {after['tokens']} tokens",
            f"divergence    {after['divergence']:.5f} nats a token, at least",
            f"same token    {after['same_likeliest']:.1%} of the positions",
        ]
    return "\n".join([*lines, f"next: headrace serve {shlex.quote(str(copied.folder))}"])


def _mib(size: int) -> str:
    return f"{size / 2**20:,.1f} MiB"
