"""Memory that a model needs on this machine, without loading it.

The model is built, which makes its tables (rotary ones are as long as the context) and says what each
layer caches; no weight is read. What transformers' code runs says so only when it is tried, and is
filled with made-up weights for that.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.assembly.parallel.context_parallel import share_blocks
from headrace.assembly.parallel.experts import check_mixtures, divided_experts
from headrace.assembly.parallel.ranks import Ranks
from headrace.assembly.read_speed import read_speed
from headrace.assembly.resolved import ResolvedConfig
from headrace.assembly.worker.context import backend_chooser, build_context
from headrace.assembly.worker.ops import choose_ops, cpu_threads
from headrace_core.config import LoadConfig
from headrace_core.errors import CapacityError, ConfigError, HeadraceError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import (
    CacheSpec,
    ChunkedLocalSpec,
    CrossAttentionSpec,
    MLASpec,
    RecurrentSpec,
    SlidingWindowSpec,
    SparseIndexerSpec,
)
from headrace_core.model import SupportsRecurrence
from headrace_core.platform import BringsWorker
from headrace_engine.multiproc.places import RankPlace

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, CausalLM
    from headrace_models.linear_storage import LinearStorage

SHARE_OF_READS = 0.7
"""Part of the machine's speed of reading that decoding reaches: docs/performance.md."""
MOST_NAMES = 8
"""Names of layers in a line."""
UNIT = 1000
"""Tokens that a cache's cost is told for."""


class CachedKind(NamedTuple):
    """Layers that cache alike. Costs in bytes, over all of them."""

    kind: str
    layers: int
    bytes_per_1000_tokens: int
    """0 for a state, whose size does not grow."""
    bytes_per_request: int
    """Bytes of states; 0 for caches that grow with the tokens."""
    kept_tokens: int | None
    """Most tokens that a request keeps (a window, a chunk, an encoder's states); None: all."""

    def __str__(self) -> str:
        from headrace_engine.execution.memory import readable

        layers = f"{self.layers} layer{'s' if self.layers > 1 else ''} of {self.kind}"
        if self.bytes_per_request:
            return f"{readable(self.bytes_per_request)} for each request in {layers}"
        kept = "" if self.kept_tokens is None else f", which keep at most {self.kept_tokens}"
        return f"{readable(self.bytes_per_1000_tokens)} for 1,000 tokens in {layers}{kept}"


