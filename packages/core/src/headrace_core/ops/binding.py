"""Kernel providers, and the choice of one for each op."""

from __future__ import annotations

import contextlib
import functools
import logging
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NoReturn, Protocol, runtime_checkable

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.ops.attention import CACHE_OPS
from headrace_core.ops.optional import OPTIONAL_OP_NAMES
from headrace_core.ops.table import OP_NAMES, OpTable

if TYPE_CHECKING:
    from headrace_core.graph import StepGraph

logger = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """Device and types that the ops will run on."""

    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """Type of activations: ``float32``, ``float16`` or ``bfloat16``."""
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

    def priority(self, need: KernelNeed) -> int:
        """Higher wins. The reference has 0, native and Triton providers 100 on their device."""

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        """Op name -> implementation, for those this provider has."""

    def row_invariant(self, need: KernelNeed) -> bool:
        """True if all implementations of the provider are batch-invariant; see :mod:`headrace_core.ops`."""


@runtime_checkable
class CapturesSteps(Protocol):
    """A kernel provider whose calls can be recorded (:mod:`headrace_core.graph`)."""

    def step_graph(self, operations: Mapping[str, Any]) -> StepGraph:
        """An empty graph for steps of these operations, the result of one call of
        :meth:`KernelProvider.operations`."""


@runtime_checkable
class PacksVNNI(Protocol):
    """A kernel provider whose cache ops also take VNNI-packed caches (:mod:`headrace_core.ops.vnni`)."""

    def vnni_packed(self, need: KernelNeed) -> bool:
        """True if the provider supports this need and is faster for it."""


@runtime_checkable
class BringsOps(Protocol):
    """A kernel provider with ops that core does not know, for a family of an outside package."""

    @property
    def own_ops(self) -> Collection[str]:
        """Their names; implementations are in :meth:`KernelProvider.operations`, as of any op."""


class MissingOp:
    """Stands for an op that no installed provider has: a model that needs it is told so."""

    def __init__(self, name: str, need: KernelNeed) -> None:
        self._name, self._need = name, need

    def __call__(self, *args: object, **kwargs: object) -> NoReturn:
        raise ConfigError(
            f"op {self._name!r}: no installed kernel provider has it for {self._need.device} "
            f"{self._need.dtype}; install its definition in plain torch: pip install headrace-reference",
            field="kernels",
        )

    def __getattr__(self, attribute: str) -> NoReturn:
        if attribute.startswith("__"):
            raise AttributeError(attribute)
        self()


def known_op_names() -> tuple[str, ...]:
    """Core's ops, and those that installed kernel providers bring; imports the providers."""
    return (*OP_NAMES, *OPTIONAL_OP_NAMES, *_own_ops(_installed_providers()))


def check_op_names(names: Iterable[str], *, field: str) -> None:
    """Check the ops that a user chooses kernels for; imports providers only for a name that core lacks.

    Raises:
        ConfigError: for one that nobody has; ``*`` stands for all.
    """
    unknown = sorted(set(names) - {"*", *OP_NAMES, *OPTIONAL_OP_NAMES})
    unknown = unknown and sorted(set(unknown) - set(known_op_names()))
    if unknown:
        raise ConfigError(
            f"{field}: no op is named {unknown}; ops are {list(known_op_names())}", field=field
        )


def _own_ops(providers: Iterable[KernelProvider]) -> list[str]:
    own: dict[str, None] = {}
    for provider in providers:
        if isinstance(provider, BringsOps):
            own |= dict.fromkeys(provider.own_ops)
    return [op for op in own if op not in OP_NAMES and op not in OPTIONAL_OP_NAMES]


def _installed_providers() -> Iterator[KernelProvider]:
    for plugin in plugins.installed("headrace.kernels").values():
        with contextlib.suppress(PluginError):  # told by who binds
            yield plugin.load()


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
    check_op_names(choose, field="kernels")
    candidates = _willing_providers(need, insisted=set(choose.values()))
    table: dict[str, Any] = {}
    origin: dict[str, str] = {}
    optional = [*OPTIONAL_OP_NAMES, *_own_ops(provider for provider, _ in candidates)]
    for op in (*OP_NAMES, *optional):
        wanted = choose.get(op, choose.get("*"))
        for provider, operations in candidates:
            if op in operations and wanted in (None, provider.name):
                table[op], origin[op] = operations[op], provider.name
                break
        else:
            if wanted is not None and (op in OP_NAMES or op in choose):
                having = [provider.name for provider, operations in candidates if op in operations]
                raise ConfigError(
                    f"op {op!r}: provider {wanted!r} lacks it; could be {having}", field="kernels"
                )
            if op in OP_NAMES:
                table[op] = MissingOp(op, need)
    used = set(origin.values())
    invariant = all(p.row_invariant(need) for p, _ in candidates if p.name in used)
    logger.info("kernels for %s %s: %s", need.device, need.dtype, _summary(origin))
    graphs = [
        functools.partial(provider.step_graph, operations)
        for provider, operations in candidates
        if provider.name in used and isinstance(provider, CapturesSteps)
    ]
    return OpTable(
        **{op: table[op] for op in OP_NAMES},
        others={op: table[op] for op in optional if op in table},
        providers=origin,
        row_invariant=invariant,
        step_graph=graphs[0] if graphs else None,
        vnni_packed=_packs_vnni([p for p, _ in candidates], origin, need),
    )


def _packs_vnni(
    providers: Sequence[KernelProvider], origin: Mapping[str, str], need: KernelNeed
) -> bool:
    """True if all ops that touch the cache come from one provider, and that pairs caches."""
    names = {origin.get(op, "") for op in CACHE_OPS}
    for provider in providers:
        if {provider.name} == names:
            return isinstance(provider, PacksVNNI) and provider.vnni_packed(need)
    return False


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
    offers = [(provider, provider.operations(need)) for provider in willing]
    for provider, operations in offers:
        unknown = sorted(set(operations) - {*OP_NAMES, *OPTIONAL_OP_NAMES, *_own_ops([provider])})
        if unknown:
            logger.warning(
                "kernels %r: ops %s are not used: core does not know them, and own_ops does not name them",
                provider.name, unknown,
            )  # fmt: skip
    return offers


def _summary(origin: Mapping[str, str]) -> str:
    by_provider: dict[str, list[str]] = {}
    for op, provider in origin.items():
        by_provider.setdefault(provider, []).append(op)
    if len(by_provider) == 1:
        return next(iter(by_provider))
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in sorted(by_provider.items()))
