"""The side of an engine that has the text: input_processor, and the way to a core.

One process may have several: nothing here is kept from one call to the next.
"""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, NamedTuple, cast

from headrace.assembly.ahead.reading import start_reading
from headrace.assembly.ahead.torch_library import linking_torch
from headrace.assembly.core import CORE_FACTORY, build_resolved_core
from headrace.assembly.engines import check_one_engine, replicated_client
from headrace.assembly.hosts.launched import (
    BACKEND,
    check_not_launched,
    launched_client,
    of_this_process,
)
from headrace.assembly.hosts.nodes import check_leads
from headrace.assembly.logits_processors import processor_name
from headrace.assembly.media import media_reader
from headrace.assembly.missing_packages import missing
from headrace.assembly.plugged import (
    io_processor_class,
    logits_processors,
    read_tokenizer,
    reasoning_parser,
)
from headrace.assembly.resolved import ResolvedConfig, resolve_engine, warn_of_revision
from headrace.assembly.served import served_model
from headrace.assembly.speech.served import ServedSpeech, served_speech
from headrace.assembly.templates import TemplateSettings, warn_of_broken, with_own
from headrace.interrupts import ending_at_once
from headrace_core.errors import ConfigError
from headrace_core.model import ModelInfo
from headrace_core.platform import BringsWorker
from headrace_core.pooling.io_processor import IOProcessor
from headrace_engine.config import EngineConfig, MultiModalConfig

if TYPE_CHECKING:
    from headrace_core.grammar import Vocabulary
    from headrace_engine.clients.base import CoreClient
    from headrace_engine.clients.link import CoreLink
    from headrace_engine.clients.process import ProcessClient
    from headrace_engine.engine import Engine
    from headrace_engine.input_processing.input_processor import InputProcessor
    from headrace_engine.input_processing.media import MediaReader
    from headrace_engine.startup import StartupTimeline
    from headrace_models.loading.ahead.weights import WeightsAhead


class FrontEnd(NamedTuple):
    """Parts of an engine on the side that has the text."""

    client: CoreClient
    """Not yet started: whoever takes it starts it."""
    input_processor: InputProcessor
    config: EngineConfig
    info: ModelInfo
    speech: ServedSpeech | None = None
    io_processor: IOProcessor | None = None


@contextmanager
def starting(*, whole_process: bool = False) -> Iterator[StartupTimeline]:
    """The time of a start, with the garbage collector off meanwhile.

    Args:
        whole_process: this process starts for nothing else: the timeline begins with the process,
            the collector will never look at what the start made, and Ctrl-C ends it at once.
    """
    try:
        from headrace_engine.startup import StartupTimeline, collector_paused
    except ImportError as error:
        raise missing(error) from error
    with contextlib.ExitStack() as stack:
        if whole_process:
            stack.enter_context(ending_at_once())
        stack.enter_context(collector_paused(freeze=whole_process))
        yield StartupTimeline.of_process() if whole_process else StartupTimeline()


def connect(
    config: EngineConfig,
    templates: TemplateSettings | None = None,
    timeline: StartupTimeline | None = None,
    client: CoreClient | None = None,
) -> Engine:
    """Start an engine and return the client that a server talks to.

    Args:
        timeline: of the start so far (:func:`starting`); None: it begins here.
        client: the way to a core that somebody else builds; None: it is built here.

    Raises:
        HeadraceError: whatever kept it from starting.
    """
    check_not_launched(config)
    if timeline is None:
        with starting() as begun:
            return connect(config, templates, begun, client)
    return start_engine(front_end(config, templates, timeline, client))


def start_engine(front: FrontEnd) -> Engine:
    """Start the engine of a front end.

    Raises: as :func:`connect`.
    """
    from headrace_engine.engine import Engine

    speech = front.speech
    try:
        if speech is not None:
            speech.warm_up()
        return Engine(
            front.client,
            front.input_processor,
            front.config,
            speech=speech,
            io_processor=front.io_processor,
        )
    except BaseException:
        if speech is not None:
            speech.close()
        raise


