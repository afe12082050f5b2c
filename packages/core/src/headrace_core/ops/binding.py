"""Who implements the ops: kernel providers, and how one is chosen for each op."""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.ops.attention import CACHE_OPS
from headrace_core.ops.table import OP_NAMES, OpTable

if TYPE_CHECKING:
    from headrace_core.graph import StepGraph

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """What the ops will run on."""

    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """Of activations: ``float32``, ``float16`` or ``bfloat16``."""
    num_threads: int = 0
    """CPU threads, 0 = torch's setting, but no more than the process has cores."""
    cores: tuple[int, ...] = ()
    """Cores to bind these threads to, one each; the first is the calling thread's own affair."""


class KernelProvider(Protocol):
    """A set of op implementations; the object behind an entry point of ``headrace.kernels``."""

    @property
    def name(self) -> str: ...

    def refuse(self, need: KernelNeed) -> list[str]:
        """Reasons why nothing of this provider can serve; empty if it can. Must be cheap."""
        ...

    def priority(self, need: KernelNeed) -> int:
        """Higher wins. The reference has 0, native and Triton providers 100 on their device."""
        ...

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        """Op name -> implementation, for those this provider has."""
        ...

    def row_invariant(self, need: KernelNeed) -> bool:
        """Whether all its implementations are; see :mod:`headrace_core.ops`."""
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A kernel provider whose calls can be recorded (:mod:`headrace_core.graph`)."""

    def step_graph(self, operations: Mapping[str, Any]) -> StepGraph:
        """An empty graph for steps of these operations, the result of one call of
        :meth:`KernelProvider.operations`."""
        ...


@runtime_checkable
class PairsCaches(Protocol):
    """A kernel provider whose cache ops also take paired caches (:mod:`headrace_core.paired`)."""

    def pairs_caches(self, need: KernelNeed) -> bool:
        """Whether they do for this need, and gain by it."""
        ...


def bind_ops(need: KernelNeed, *, choose: Mapping[str, str] | None = None) -> OpTable:
    """Choose an implementation for every op from the installed providers.

    Args:
        need: device and dtype.
        choose: op name (or ``"*"``) -> provider name, for a user who insists; a provider that is
            insisted on and refuses, or lacks the op, is an error.

    Raises:
        ConfigError: a name in ``choose`` cannot be honoured; says why and what could serve.
        PluginError: an installed provider that was insisted on cannot be imported.
    """
    choose = dict(choose or {})
    unknown = sorted(set(choose) - set(OP_NAMES) - {"*"})
    if unknown:
        raise ConfigError(f"no op is named {unknown}; ops are {list(OP_NAMES)}", field="kernels")
    candidates = _willing_providers(need, insisted=set(choose.values()))
    table: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for op in OP_NAMES:
        wanted = choose.get(op, choose.get("*"))
        for provider, operations in candidates:
            if op in operations and wanted in (None, provider.name):
                table[op], origin[op] = operations[op], provider.name
                break
        else:
            having = [provider.name for provider, operations in candidates if op in operations]
            lacking = "no provider has it" if wanted is None else f"provider {wanted!r} lacks it"
            raise ConfigError(f"op {op!r}: {lacking}; could be {having}", field="kernels")
    used = set(origin.values())
    invariant = all(p.row_invariant(need) for p, _ in candidates if p.name in used)
    logger.info("kernels for %s %s: %s", need.device, need.dtype, _summary(origin))
    graphs = [
        functools.partial(provider.step_graph, operations)
        for provider, operations in candidates
        if provider.name in used and isinstance(provider, CapturesSteps)
    ]
    return OpTable(
        **table,
        providers=origin,
        row_invariant=invariant,
        step_graph=graphs[0] if graphs else None,
        pairs_caches=_pair_caches([p for p, _ in candidates], origin, need),
    )


def _pair_caches(
    providers: Sequence[KernelProvider], origin: Mapping[str, str], need: KernelNeed
) -> bool:
    """Whether all ops that touch the cache come from one provider, and that pairs caches."""
    names = {origin[op] for op in CACHE_OPS}
    if len(names) != 1:
        return False
    provider = next(p for p in providers if p.name in names)
    return isinstance(provider, PairsCaches) and provider.pairs_caches(need)


def _willing_providers(
    need: KernelNeed, insisted: set[str]
) -> list[tuple[KernelProvider, Mapping[str, Any]]]:
    """Providers that can serve, best first, with their ops."""
    willing: list[KernelProvider] = []
    for name, plugin in plugins.installed("headrace.kernels").items():
        try:
            provider: KernelProvider = plugin.load()
        except PluginError:
            if name in insisted:
                raise
            logger.warning("kernel provider %r skipped: it cannot be imported", name, exc_info=True)
            continue
        reasons = provider.refuse(need)
        if not reasons:
            willing.append(provider)
        elif name in insisted:
            raise ConfigError(
                f"kernels {name!r} cannot serve: {'; '.join(reasons)}", field="kernels"
            )
        else:
            logger.info("kernels %r not used: %s", name, "; ".join(reasons))
    missing = insisted - set(plugins.installed("headrace.kernels"))
    if missing:
        plugins.load("headrace.kernels", sorted(missing)[0])
    willing.sort(key=lambda provider: (-provider.priority(need), provider.name))
    return [(provider, provider.operations(need)) for provider in willing]


def _summary(origin: Mapping[str, str]) -> str:
    by_provider: dict[str, list[str]] = {}
    for op, provider in origin.items():
        by_provider.setdefault(provider, []).append(op)
    if len(by_provider) == 1:
        return next(iter(by_provider))
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in sorted(by_provider.items()))