@dataclasses.dataclass(frozen=True)
class Footprint:
    """A model's memory. Sizes in bytes."""

    dtype: str
    weights: int
    """With tables; what kernels pad is not in it."""
    stored: int
    """Bytes of the weight files; 0: there are none to be loaded."""
    activations: int
    """At least; a start measures them."""
    cache: tuple[CachedKind, ...]
    available: int
    max_model_len: int
    longest: int
    """Longest context of which one request fits, up to ``max_model_len``; 0: none."""
    spare: int
    """Bytes left beside one request of ``max_model_len`` tokens; negative: bytes missing."""
    why_not: str = ""
    """Why an engine would not start, or not with what it was told to use; empty: it would."""
    cannot_start: str = ""
    """Reason why a start is refused; empty: it is not."""
    linear: tuple[LinearStorage, ...] = ()
    """How linear layers are stored."""
    token_bytes: int = 0
    """Bytes of linear layers that a decode step of one token reads."""
    read_speed: float = 0.0
    """Bytes a second that this machine reads now, of which the rank has its share; 0: nobody looked."""
    ranks: int = 1
    """Ranks that the layers are divided over: sizes are those of one rank."""
    engines: int = 1
    """Engines that share the machine, each with so many ranks."""

    @property
    def fits(self) -> bool:
        return not self.why_not

    @property
    def tokens_per_second(self) -> float:
        """Estimate for one request of a short context: decoding reads its weights once a token. What ranks
        exchange is not in it."""
        return (
            SHARE_OF_READS * self.read_speed / max(1, self.token_bytes * self.engines * self.ranks)
        )

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        cache = [kind._asdict() for kind in self.cache]
        linear = [storage._asdict() for storage in self.linear]
        facts = {**dataclasses.asdict(self), "cache": cache, "linear": linear, "fits": self.fits}
        if self.read_speed:
            facts["tokens_per_second"] = round(self.tokens_per_second, 1)
        del facts["cannot_start"]  # is part of why_not
        return facts

    def _decoding(self) -> str:
        from headrace_engine.execution.memory import readable

        share = self.engines * self.ranks
        place = "this machine" if share == 1 else f"each of {share} ranks"
        return (
            f"about {_figures(self.tokens_per_second)} tokens a second for one request: a token reads "
            f"{readable(self.token_bytes)} of weights, {place} {_figures(self.read_speed / share / 1e9)} GB/s"
        )

    def __str__(self) -> str:
        from headrace_engine.execution.memory import readable

        absent = "" if self.stored else "; no weight files are there"
        rows = [("weights", f"{readable(self.weights)} in {self.dtype}{absent}")]
        rows += [("linear layers", _storage(storage)) for storage in self.linear]
        if self.read_speed and self.token_bytes:
            rows.append(("decoding", self._decoding()))
        rows += [("cache", str(kind)) for kind in self.cache] or [("cache", "none")]
        rows.append(("activations", f"at least {readable(self.activations)}; measured at start"))
        rows.append(("longest context", f"{self.longest} of {self.max_model_len} tokens"))
        if self.fits:
            verdict = (
                f"yes: {readable(self.spare)} of {readable(self.available)} are left beside one"
            )
            verdict += " request of the longest context" if self.cache else " step"
        else:
            verdict = f"no: {self.why_not}"
        rows.append(("fits here", verdict))
        return "\n".join([self._title(), *(f"  {title:<16}{text}" for title, text in rows)])

    def _title(self) -> str:
        shared = [f"{self.ranks} ranks"] if self.ranks > 1 else []
        shared += [f"{self.engines} engines"] if self.engines > 1 else []
        whose = f" of one rank ({' in each of '.join(shared)})" if shared else ""
        return f"memory{whose}:"


def _storage(storage: LinearStorage) -> str:
    from headrace_engine.execution.memory import readable

    names = ", ".join(storage.names[:MOST_NAMES])
    more = ", ..." if len(storage.names) > MOST_NAMES else ""
    return f"{storage.layers} of {storage.bits:g} bits a weight, {readable(storage.num_bytes)}: {names}{more}"


def _figures(number: float) -> str:
    """Two significant figures: the estimate is not better."""
    return f"{float(f'{number:.2g}'):g}"


@dataclasses.dataclass(frozen=True)
class UnknownFootprint:
    """Stands for a :class:`Footprint` where a model cannot be built."""

    reason: str

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        return {"unknown": self.reason}

    def __str__(self) -> str:
        return f"memory: unknown: {self.reason}"


def footprint(resolved: ResolvedConfig) -> Footprint | UnknownFootprint:
    """Build a model, and reckon. Whatever keeps it from being built is the result's reason."""
    if isinstance(resolved.platform, BringsWorker):
        return UnknownFootprint(
            f"{type(resolved.platform).__name__} makes its own worker, which builds no model"
        )
    try:
        one, shares = one_rank(resolved)
        model, weights = _built(one)
        here = shares.ranks // resolved.config.parallel.nnodes
        available = resolved.platform.available_memory() // here
        found = reckoned(one, weights, specs_of(model), available)
        found = dataclasses.replace(found, ranks=shares.ranks, engines=shares.engines)
        return found if resolved.info.source == "transformers" else _with_storage(found, model)
    except HeadraceError as error:
        return UnknownFootprint(str(error))
    except Exception as error:  # whatever a foreign class raises
        return UnknownFootprint(f"{type(error).__name__}: {error}")


class Shares(NamedTuple):
    """How many share the machine."""

    ranks: int
    """Of one engine."""
    engines: int


