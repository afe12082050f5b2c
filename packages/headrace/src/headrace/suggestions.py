"""Suggestions in the place of unknown names: near ones, and those that other programs have for the same."""

from __future__ import annotations

import difflib
import itertools
import re
from collections.abc import Iterable, Mapping

NEAR = 0.75
"""Names at least so alike are near (:class:`difflib.SequenceMatcher`, ratio): ``temprature`` and
``temperature`` (0.95) are, ``iterations`` and ``quantization`` (0.55) are not."""
_PART = 0.4
"""A name whose words are all found in another must be at least so alike: ``gpu-mem`` and
``gpu-memory-utilization`` (0.48)."""
_MAX_NAME = 64

_ALIASES: Mapping[str, tuple[str, ...]] = {
    "gpu-memory-utilization": ("mem-fraction-static", "gpu-memory-fraction"),
    "max-concurrency": ("concurrency",),
    "max-model-len": (
        "context-length", "context-size", "ctx-size", "n-ctx", "max-context-length", "max-seq-len",
        "max-total-tokens",
    ),
    "max-num-batched-tokens": (
        "chunked-prefill-size", "max-prefill-tokens", "max-batch-prefill-tokens",
    ),
    "max-num-seqs": (
        "parallel", "max-running-requests", "max-concurrent-requests", "max-batch-size",
    ),
    "max-tokens": ("max-new-tokens", "max-output-tokens", "max-completion-tokens", "n-predict"),
    "model": ("model-path", "model-id"),
    "no-enable-log-requests": ("disable-log-requests",),
    "no-enable-prefix-caching": ("disable-radix-cache", "disable-prefix-caching"),
    "num-iters": ("iterations", "num-iterations", "repeat"),
    "num-iters-warmup": ("warmup", "warmup-iterations"),
    "num-prompts": ("num-requests",),
    "reasoning-parser": ("enable-reasoning", "reasoning-format"),
    "repetition-penalty": ("repeat-penalty",),
    "seed": ("random-seed",),
    "served-model-name": ("alias",),
    "stop": ("stop-sequences", "stop-words"),
    "structured-outputs-config": ("guided-decoding-backend", "grammar-backend"),
    "temperature": ("temp",),
    "tensor-parallel-size": ("tp-size", "num-shard"),
    "tokenizer": ("tokenizer-path",),
}  # fmt: skip
"""Names here -> names of the same in other programs, and in older vLLM."""
_MEANT = {alias: name for name, aliases in _ALIASES.items() for alias in aliases}


def near_names(name: str, known: Iterable[str], most: int = 3) -> list[str]:
    """The known names that an unknown one may stand for, the likeliest first; none if none is near.

    Names that begin as the unknown one does, word by word, come before all others. Dashes, underscores
    and the letter case make no difference. ``--no-`` forms are suggested for such forms only.

    Args:
        known: flags, fields or other names, as the user would write them.
        most: the number of names to return at most.
    """
    wanted = _plain(name[:_MAX_NAME])
    by_plain: dict[str, str] = {}
    for each in known:
        by_plain.setdefault(_plain(each), each)
    if (alias := _MEANT.get(wanted)) in by_plain:
        return [by_plain[alias]]
    found: list[tuple[int, float, str]] = []
    for plain, each in by_plain.items():
        if plain.startswith("no-") and plain[3:] in by_plain and not wanted.startswith("no-"):
            continue
        ratio = difflib.SequenceMatcher(None, wanted, plain).ratio()
        if ratio >= NEAR or (ratio >= _PART and _is_part(wanted, plain)):
            found.append((_num_begun(wanted, plain), ratio, each))
    return [each for *_, each in sorted(found, key=lambda one: (-one[0], -one[1]))[:most]]


def _plain(name: str) -> str:
    return re.sub(r"[^a-z0-9]+", "-", name.lower()).strip("-")


def _num_begun(name: str, other: str) -> int:
    """Number of a name's first words that begin the other's words at the same places."""
    pairs = zip(name.split("-"), other.split("-"), strict=False)
    return sum(1 for _ in itertools.takewhile(lambda pair: pair[1].startswith(pair[0]), pairs))


def _is_part(name: str, other: str) -> bool:
    """True if each word of a name has one of the other's that begins like it."""
    left = other.split("-")
    for word in name.split("-"):
        fitting = next((each for each in left if _begin_alike(word, each)), None)
        if fitting is None:
            return False
        left.remove(fitting)
    return True


def _begin_alike(word: str, other: str) -> bool:
    """True if one is the other's beginning (``mem``, ``memory``), or nearly (``iterations``, ``iters``)."""
    shorter = min(len(word), len(other))
    same = next((i for i in range(shorter) if word[i] != other[i]), shorter)
    return same >= 3 and same >= 0.75 * shorter