def front_end(
    config: EngineConfig,
    templates: TemplateSettings | None,
    timeline: StartupTimeline,
    client: CoreClient | None = None,
) -> FrontEnd:
    """Resolve the checkpoint, read its tokenizer, and prepare a client of a core yet to be built.

    Args:
        client: the way to a core that somebody else builds, if somebody does.

    Raises:
        ConfigError: shared memory of media, and the core is in this process.
    """
    check_leads(config)
    config = of_this_process(config)
    if config.parallel.is_replicated:
        parallel = config.parallel
        parallel = dataclasses.replace(parallel, enable_elastic_ep=parallel.is_elastic)
        config = dataclasses.replace(config, engine_process=True, parallel=parallel)
    if client is None:
        check_shared_items(config)
    ahead: WeightsAhead | None = None
    computes_here = not config.engine_process and client is None
    with timeline.phase("resolve model"):
        resolved = resolve_engine(config)
        if client is None:
            warn_of_revision(resolved)
        if computes_here:
            ahead = start_reading(resolved)
    with contextlib.ExitStack() as stack:
        with timeline.phase("import front end"):
            try:
                import headrace_engine.input_processing.input_processor
                import headrace_engine.structured.backend_loading  # noqa: F401 - timed here
                from headrace_engine.input_processing.tokenizer import prepare_thread
            except ImportError as error:
                raise missing(error) from error
            if computes_here:
                # Who needs the linker waits for the thread: for extension modules, which are imported by now.
                prepare_thread()
                stack.enter_context(linking_torch(resolved.platform))
        return _front_end(config, resolved, templates, timeline, client, ahead)


def _front_end(
    config: EngineConfig,
    resolved: ResolvedConfig,
    templates: TemplateSettings | None,
    timeline: StartupTimeline,
    client: CoreClient | None,
    ahead: WeightsAhead | None,
) -> FrontEnd:
    """The front end of a checkpoint that is resolved; arguments as :func:`front_end`'s.

    Args:
        ahead: weights that are read ahead for the core in this process.
    """
    from headrace_engine.input_processing.input_processor import InputProcessor
    from headrace_engine.structured.backend_loading import check_backend

    templates = with_own(templates or TemplateSettings(), resolved.info.pooling)
    platform = resolved.platform
    with timeline.phase("read tokenizer"):
        tokenizer = read_tokenizer(resolved)
        warn_of_broken(tokenizer, templates)
    with timeline.phase("prepare input processing"):
        speech = served_speech(resolved)
        media = media_reader(resolved, speech)
        model = served_model(
            resolved, tokenizer, templates.chat_template, media.modalities if media else ()
        )
        make_processor = io_processor_class(resolved)
        processor = None if make_processor is None else make_processor(resolved.config, model)
        input_processor = InputProcessor(
            tokenizer,
            model,
            chat_template=templates.chat_template,
            content_format=templates.content_format,
            prompt_templates=templates.prompt_templates,
            allow_control_tokens=config.model.allow_control_tokens_in_messages,
            structured_outputs=config.structured_outputs,
            processors=logits_processors(config, timeline),
            reasoning_parser=reasoning_parser(config.structured_outputs),
            check_params=platform.check_params if isinstance(platform, BringsWorker) else None,
            media=media,
            default_loras=resolved.config.lora.default_mm_loras,
            only_encodes=config.multimodal.only_encodes,
            kv_role=config.cache.kv_transfer_config.get("kv_role", ""),
        )
        check_backend(config.structured_outputs)
    if client is None:
        with timeline.phase("prepare client"):
            client = core_client(config, resolved, timeline, input_processor.vocabulary, ahead)
    if media is not None and config.multimodal.mm_processor_cache_type == "shm":
        share_items(cast("CoreLink", client), config.multimodal)
    share_names(client, media, config.multimodal)
    return FrontEnd(client, input_processor, resolved.config, resolved.info, speech, processor)