def one_rank(resolved: ResolvedConfig) -> tuple[ResolvedConfig, Shares]:
    """The configuration as one rank of one engine plans its memory by it.

    Raises:
        ConfigError: there are several stages, or a setting does not work with several engines.
    """
    from headrace.assembly.engines import EngineShares, check_engines
    from headrace_engine.execution.memory import of_one_rank

    config = resolved.config
    shares = Shares(config.parallel.tensor_parallel_size, config.parallel.num_engines_here)
    parts, stages = (
        config.parallel.prefill_context_parallel_size, config.parallel.pipeline_parallel_size
    )  # fmt: skip
    if parts > 1:
        raise ConfigError(
            f"parallel.prefill_context_parallel_size = {parts}: must be left out: each rank takes the memory "
            "of one without it",
            field="parallel.prefill_context_parallel_size",
        )
    if stages > 1:
        raise ConfigError(
            f"parallel.pipeline_parallel_size = {stages}: `headrace plan` tells the memory of each stage",
            field="parallel.pipeline_parallel_size",
        )
    if shares.engines > 1:
        check_engines(config, resolved.platform)
        config = EngineShares(config, resolved.platform).of(0)
    return resolved._replace(config=of_one_rank(config)), shares


def _with_storage(found: Footprint, model: Any) -> Footprint:
    from headrace_models.linear_storage import linear_storage, token_bytes

    return dataclasses.replace(
        found,
        linear=linear_storage(model, found.dtype),
        token_bytes=token_bytes(model, found.dtype),
        read_speed=read_speed(),
    )


def _built(resolved: ResolvedConfig) -> tuple[CausalLM, int]:
    """The model of one rank without weights, and the bytes that it will keep."""
    from headrace_engine.startup import StartupTimeline
    from headrace_models.loading.loader import load_model
    from headrace_models.weight_bytes import kept_bytes

    info, available = resolved.info, resolved.platform.available_memory()
    ops = choose_ops(resolved, StartupTimeline(), cpu_threads(resolved))
    context = rank_context(resolved, build_context(resolved, ops, backend_chooser(resolved, ops)))
    model: Any = rank_model(resolved, context)
    weights = kept_bytes(model, info.dtype)
    if info.source != "transformers":
        return model, weights
    if weights > available:
        from headrace_engine.execution.memory import readable

        raise CapacityError(
            f"the weights take {readable(weights)}, and {readable(available)} are free"
        )
    filled = load_model(info, context, load=LoadConfig(load_format="dummy"))
    return filled, weights


def rank_context(resolved: ResolvedConfig, context: BuildContext, rank: int = 0) -> BuildContext:
    """The build context of one of the ranks that the settings ask for, none of which is there."""
    from headrace_models.loading.absent_group import AbsentGroup

    parallel = resolved.config.parallel
    engines = parallel.data_parallel_size if parallel.shares_experts else 1
    place = RankPlace(rank, parallel.tensor_parallel_size, num_engines=engines)
    tokens = resolved.config.scheduler.max_num_batched_tokens or 1
    experts = divided_experts(parallel, Ranks(place), tokens)
    return dataclasses.replace(
        context,
        communicator=AbsentGroup(rank, place.world_size),
        experts=None if experts is None else experts.division,
    )


def rank_model(resolved: ResolvedConfig, context: BuildContext) -> CausalLM:
    """The model of one rank without weights.

    Args:
        context: of :func:`rank_context`.

    Raises:
        UnsupportedModel, ConfigError: the model cannot be divided so.
    """
    from headrace_models.loading.loader import Built

    info, parallel = resolved.info, resolved.config.parallel
    model = Built.of(info, context).model
    if context.experts is not None:
        check_mixtures(context.experts, info.architecture)
    if parallel.decode_context_parallel_size > 1:
        share_blocks(model, parallel.decode_context_parallel_size)
    return model


