"""Which all-reduce runs: rules as data, and for every tensor a name and the reason.

Pure: neither torch nor a GPU is needed to ask. Numbers marked ``[ref]`` are those that the field's engines
use; none was measured here (docs/never-run.md). A platform with others passes its own :class:`Limits`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace

KIB, MIB = 1 << 10, 1 << 20

CUSTOM, SYMM_MEM, PYNCCL, NCCL = "custom", "symm_mem", "pynccl", "nccl"
"""What a group may have set up."""
ONE_SHOT, TWO_SHOT = "custom one-shot", "custom two-shot"
MULTIMEM, SYMM_TWO_SHOT = "symm_mem multimem", "symm_mem two-shot"
"""Ways besides ``pynccl`` and ``nccl``."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Sizes at which one way becomes better than the next, in bytes."""

    one_shot: Mapping[int, int] = field(
        default_factory=lambda: {2: 8 * MIB, 4: 512 * KIB, 6: 256 * KIB, 8: 256 * KIB}
    )
    """By ranks [ref]: each reads world_size times the bytes, so more ranks pay sooner for a second meeting.
    Two ranks read as much in two shots as in one. Ranks that are not here have no custom all-reduce."""
    custom: int = 8 * MIB
    """Of custom all-reduce [ref]; ranks hold twice as much. NCCL's rings move large tensors faster."""
    custom_beside_symm_mem: Mapping[tuple[int, int], Mapping[int, int]] = field(
        default_factory=lambda: {
            (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: MIB // 2, 8: MIB // 4},
            (10, 0): {2: 2 * MIB, 4: 2 * MIB, 6: MIB, 8: MIB},
        }
    )
    """By compute capability and ranks [ref], where symmetric memory can take what is larger."""
    symm_mem: Mapping[tuple[int, int], Mapping[int, int]] = field(
        default_factory=lambda: {
            (9, 0): {2: 64 * MIB, 4: 32 * MIB, 6: 64 * MIB, 8: 64 * MIB},
            (10, 0): {2: 8 * MIB, 4: 32 * MIB, 6: 128 * MIB, 8: 128 * MIB},
        }
    )
    """Of symmetric memory, likewise [ref]."""
    multimem: Mapping[tuple[int, int], frozenset[int]] = field(
        default_factory=lambda: {(9, 0): frozenset({4, 6, 8}), (10, 0): frozenset({6, 8})}
    )
    """Numbers of ranks for which the switch adds up (NVLS) [ref]; the others take two shots."""


LIMITS = Limits()


@dataclass(frozen=True, slots=True, kw_only=True)
class AllReduceNeed:
    """One all-reduce, and what the group has."""

    num_bytes: int
    dtype: str
    """torch's name: ``bfloat16``."""
    world_size: int
    capability: tuple[int, int] = (0, 0)
    """Of the GPUs; the lowest."""
    one_host: bool = True
    fully_linked: bool = True
    """NVLink joins every two GPUs."""
    multicast: bool = True
    """The switch between the GPUs adds up (NVLS)."""
    capturing: bool = False
    """It becomes part of a CUDA graph."""
    fixed_order: bool = False
    """The sum must be taken in the order of ranks, and rounded once."""
    available: frozenset[str] = frozenset({NCCL})
    """What is set up, of :data:`CUSTOM`, :data:`SYMM_MEM`, :data:`PYNCCL`, :data:`NCCL`."""


@dataclass(frozen=True, slots=True)
class Choice:
    """What runs, and why."""

    name: str
    reason: str
    passed_over: Mapping[str, str]
    """What would have come first -> why it does not run."""


@dataclass(frozen=True, slots=True)
class Rule:
    """A way, and when it runs: at the first rule whose ``refuse`` says nothing."""

    name: str
    reason: str
    refuse: Callable[[AllReduceNeed, Limits], str]
    """Why it cannot or should not run; "": it runs."""


def custom_limit(need: AllReduceNeed, limits: Limits = LIMITS) -> int:
    """Most bytes of a tensor for custom all-reduce."""
    table = limits.custom_beside_symm_mem.get(need.capability)
    if symm_mem_refusal(replace(need, num_bytes=0), limits) or table is None:
        return limits.custom
    return table.get(need.world_size, limits.custom)


def custom_refusal_of_group(need: AllReduceNeed, limits: Limits = LIMITS) -> str:
    """Why a group cannot have custom all-reduce, whatever the tensor; "": it can."""
    if need.world_size not in limits.one_shot:
        sizes = ", ".join(map(str, limits.one_shot))
        return f"{need.world_size} ranks: its kernels are for {sizes}"
    if not need.one_host:
        return "the ranks are on several hosts, which cannot map each other's memory"
    if need.world_size > 2 and not need.fully_linked:
        return "more than two GPUs that NVLink does not join pairwise: PCIe would carry every copy"
    return ""


def _custom_refusal(need: AllReduceNeed, limits: Limits) -> str:
    if CUSTOM not in need.available:
        return "not set up"
    refusal = custom_refusal_of_group(need, limits)
    if refusal:
        return refusal
    if need.dtype not in ("float32", "bfloat16", "float16"):
        return f"{need.dtype} is not added up by its kernels"
    if need.num_bytes % 16:
        return "no multiple of 16 bytes, which a thread reads at once"
    limit = custom_limit(need, limits)
    return f"more than {limit} bytes" if need.num_bytes > limit else ""


def _one_shot_refusal(need: AllReduceNeed, limits: Limits) -> str:
    refusal = _custom_refusal(need, limits)
    limit = limits.one_shot.get(need.world_size, 0)
    if refusal or need.num_bytes <= limit or need.world_size == 2:
        return refusal
    return f"more than {limit} bytes: two shots move fewer"


def symm_mem_refusal(need: AllReduceNeed, limits: Limits = LIMITS) -> str:
    """Why symmetric memory does not take a tensor, of 0 bytes for a group; "": it does."""
    if SYMM_MEM not in need.available:
        return "not set up"
    if need.fixed_order:
        return "it rounds partial sums, or adds in the switch's order"
    if need.dtype != "bfloat16":
        return f"{need.dtype}: it is set up for bfloat16"
    limit = limits.symm_mem.get(need.capability, {}).get(need.world_size)
    if limit is None:
        major, minor = need.capability
        return f"capability {major}.{minor} with {need.world_size} ranks is not in its table"
    if need.num_bytes % 4:
        return "no multiple of 4 bytes"
    return f"more than {limit} bytes" if need.num_bytes > limit else ""


def _multimem_refusal(need: AllReduceNeed, limits: Limits) -> str:
    refusal = symm_mem_refusal(need, limits)
    if refusal:
        return refusal
    if not need.multicast:
        return "the switch cannot add up"
    if need.world_size in limits.multimem.get(need.capability, ()):
        return ""
    return f"{need.world_size} ranks: two shots are faster"


def _pynccl_refusal(need: AllReduceNeed, limits: Limits) -> str:
    return "" if PYNCCL in need.available else "not set up"


RULES: Sequence[Rule] = (
    Rule(ONE_SHOT, "small: one meeting of the ranks, in the order of ranks", _one_shot_refusal),
    Rule(TWO_SHOT, "each rank adds up a part, in the order of ranks", _custom_refusal),
    Rule(MULTIMEM, "the switch adds up", _multimem_refusal),
    Rule(SYMM_TWO_SHOT, "each rank adds up a part, in torch's symmetric memory", symm_mem_refusal),
    Rule(PYNCCL, "NCCL on the current stream, which a graph can record", _pynccl_refusal),
    Rule(
        NCCL,
        "torch's NCCL, which a graph records while its watchdog thread leaves it alone",
        lambda need, limits: "" if need.capturing else "not capturing",
    ),
    Rule(NCCL, "torch's NCCL, as nothing else serves", lambda need, limits: ""),
)
"""In order. Capturing changes no way, as all can be recorded. NCCL's symmetric windows and ROCm's quick
reduce, which the field has before these, are not built."""


def choose(need: AllReduceNeed, limits: Limits = LIMITS) -> Choice:
    """What runs: the first rule that refuses nothing. The last one never does."""
    passed: dict[str, str] = {}
    for rule in RULES:
        refusal = rule.refuse(need, limits)
        if not refusal:
            return Choice(rule.name, rule.reason, passed)
        passed[rule.name] = refusal
    raise AssertionError("the last rule takes everything")


def by_size(need: AllReduceNeed, limits: Limits = LIMITS) -> Sequence[tuple[int | None, Choice]]:
    """(most bytes, choice), ascending, of tensors of whole 16 bytes; None: no end. ``need``'s own size does
    not matter."""
    ends = sorted({
        limits.custom, custom_limit(need, limits), *limits.one_shot.values(),
        *(size for table in limits.symm_mem.values() for size in table.values()),
    })  # fmt: skip
    found: list[tuple[int | None, Choice]] = []
    for end in (*ends, None):
        size = ends[-1] + 16 if end is None else end
        choice = choose(replace(need, num_bytes=size), limits)
        if found and found[-1][1].name == choice.name:
            found.pop()
        found.append((end, choice))
    return found


def describe(need: AllReduceNeed, limits: Limits = LIMITS) -> str:
    """:func:`by_size` in words: ``custom one-shot up to 512 KiB (small: ...), then pynccl (...)``."""
    texts = []
    for end, choice in by_size(need, limits):
        size = "" if end is None else f" up to {_size(end)}"
        texts.append(f"{choice.name}{size} ({choice.reason})")
    return ", then ".join(texts)


def _size(num_bytes: int) -> str:
    return f"{num_bytes // MIB} MiB" if num_bytes >= MIB else f"{num_bytes // KIB} KiB"
