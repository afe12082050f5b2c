"""Prompts with their lengths: drawn at random, or read from files.

``random``, ``prefix_repetition`` and ``burstgpt`` draw token ids. With a tokenizer they become text of as
many tokens; without, they are sent as they are, which servers take on ``/v1/completions``.
"""

from __future__ import annotations

import argparse
import csv
import json
import math
import random
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace_core.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from headrace_core.text import Tokenizer

LOW_ID, HIGH_ID = 300, 1000
"""Ids from this range are drawn where no tokenizer says more: even small vocabularies have them."""

POEM = "Pick as many lines as you can from these poem lines:\n"


class SampleRequest(NamedTuple):
    """One request to make."""

    prompt: str | list[int]
    num_output_tokens: int
    num_prompt_tokens: int | None
    """None: only the server can tell."""


@dataclass(frozen=True, slots=True)
class DatasetOptions:
    """Number of samples, and the settings to make them."""

    num_prompts: int
    seed: int = 0
    tokenizer: Tokenizer | None = None
    shuffle: bool = True
    oversample: bool = True
    high_id: int = HIGH_ID
    """Ids below this are drawn where there is no tokenizer."""

    def draw(self, *purpose: object) -> random.Random:
        """Random numbers that depend on the seed and the purpose alone."""
        return random.Random(repr((self.seed, *purpose)))

    def need_tokenizer(self, dataset: str) -> Tokenizer:
        """The tokenizer.

        Raises:
            ConfigError: there is none; says why the dataset needs it.
        """
        if self.tokenizer is None:
            raise ConfigError(
                f"dataset {dataset!r}: lengths are counted in tokens; name the model's folder with "
                "--tokenizer",
                field="tokenizer",
            )
        return self.tokenizer


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """The flags that name a dataset and set its lengths."""
    group = parser.add_argument_group("Dataset")
    group.add_argument("--dataset-name", choices=sorted(DATASETS), default="random",
                       help="source of the prompts (default: random)")  # fmt: skip
    group.add_argument(
        "--dataset-path", metavar="FILE", help="for all but random and prefix_repetition"
    )
    group.add_argument(
        "--num-prompts", type=int, default=None, help="how many requests (default: 1000)"
    )
    group.add_argument(
        "--disable-shuffle", action="store_true", help="take a file's entries in order"
    )
    group.add_argument("--no-oversample", action="store_true",
                       help="never use a file's entry twice to reach --num-prompts")  # fmt: skip
    lengths = parser.add_argument_group("Lengths, in tokens")
    for flag, default, text in LENGTHS:
        lengths.add_argument(f"--{flag}", type=type(default) if default is not None else int,
                             default=default, help=f"{text} (default: {default})")  # fmt: skip


LENGTHS: Sequence[tuple[str, float | None, str]] = (
    ("random-input-len", 1024, "random: of a prompt, without --random-prefix-len"),
    ("random-output-len", 128, "random: of an output"),
    (
        "random-range-ratio",
        0.0,
        "random: lengths vary evenly by this share up and down, 0 to below 1",
    ),
    ("random-prefix-len", 0, "random: tokens in front that all prompts share"),
    ("prefix-repetition-prefix-len", 256, "prefix_repetition: of a shared prefix"),
    ("prefix-repetition-suffix-len", 256, "prefix_repetition: of the text after the prefix"),
    ("prefix-repetition-num-prefixes", 10, "prefix_repetition: how many prefixes there are"),
    ("prefix-repetition-output-len", 128, "prefix_repetition: of an output"),
    ("sharegpt-output-len", None, "sharegpt: of an output, in place of the recorded answer's"),
    ("custom-output-len", 256, "custom: of an output, where the line has no output_tokens"),
    ("sonnet-input-len", 550, "sonnet: of a prompt, about"),
    ("sonnet-output-len", 150, "sonnet: of an output"),
    ("sonnet-prefix-len", 200, "sonnet: of the lines that all prompts share, about"),
)
"""Flag, default, help."""


def default_length(flag: str) -> int:
    """The default of one of :data:`LENGTHS`."""
    return next(
        int(default) for name, default, _ in LENGTHS if name == flag and default is not None
    )