def specs_of(model: CausalLM) -> Mapping[str, CacheSpec]:
    """The cache specification of each layer of a model."""
    from headrace_engine.execution.cache import cache_specs

    states = model.state_layers() if isinstance(model, SupportsRecurrence) else {}
    return cache_specs(model.attention_layers(), states)


def reckoned(
    resolved: ResolvedConfig, weights: int, specs: Mapping[str, CacheSpec], available: int
) -> Footprint:
    """The footprint of a model, computed without loading it.

    Args:
        weights: bytes that the model keeps.
        available: bytes that are free before it is loaded.
    """
    from headrace_engine.execution.division import CacheLimits
    from headrace_engine.execution.memory import (
        CachePlan,
        fit_max_model_len,
        plan_cache,
        readable,
        spare_bytes,
    )
    from headrace_engine.kv.grouping import plan_groups

    config, info, platform, _ = resolved
    limits = CacheLimits.of(config, info.max_model_len)
    profile = MemoryProfile(
        weights, least_activations(resolved, limits.max_num_seqs), available, 0.0
    )
    groups = plan_groups(specs) if specs else ()
    spare = spare_bytes(profile, groups, config.cache, limits)
    longest, why_not, cannot_start = info.max_model_len, "", ""
    try:
        if groups:
            longest = 0
            longest = fit_max_model_len(
                profile, groups, config.cache, limits, device=platform.device
            )
            wanted = longest if resolved.fit_context else info.max_model_len
            limits = dataclasses.replace(limits, max_model_len=wanted)
            plan_cache(profile, groups, config.cache, limits, device=platform.device)
            spare = spare_bytes(profile, groups, config.cache, limits)
        else:
            CachePlan.without_cache(profile, info.max_model_len, config.cache.max_memory_bytes)
        if spare < 0:
            why_not = f"{readable(-spare)} more than there are"
    except CapacityError as error:
        why_not = cannot_start = str(error)
    if not groups and why_not:
        longest = 0
    return Footprint(
        dtype=info.dtype,
        weights=weights,
        stored=info.weight_bytes,
        activations=profile.activations,
        cache=tuple(_kinds(specs)),
        available=available,
        max_model_len=info.max_model_len,
        longest=longest,
        spare=spare,
        why_not=why_not,
        cannot_start=cannot_start,
    )


def least_activations(resolved: ResolvedConfig, max_num_seqs: int) -> int:
    """float32, of as many rows as a step samples: what any step takes at least."""
    info, tokens = resolved.info, resolved.config.scheduler.max_num_batched_tokens
    if info.pooling is not None:
        return 0
    return 4 * info.vocab_size * min(max_num_seqs, tokens or max_num_seqs)


def _kinds(specs: Mapping[str, CacheSpec]) -> list[CachedKind]:
    alike: dict[tuple[str, int | None], list[CacheSpec]] = {}
    for spec in specs.values():
        alike.setdefault(_kind(spec), []).append(spec)
    return [_summed(kind, kept, inside) for (kind, kept), inside in alike.items()]


def _summed(kind: str, kept: int | None, specs: Sequence[CacheSpec]) -> CachedKind:
    states = sum(spec.page_bytes for spec in specs if isinstance(spec, RecurrentSpec))
    tokens = sum(
        UNIT * spec.page_bytes // spec.block_size
        for spec in specs
        if not isinstance(spec, RecurrentSpec)
    )
    return CachedKind(kind, len(specs), tokens, states, kept)


def _kind(spec: CacheSpec) -> tuple[str, int | None]:
    """Name, and most tokens that are kept."""
    match spec:
        case RecurrentSpec():
            return "recurrence", None
        case SlidingWindowSpec():
            return "attention in a window", spec.sliding_window
        case ChunkedLocalSpec():
            return "attention in chunks", spec.attention_chunk_size
        case CrossAttentionSpec():
            return "attention to an encoder", spec.max_encoder_tokens
        case SparseIndexerSpec():
            return "an indexer's keys", None
        case MLASpec():
            return "latent attention", None
        case _:
            return "full attention", None
