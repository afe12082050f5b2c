"""The side of an engine that has the model: scheduler, cache and workers, in whichever process."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from headrace.assembly.ahead.reading import start_reading
from headrace.assembly.plugged import read_tokenizer
from headrace.assembly.resolved import ResolvedConfig, resolve_engine
from headrace.assembly.transfer.kv import kv_connector, model_name, with_engine_id
from headrace.assembly.worker.factory import platforms_worker, ranked_workers
from headrace.assembly.worker.settings import MEMORY_POOLS
from headrace.logs import RESOLUTION, leave_to_another
from headrace_core import plugins
from headrace_core.errors import ConfigError, UnsupportedFeature
from headrace_core.platform import BringsWorker
from headrace_core.reliability import failpoints
from headrace_engine.config import EngineConfig

if TYPE_CHECKING:
    from headrace_core.grammar import Vocabulary
    from headrace_engine.core import EngineCore
    from headrace_engine.lockstep.peers import EnginePlace, PeerEngines
    from headrace_engine.multiproc.nodes.plan import NodePlan
    from headrace_engine.startup import StartupTimeline
    from headrace_models.loading.ahead.weights import WeightsAhead

CORE_FACTORY = "headrace.assembly.core:build_core"
"""Dotted name by which another process finds :func:`build_core`."""


def build_core(
    config: EngineConfig, timeline: StartupTimeline, place: EnginePlace | None = None
) -> EngineCore:
    """Build the engine's core from a configuration alone: the entry point of an engine process.

    Args:
        place: the engine's, among those with which it shares experts; None: there are none.
    """
    from headrace_engine.startup import collector_paused

    leave_to_another(*RESOLUTION)
    with collector_paused(freeze=True):
        with timeline.phase("resolve model"):
            resolved = resolve_engine(config)
            ahead = start_reading(resolved)
        if place is None:
            return build_resolved_core(resolved, timeline, ahead=ahead)
        from headrace_engine.lockstep.peers import PeerEngines

        return build_resolved_core(resolved, timeline, peers=PeerEngines(place))


def build_resolved_core(
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    vocabulary: Callable[[], Vocabulary] | None = None,
    nodes: NodePlan | None = None,
    peers: PeerEngines | None = None,
    ahead: WeightsAhead | None = None,
) -> EngineCore:
    """Build the engine's core here: workers started, model loaded, cache allocated.

    Args:
        vocabulary: of structured output; None: it is read from the checkpoint when it is needed.
        nodes: processes that have the other ranks, if somebody else starts them.
        peers: engines with which this one shares experts; None: there are none.
        ahead: weights that are packed already; None: the loader packs all.
    """
    failpoints.warn()
    resolved = with_engine_id(resolved)
    brings_worker = isinstance(resolved.platform, BringsWorker)
    if not brings_worker:
        with timeline.phase("import torch"):
            import torch  # noqa: F401 - timed here, so that no other phase hides it

            import headrace_engine.execution.capture
            import headrace_engine.weights.worker  # noqa: F401 - likewise
    with timeline.phase("import core"):
        from headrace_engine.core import EngineCore
        from headrace_engine.lora.store import AdapterStore
        from headrace_engine.structured.backend_loading import backend_order
        from headrace_engine.structured.store import GrammarStore

        executor_class = plugins.load("headrace.executors", resolved.config.parallel.executor)
    config = resolved.config
    structured = config.structured_outputs
    grammars = GrammarStore(
        vocabulary or (lambda: grammar_vocabulary(resolved)),
        structured.cache_bytes,
        structured.matching_seconds,
    )
    if structured.prepare_at_start:
        with timeline.phase("prepare grammars"):
            grammars.prepare(next(backend_order(structured, fallback=True)))
    if config.device.enable_sleep_mode:
        check_can_sleep(resolved)
    if brings_worker and config.parallel.worker_extension_cls:
        raise ConfigError(
            f"parallel.worker_extension_cls = {config.parallel.worker_extension_cls!r}: must be left out on "
            "this device, which brings its own worker",
            field="parallel.worker_extension_cls",
        )
    with timeline.phase("prepare workers"):
        connector = kv_connector(config)
        adapters = AdapterStore(config.lora.num_kept) if config.lora.enable_lora else None
        make_worker = (
            platforms_worker(resolved)
            if brings_worker
            else ranked_workers(
                resolved, timeline, grammars, adapters, connector, nodes, peers, ahead
            )
        )
        executor = executor_class(make_worker)
    core = EngineCore.build(
        config,
        max_model_len=resolved.info.max_model_len,
        executor=executor,
        timeline=timeline,
        fit_context=resolved.fit_context,
        grammars=grammars,
        adapters=adapters,
        connector=connector,
        model="" if connector is None else model_name(resolved),
    )
    if ahead is not None:
        ahead.started()
    if peers is not None:
        from headrace_engine.lockstep.turns import LockstepTurns

        core.lockstep = LockstepTurns(peers, executor)
    return core


def check_can_sleep(resolved: ResolvedConfig) -> None:
    """Refuse sleep on a device whose memory is not given back: one that is neither a CPU nor has a pool of
    such memory, and a simulated one.

    Raises:
        ConfigError: as said.
    """
    platform = resolved.platform
    sleeps = platform.device == "cpu" or platform.device in plugins.installed(MEMORY_POOLS)
    if not sleeps or isinstance(platform, BringsWorker):
        kind = type(platform).__name__
        raise ConfigError(
            f"device.enable_sleep_mode = True: must be False on the device {platform.device!r} ({kind}): "
            "the engine's own worker gives memory back on a CPU, and where a plug-in of "
            "headrace.memory_pools knows the device",
            field="device.enable_sleep_mode",
        )


def grammar_vocabulary(resolved: ResolvedConfig) -> Vocabulary:
    """The tokens' bytes, read from the checkpoint where logits are masked: only once a request
    needs them."""
    from headrace_engine.structured.vocabulary import vocabulary_of

    tokenizer = read_tokenizer(resolved)
    if tokenizer is None:
        raise UnsupportedFeature(
            "structured_outputs: not without a tokenizer (skip_tokenizer_init)",
            param="structured_outputs",
        )
    return vocabulary_of(tokenizer, resolved.info.vocab_size, resolved.info.eos_token_ids)