def check_shared_items(config: EngineConfig) -> None:
    """Refuse shared memory of media where the core is in this process.

    Raises:
        ConfigError: as said.
    """
    field = "multimodal.mm_processor_cache_type"
    if config.multimodal.mm_processor_cache_type == "shm" and not config.engine_process:
        raise ConfigError(
            f"{field} = 'shm': must be 'lru' for an engine in the process that takes requests; shm is for "
            "engine_process and api_server_count",
            field=field,
        )


def share_items(client: CoreLink, config: MultiModalConfig) -> None:
    """Have a client send processed media through shared memory.

    Raises:
        ConfigError: there is no such memory.
    """
    from headrace_engine.shared_objects.items import SharedItems

    num_bytes = int(config.mm_processor_cache_gb * (1 << 30))
    try:
        client.share_items(SharedItems(num_bytes, config.mm_shm_cache_max_object_size_mb << 20))
    except (OSError, OverflowError) as error:
        field = "multimodal.mm_processor_cache_type"
        raise ConfigError(f"{field} = 'shm': {error}; must be 'lru' here", field=field) from error


def share_names(client: CoreClient, media: MediaReader | None, config: MultiModalConfig) -> None:
    """Let names of media be those of all processes in front of the client's core, if there are others."""
    if media is not None and config.mm_processor_cache_gb and client.is_one_of_several:
        media.share_names(cast("CoreLink", client).share_names())


def core_client(
    config: EngineConfig,
    resolved: ResolvedConfig,
    timeline: StartupTimeline,
    vocabulary: Callable[[], Vocabulary] | None = None,
    ahead: WeightsAhead | None = None,
) -> CoreClient:
    """The way to a core: a thread of this process, or a process of its own, which reads the
    vocabulary itself; or several such processes."""
    if config.parallel.is_replicated:
        return replicated_client(
            _portable(config, resolved),
            resolved.platform,
            timeline,
            follows_prefixes=bool(resolved.config.cache.enable_prefix_caching),
        )
    if config.parallel.distributed_executor_backend == BACKEND:
        return launched_client(config, resolved, timeline, vocabulary)
    if config.engine_process:
        from headrace_engine.clients.process import ProcessClient

        return ProcessClient(CORE_FACTORY, _portable(config, resolved), timeline)
    from headrace_engine.clients.inproc import InprocClient

    return InprocClient(
        lambda started: build_resolved_core(resolved, started, vocabulary, ahead=ahead), timeline
    )


def shared_core(config: EngineConfig, timeline: StartupTimeline, folder: Path) -> ProcessClient:
    """A core in a process of its own, for several front ends whose sockets are in a folder.

    Raises:
        HeadraceError: the checkpoint, or a setting, cannot be used.
    """
    check_one_engine(config, "api_server_count above 1")
    check_not_launched(config)
    config = of_this_process(config)
    with timeline.phase("resolve model"):
        resolved = resolve_engine(config)
        warn_of_revision(resolved)
    from headrace_engine.clients.process import ProcessClient

    return ProcessClient(CORE_FACTORY, _portable(config, resolved), timeline, folder)


def _portable(config: EngineConfig, resolved: ResolvedConfig) -> EngineConfig:
    """The configuration with names in place of classes and a mapping in place of a function, as
    another process can read it."""
    names = tuple(map(processor_name, config.model.logits_processors))
    overrides = resolved.config.model.hf_overrides
    model = dataclasses.replace(config.model, logits_processors=names, hf_overrides=overrides)
    portable = dataclasses.replace(config, model=model)
    if overrides is not config.model.hf_overrides:  # a function made it
        _check_merges(portable, resolved.info)
    return portable


def _check_merges(portable: EngineConfig, info: ModelInfo) -> None:
    """The other process merges what a function made into config.json, which says it again unless
    the function took something out.

    Raises:
        ConfigError: it did.
    """
    if resolve_engine(portable).info.whole_config != info.whole_config:
        raise ConfigError(
            "model.hf_overrides: the function takes keys out of config.json, which cannot be sent to a "
            "separate engine process (engine_process): must set them to None instead",
            field="model.hf_overrides",
        )