def load(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    """The samples that the flags of :func:`add_arguments` ask for.

    Raises:
        ConfigError: a flag is missing or out of range, or the file does not hold what it should.
    """
    if plan.num_prompts < 1:
        raise ConfigError(
            f"--num-prompts {plan.num_prompts}: must be at least 1", field="num_prompts"
        )
    samples = DATASETS[args.dataset_name](args, plan)
    if not samples:
        raise ConfigError(
            f"dataset {args.dataset_name!r}: no usable entry in {args.dataset_path!r}",
            field="dataset_path",
        )
    return samples


def drawn(
    plan: DatasetOptions, sizes: Sequence[tuple[int, int, int]], num_prefixes: int = 1
) -> list[SampleRequest]:
    """Random prompts of given sizes.

    Args:
        sizes: of each prompt: shared tokens in front, own tokens, output tokens.
        num_prefixes: how many different shared beginnings there are, in turn.
    """
    ids = _ids(plan)
    longest = max((prefix for prefix, _, _ in sizes), default=0)
    prefixes = []
    for index in range(num_prefixes):
        draw = plan.draw("prefix", index)
        prefixes.append([draw.choice(ids) for _ in range(longest)])
    samples = []
    for index, (prefix, own, output) in enumerate(sizes):
        draw = plan.draw("prompt", index)
        tokens = prefixes[index % num_prefixes][:prefix] + [draw.choice(ids) for _ in range(own)]
        samples.append(_sample(plan.tokenizer, tokens, output, draw, ids))
    return samples


def _sample(
    tokenizer: Tokenizer | None,
    tokens: list[int],
    output: int,
    draw: random.Random,
    ids: Sequence[int],
) -> SampleRequest:
    """Ids as they are, or text that is read back as that many tokens."""
    if tokenizer is None:
        return SampleRequest(tokens, output, len(tokens))
    wanted = len(tokens)
    for _ in range(10):
        text = tokenizer.decode(tokens)
        tokens = tokenizer.encode(text, add_special_tokens=False)
        if len(tokens) == wanted:
            break
        # Neighbours merged, or one came apart: cut or fill up at the end, where no shared prefix suffers.
        tokens = tokens[:wanted] + [draw.choice(ids) for _ in range(wanted - len(tokens))]
    return SampleRequest(text, output, len(tokenizer.encode(text, add_special_tokens=False)))


def _ids(plan: DatasetOptions) -> Sequence[int]:
    if plan.tokenizer is None:
        return range(min(LOW_ID, plan.high_id // 2), plan.high_id)
    special = plan.tokenizer.special_token_ids
    return [token for token in range(plan.tokenizer.vocab_size) if token not in special]


def _random(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    ratio = args.random_range_ratio
    if not 0 <= ratio < 1:
        raise ConfigError(
            f"--random-range-ratio {ratio!r}: must be at least 0 and below 1",
            field="random_range_ratio",
        )
    _least("--random-input-len", args.random_input_len, 1)
    _least("--random-output-len", args.random_output_len, 1)
    _least("--random-prefix-len", args.random_prefix_len, 0)
    draw = plan.draw("lengths")

    def length(middle: int) -> int:
        return draw.randint(
            max(1, math.floor(middle * (1 - ratio))), math.ceil(middle * (1 + ratio))
        )

    sizes = [
        (args.random_prefix_len, length(args.random_input_len), length(args.random_output_len))
        for _ in range(plan.num_prompts)
    ]
    return drawn(plan, sizes)


def _prefix_repetition(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    count = args.prefix_repetition_num_prefixes
    _least("--prefix-repetition-num-prefixes", count, 1)
    _least("--prefix-repetition-suffix-len", args.prefix_repetition_suffix_len, 1)
    _least("--prefix-repetition-prefix-len", args.prefix_repetition_prefix_len, 1)
    size = (
        args.prefix_repetition_prefix_len,
        args.prefix_repetition_suffix_len,
        args.prefix_repetition_output_len,
    )
    samples = drawn(plan, [size] * plan.num_prompts, count)
    if plan.shuffle:
        plan.draw("order").shuffle(samples)
    return samples


def _burstgpt(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    """Lengths from a trace with the columns "Request tokens" and "Response tokens"."""
    with _opened(args.dataset_path, "burstgpt") as file:
        rows = list(csv.DictReader(file))
    try:
        sizes = [(0, int(r["Request tokens"]), int(r["Response tokens"])) for r in rows]
    except (KeyError, TypeError, ValueError) as error:
        raise ConfigError(
            f"{args.dataset_path!r}: must be CSV with whole numbers in the columns 'Request tokens' and "
            f"'Response tokens' ({error!r})",
            field="dataset_path",
        ) from error
    return drawn(plan, _chosen(plan, [s for s in sizes if s[1] > 0 and s[2] > 0]))


def _sharegpt(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    """The first question and answer of recorded conversations, neither tiny nor huge."""
    tokenizer = plan.need_tokenizer("sharegpt")
    with _opened(args.dataset_path, "sharegpt") as file:
        content = json.load(file)
    turns = [entry.get("conversations") or entry.get("conversation") or [] for entry in content]
    pairs = [(t[0]["value"], t[1]["value"]) for t in turns if len(t) >= 2]
    if plan.shuffle:
        plan.draw("order").shuffle(pairs)
    return _repeated(
        plan, list(_measured(pairs, tokenizer, args.sharegpt_output_len, plan.num_prompts))
    )


def _measured(
    pairs: Sequence[tuple[str, str]], tokenizer: Tokenizer, output_len: int | None, most: int
) -> Iterator[SampleRequest]:
    """Conversations with 4 to 1,024 prompt tokens, at least 4 output tokens and at most 2,048 in all."""
    found = 0
    for question, answer in pairs:
        num_prompt = len(tokenizer.encode(question))
        num_output = output_len or len(tokenizer.encode(answer, add_special_tokens=False))
        if 4 <= num_prompt <= 1024 and num_output >= 4 and num_prompt + num_output <= 2048:
            yield SampleRequest(question, num_output, num_prompt)
            found += 1
            if found == most:
                return


def _custom(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    """JSON lines with ``prompt`` and, if wanted, ``output_tokens``."""
    with _opened(args.dataset_path, "custom") as file:
        lines = [line for line in file if line.strip()]
    entries = [_custom_entry(args.dataset_path, n, line) for n, line in enumerate(lines, start=1)]
    samples = []
    for entry in _chosen(plan, entries):
        output = entry.get("output_tokens") or args.custom_output_len
        count = len(plan.tokenizer.encode(entry["prompt"])) if plan.tokenizer else None
        samples.append(SampleRequest(entry["prompt"], int(output), count))
    return samples


def _custom_entry(path: str, number: int, line: str) -> Mapping[str, Any]:
    try:
        entry = json.loads(line)
    except ValueError as error:
        raise ConfigError(
            f"{path!r}, line {number}: no JSON ({error})", field="dataset_path"
        ) from error
    if not isinstance(entry, dict) or not isinstance(entry.get("prompt"), str):
        raise ConfigError(
            f"{path!r}, line {number}: must be an object with a text 'prompt'", field="dataset_path"
        )
    return entry


def _sonnet(args: argparse.Namespace, plan: DatasetOptions) -> list[SampleRequest]:
    """Lines of any plain text, drawn until the prompt is long enough; the first ones are shared by all."""
    tokenizer = plan.need_tokenizer("sonnet")
    with _opened(args.dataset_path, "sonnet") as file:
        lines = [line for line in file.read().splitlines(keepends=True) if line.strip()]
    if not lines:
        return []
    counts = [len(tokenizer.encode(line, add_special_tokens=False)) for line in lines]
    mean = max(1.0, sum(counts) / len(counts))
    head = len(tokenizer.encode(POEM))
    if args.sonnet_input_len <= head:
        raise ConfigError(
            f"--sonnet-input-len {args.sonnet_input_len}: must be above {head}, the tokens of the question",
            field="sonnet_input_len",
        )
    total = round((args.sonnet_input_len - head) / mean)
    shared = min(total, max(0, round((args.sonnet_prefix_len - head) / mean)))
    samples = []
    for index in range(plan.num_prompts):
        own = plan.draw("lines", index).choices(lines, k=total - shared)
        prompt = POEM + "".join((lines * (shared // len(lines) + 1))[:shared] + own)
        samples.append(SampleRequest(prompt, args.sonnet_output_len, len(tokenizer.encode(prompt))))
    return samples


DATASETS: Mapping[str, Callable[[argparse.Namespace, DatasetOptions], list[SampleRequest]]] = {
    "burstgpt": _burstgpt,
    "custom": _custom,
    "prefix_repetition": _prefix_repetition,
    "random": _random,
    "sharegpt": _sharegpt,
    "sonnet": _sonnet,
}


def _chosen(plan: DatasetOptions, entries: Sequence[Any]) -> list[Any]:
    """As many of a file's entries as wanted, shuffled and repeated as the plan says."""
    entries = list(entries)
    if plan.shuffle:
        plan.draw("order").shuffle(entries)
    return _repeated(plan, entries)


def _repeated(plan: DatasetOptions, entries: list[Any]) -> list[Any]:
    if entries and plan.oversample:
        entries = entries * -(-plan.num_prompts // len(entries))
    return entries[: plan.num_prompts]


def _least(flag: str, value: int, least: int) -> None:
    if value < least:
        raise ConfigError(f"{flag} {value}: must be at least {least}", field=flag[2:])


def _opened(path: str | None, dataset: str) -> Any:
    if path is None:
        raise ConfigError(
            f"dataset {dataset!r}: name its file with --dataset-path (nothing is downloaded)",
            field="dataset_path",
        )
    try:
        return Path(path).open(encoding="utf-8-sig")
    except OSError as error:
        raise ConfigError(f"--dataset-path {path!r}: {error}", field="dataset_path") from error


def read_tokenizer(name: str, *, offline: bool = False) -> Tokenizer:
    """The tokenizer of a checkpoint's folder or hub name.

    Args:
        offline: the hub is not asked; its cache counts.

    Raises:
        MissingDependency, ModelError: it cannot be read.
    """
    from headrace_core import plugins

    try:
        from headrace_models.checkpoint.source import fetch
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-models",
            needed_for="--tokenizer",
            install="pip install 'headrace[all]'",
        ) from error
    tokenizer: Tokenizer = plugins.load("headrace.tokenizers", "hf")(
        fetch(name, revision=None, token=None, offline=offline)
    )
    return tokenizer
