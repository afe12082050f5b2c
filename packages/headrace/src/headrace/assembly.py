"""Composition: the only module that knows all packages.

From a configuration: resolve the checkpoint, choose platform, kernels, quantization and attention, and
hand the executor a function that builds the worker. :func:`build_core` does this in whichever process
the engine's core lives in; :func:`connect` makes the client that a server or ``LLM`` talks to.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import logging
import os
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace import demo
from headrace_core import failpoints, plugins
from headrace_core.attention import AttentionBackend, AttentionNeed, choose_backend
from headrace_core.config import (
    CacheConfig,
    EngineConfig,
    SimConfig,
    StructuredOutputsConfig,
    resolve,
)
from headrace_core.cores import CpuThreads, format_cores, plan_threads
from headrace_core.engine import ServedModel
from headrace_core.errors import ConfigError, DeviceError, MissingDependency, UnsupportedFeature
from headrace_core.graph import capture_sizes
from headrace_core.kv import CACHE_DTYPES
from headrace_core.kv_scales import ScaleConstants, scale_constants
from headrace_core.logits_processor import load_processors, processor_name
from headrace_core.model import BuildContext, CausalLM, ModelInfo
from headrace_core.ops import KernelNeed, OpTable, bind_ops
from headrace_core.platform import BringsWorker, CpuPlatform, Platform, detect

if TYPE_CHECKING:
    from headrace_core.executor import WorkerFactory
    from headrace_core.grammar import Vocabulary
    from headrace_core.logits_processor import LogitsProcessor
    from headrace_core.text import ReasoningParser, Tokenizer, TokenizerFactory
    from headrace_engine.clients.base import CoreClient
    from headrace_engine.core import EngineCore
    from headrace_engine.engine import Engine
    from headrace_engine.execution.worker import ModelWorker
    from headrace_engine.intake.intake import Intake
    from headrace_engine.startup import StartupTimeline
    from headrace_engine.structured.store import GrammarStore

logger = logging.getLogger(__name__)

CORE_FACTORY = "headrace.assembly:build_core"
"""How another process finds :func:`build_core`."""

SAMPLING_DEFAULTS: Mapping[str, str] = {
    "repetition_penalty": "repetition_penalty",
    "temperature": "temperature",
    "top_k": "top_k",
    "top_p": "top_p",
    "min_p": "min_p",
    "max_new_tokens": "max_tokens",
}
"""Key of a generation config -> field of ``SamplingParams``."""

HIDDEN_SIZES = ("hidden_size", "n_embd", "d_model")
"""Where a config says how long an embedding is."""


class Resolved(NamedTuple):
    """A configuration with nothing left to choose, and the checkpoint it is for."""

    config: EngineConfig
    info: ModelInfo
    platform: Platform
    fit_context: bool = False
    """``max_model_len = -1``: the context may be shortened to what fits into memory."""


def resolve_engine(config: EngineConfig) -> Resolved:
    """Find the checkpoint and fill in every ``auto``. Reads no weights.

    Raises:
        ConfigError, UnsupportedModel: a setting and the model do not fit.
        MissingDependency: a package of headrace that this needs is not installed.
    """
    try:
        from headrace_models.resolve import resolve as resolve_model
    except ImportError as error:
        raise _missing(error) from error
    if config.model.model is None:
        names = config.model.served_model_name or (demo.NAME,)
        model = dataclasses.replace(config.model, model=str(demo.path()), served_model_name=names)
        config = dataclasses.replace(config, model=model)
    platform = choose_platform(config.device.device)
    info = resolve_model(config.model, config.load, platform)
    _check_extensions(config, info)
    fit_context = config.model.max_model_len == -1
    return Resolved(resolve(config, info, platform), info, platform, fit_context)


def _check_extensions(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse what only generating models have."""
    for name in ("logits_processors", "enable_prompt_embeds"):
        value = getattr(config.model, name)
        if value and "generate" not in info.tasks:
            raise ConfigError(
                f"model.{name} = {value!r}: must be off for {info.architecture}, which generates "
                "no text",
                field=f"model.{name}",
            )


def choose_platform(device: str) -> Platform:
    """The platform of a device's name.

    Raises:
        ConfigError: no such device is known; lists what is.
        DeviceError: torch sees no such device.
    """
    built_in: Mapping[str, Callable[[], Platform]] = {
        "auto": detect,
        "cpu": CpuPlatform,
        "cuda": _cuda_platform,
        "sim": _sim_platform,
    }
    if device in built_in:
        return built_in[device]()
    others = plugins.installed("headrace.platforms")
    if device not in others:
        raise ConfigError(
            f"device.device = {device!r}: must be one of {[*built_in, *others]}",
            field="device.device",
        )
    platform: Platform = others[device].load()()
    return platform


def _cuda_platform() -> Platform:
    platform = detect()
    if platform.device != "cuda":
        raise DeviceError(
            "device.device = 'cuda': torch sees no GPU; `headrace collect-env` shows its build and "
            "the driver"
        )
    return platform


def _sim_platform() -> Platform:
    try:
        from headrace_engine.sim.platform import SimPlatform
    except ImportError as error:
        raise _missing(error) from error
    return SimPlatform()


class FrontEnd(NamedTuple):
    """What an engine is made of on the side that has the text."""

    client: CoreClient
    """Not yet started: whoever takes it starts it."""
    intake: Intake
    config: EngineConfig
    info: ModelInfo


class TemplateSettings(NamedTuple):
    """How chats are rendered."""

    chat_template: str | None = None
    content_format: str = "auto"
    trust_request_chat_template: bool = False


@contextmanager
def starting(*, whole_process: bool = False) -> Iterator[StartupTimeline]:
    """The time of a start, with the garbage collector off meanwhile.

    Args:
        whole_process: this process starts for nothing else: the timeline begins with the process,
            and the collector will never look at what the start made.
    """
    try:
        from headrace_engine.startup import StartupTimeline, collector_paused
    except ImportError as error:
        raise _missing(error) from error
    with collector_paused(freeze=whole_process):
        yield StartupTimeline.of_process() if whole_process else StartupTimeline()


def connect(
    config: EngineConfig,
    templates: TemplateSettings | None = None,
    timeline: StartupTimeline | None = None,
) -> Engine:
    """Start an engine and return the client that a server talks to.

    Args:
        timeline: of the start so far (:func:`starting`); None: it begins here.

    Raises:
        HeadraceError: whatever kept it from starting.
    """
    if timeline is None:
        with starting() as begun:
            return connect(config, templates, begun)
    front = front_end(config, templates, timeline)
    from headrace_engine.engine import Engine

    return Engine(front.client, front.intake, front.config)


def front_end(
    config: EngineConfig, templates: TemplateSettings | None, timeline: StartupTimeline
) -> FrontEnd:
    """Resolve the checkpoint, read its tokenizer, and prepare a client of a core yet to be built."""
    with timeline.phase("resolve model"):
        resolved = resolve_engine(config)
        if not config.engine_process:
            _read_ahead(resolved)
    with timeline.phase("import front end"):
        try:
            from headrace_engine.intake.intake import Intake
            from headrace_engine.structured.backend_loading import check_backend
        except ImportError as error:
            raise _missing(error) from error
    templates = templates or TemplateSettings()
    platform = resolved.platform
    with timeline.phase("read tokenizer"):
        tokenizer = read_tokenizer(resolved)
    model = served_model(resolved, tokenizer, templates.chat_template)
    intake = Intake(
        tokenizer,
        model,
        chat_template=templates.chat_template,
        content_format=templates.content_format,
        trust_request_chat_template=templates.trust_request_chat_template,
        structured_outputs=config.structured_outputs,
        processors=logits_processors(config, timeline),
        reasoning_parser=reasoning_parser(config.structured_outputs),
        check_params=platform.check_params if isinstance(platform, BringsWorker) else None,
    )
    check_backend(config.structured_outputs)
    client = core_client(config, resolved, timeline, intake.vocabulary)
    return FrontEnd(client, intake, resolved.config, resolved.info)


def logits_processors(
    config: EngineConfig, timeline: StartupTimeline
) -> tuple[type[LogitsProcessor], ...]:
    """Classes of the processors that the engine runs; () costs nothing."""
    wanted = config.model.logits_processors
    if not wanted and not plugins.installed("headrace.logits_processors"):
        return ()
    with timeline.phase("import logits processors"):
        return load_processors(wanted)


def reasoning_parser(config: StructuredOutputsConfig) -> type[ReasoningParser] | None:
    """The class that knows where the model's reasoning begins and ends; None: no reasoning.

    Raises:
        PluginError: there is no such parser.
        MissingDependency: it is in a file, which the server's package reads.
    """
    name, file = config.reasoning_parser, config.reasoning_parser_plugin
    if not name:
        return None
    if not file:
        found: type[ReasoningParser] = plugins.load("headrace.reasoning_parsers", name)
        return found
    try:
        from headrace_server.parsers import load_parsers
        from headrace_server.settings import ServerSettings
    except ImportError as error:
        raise _missing(error) from error
    named: dict[str, Any] = {"reasoning_parser": name, "reasoning_parser_plugin": file}
    return load_parsers(ServerSettings(**named)).reasoning


def core_client(
    config: EngineConfig,
    resolved: Resolved,
    timeline: StartupTimeline,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> CoreClient:
    """The way to a core: a thread of this process, or a process of its own, which reads the
    vocabulary itself."""
    if config.engine_process:
        from headrace_engine.clients.process import ProcessClient

        return ProcessClient(CORE_FACTORY, _portable(config), timeline)
    from headrace_engine.clients.inproc import InprocClient

    return InprocClient(
        lambda started: build_resolved_core(resolved, started, vocabulary), timeline
    )


def _portable(config: EngineConfig) -> EngineConfig:
    """The configuration with names in place of classes, as another process can read it."""
    names = tuple(map(processor_name, config.model.logits_processors))
    return dataclasses.replace(
        config, model=dataclasses.replace(config.model, logits_processors=names)
    )


def read_tokenizer(resolved: Resolved) -> Tokenizer | None:
    """The tokenizer plug-in's reading of the checkpoint's (or the named) folder."""
    model = resolved.config.model
    if model.skip_tokenizer_init:
        return None
    name = "hf" if model.tokenizer_mode == "auto" else model.tokenizer_mode
    folder = resolved.info.path
    if model.tokenizer is not None:
        from headrace_models.source import fetch

        folder = fetch(model.tokenizer, revision=None, token=model.hf_token)
    factory: TokenizerFactory = plugins.load("headrace.tokenizers", name)
    return factory(folder)


def served_model(
    resolved: Resolved, tokenizer: Tokenizer | None, chat_template: str | None
) -> ServedModel:
    """The facts that front ends show and check against."""
    config, info = resolved.config, resolved.info
    template = chat_template or (tokenizer.chat_template if tokenizer is not None else None)
    return ServedModel(
        name=config.model.served_model_name[0],
        names=config.model.served_model_name,
        root=info.name,
        architecture=info.architecture,
        max_model_len=info.max_model_len,
        vocab_size=info.vocab_size,
        max_logprobs=config.model.max_logprobs,
        eos_token_ids=info.eos_token_ids,
        tasks=info.tasks,
        has_tokenizer=tokenizer is not None,
        has_chat_template=template is not None,
        default_sampling_params=default_sampling_params(info.generation_config),
        priority_scheduling=config.scheduler.policy == "priority",
        prompt_embeds=config.model.enable_prompt_embeds,
        hidden_size=hidden_size(info) if config.model.enable_prompt_embeds else 0,
        dtype=info.dtype,
        logprobs_mode=config.model.logprobs_mode,
        tokenizer_info=tokenizer_info(info),
        special_tokens=special_tokens(tokenizer) if tokenizer is not None else (),
    )


def special_tokens(tokenizer: Tokenizer) -> tuple[str, ...]:
    """Texts of the tokens that ``skip_special_tokens`` drops."""
    return tuple(sorted({tokenizer.decode([i]) for i in tokenizer.special_token_ids} - {""}))


def hidden_size(info: ModelInfo) -> int:
    """Numbers of one input embedding.

    Raises:
        ConfigError: the checkpoint's config does not say.
    """
    for name in HIDDEN_SIZES:
        size = info.config.get(name)
        if isinstance(size, int) and size > 0:
            return size
    raise ConfigError(
        f"model.enable_prompt_embeds = True: must be False for {info.architecture}, whose "
        f"config.json has none of {list(HIDDEN_SIZES)}",
        field="model.enable_prompt_embeds",
    )


def tokenizer_info(info: ModelInfo) -> dict[str, Any]:
    """The checkpoint's tokenizer_config.json; the class is there even if the file is not."""
    found = {"tokenizer_class": "PreTrainedTokenizerFast"}
    path = info.path / "tokenizer_config.json"
    if not path.is_file():
        return found
    content = json.loads(path.read_text(encoding="utf-8"))
    return {**found, **content} if isinstance(content, dict) else found


def build_core(config: EngineConfig, timeline: StartupTimeline) -> EngineCore:
    """Build the engine's core from a configuration alone: the entry point of an engine process."""
    from headrace_engine.startup import collector_paused

    with collector_paused(freeze=True):
        with timeline.phase("resolve model"):
            resolved = resolve_engine(config)
            _read_ahead(resolved)
        return build_resolved_core(resolved, timeline)


def build_resolved_core(
    resolved: Resolved,
    timeline: StartupTimeline,
    vocabulary: Callable[[], Vocabulary] | None = None,
) -> EngineCore:
    """Build the engine's core here: workers started, model loaded, cache allocated.

    Args:
        vocabulary: of structured output; None: it is read from the checkpoint when it is needed.
    """
    failpoints.warn()
    brings_worker = isinstance(resolved.platform, BringsWorker)
    if not brings_worker:
        with timeline.phase("import torch"):
            import torch  # noqa: F401 - timed here, so that no other phase hides it

            import headrace_engine.execution.capture
            import headrace_engine.execution.worker  # noqa: F401 - likewise
    with timeline.phase("import core"):
        from headrace_engine.core import EngineCore
        from headrace_engine.structured.backend_loading import backend_order
        from headrace_engine.structured.store import GrammarStore
    config = resolved.config
    structured = config.structured_outputs
    grammars = GrammarStore(
        vocabulary or (lambda: grammar_vocabulary(resolved)), structured.cache_bytes
    )
    if structured.prepare_at_start:
        with timeline.phase("prepare grammars"):
            grammars.prepare(next(backend_order(structured, fallback=True)))
    executor_class = plugins.load(
        "headrace.executors", config.parallel.distributed_executor_backend
    )
    make_worker = (
        platforms_worker(resolved)
        if brings_worker
        else worker_factory(resolved, timeline, grammars)
    )
    return EngineCore.build(
        config,
        max_model_len=resolved.info.max_model_len,
        executor=executor_class(make_worker),
        timeline=timeline,
        fit_context=resolved.fit_context,
        grammars=grammars,
    )


def grammar_vocabulary(resolved: Resolved) -> Vocabulary:
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


def platforms_worker(resolved: Resolved) -> WorkerFactory:
    """Makes the worker of a platform that brings its own."""
    platform = resolved.platform
    assert isinstance(platform, BringsWorker)
    return lambda: platform.make_worker(resolved.config, resolved.info)


def worker_factory(
    resolved: Resolved, timeline: StartupTimeline, grammars: GrammarStore | None = None
) -> Callable[[], ModelWorker]:
    """Makes the worker of the resolved model, which loads it when asked to.

    Raises:
        ConfigError: settings of the simulated device, and another device.
    """
    from headrace_engine.execution.capture import Capture
    from headrace_engine.execution.worker import ModelWorker

    config, info, platform, _ = resolved
    if config.sim != SimConfig():
        raise ConfigError(
            f"sim = {config.sim!r}: has no effect on device {platform.device!r}; use --device sim",
            field="sim",
        )
    tokens, seqs = config.scheduler.max_num_batched_tokens, config.scheduler.max_num_seqs
    assert tokens is not None
    assert seqs is not None
    sizes = capture_sizes(
        config.graph.cudagraph_capture_sizes,
        config.graph.max_cudagraph_capture_size,
        max_num_batched_tokens=tokens,
    )

    threads = cpu_threads(resolved)
    kv_scales = kv_scale_constants(config.cache, os.environ)
    processors = logits_processors(config, timeline)
    make_processors = None
    if processors:
        from headrace_engine.sampling.processors import make_processors as make

        make_processors = functools.partial(make, processors, config)

    def make_worker() -> ModelWorker:
        ops = choose_ops(resolved, timeline, threads)
        return ModelWorker(
            lambda: build_model(resolved, ops, timeline),
            ops=ops,
            device=platform.device,
            dtype=info.dtype,
            vocab_size=info.vocab_size,
            max_model_len=info.max_model_len,
            max_num_batched_tokens=tokens,
            max_num_seqs=seqs,
            logprobs_mode=config.model.logprobs_mode,
            seed=config.model.seed,
            num_threads=threads.num_threads,
            cores=threads.cores,
            cache_ahead_bytes=config.cache.kv_cache_ahead_bytes,
            kv_scales=kv_scales,
            grammars=grammars,
            make_processors=make_processors,
            prompt_embeds=config.model.enable_prompt_embeds,
            profiler=config.profiler,
            capture=Capture(
                lambda: ops.step_graph, sizes, enforce_eager=config.graph.enforce_eager
            ),
        )

    return make_worker


def kv_scale_constants(cache: CacheConfig, environ: Mapping[str, str]) -> ScaleConstants | None:
    """What the largest measured keys and values are stored as; None: no scales are measured.

    Raises:
        ConfigError: an environment variable is out of range.
    """
    if not cache.calculate_kv_scales:
        return None
    return scale_constants(CACHE_DTYPES[cache.kv_cache_dtype], environ)


def cpu_threads(resolved: Resolved) -> CpuThreads:
    """How many threads compute on the CPU, and on which cores.

    Raises:
        ConfigError: more threads, or other cores, than this process may use; cores for a device
            that is not the CPU.
    """
    import torch

    device, platform = resolved.config.device, resolved.platform
    if device.cpu_bind != "none" and platform.device != "cpu":
        raise ConfigError(
            f"device.cpu_bind = {device.cpu_bind!r}: must be 'none' on device {platform.device!r}, "
            "whose steps are not computed by CPU threads",
            field="device.cpu_bind",
        )
    threads = plan_threads(device.num_threads, device.cpu_bind, default=torch.get_num_threads())
    if threads.cores:
        logger.info("cpu_bind: CPU threads on cores %s", format_cores(threads.cores))
    return threads


def choose_ops(resolved: Resolved, timeline: StartupTimeline, threads: CpuThreads) -> OpTable:
    """The best installed implementation of every op, for this device and dtype."""
    config, info, platform, _ = resolved
    need = KernelNeed(platform.device, info.dtype, threads.num_threads, threads.cores)
    with timeline.phase("bind kernels"):
        ops = bind_ops(need, choose=config.device.kernels)
    if threads.cores and "cpu" not in ops.providers.values():
        raise ConfigError(
            f"device.cpu_bind = {config.device.cpu_bind!r}: must be 'none' without the native CPU "
            "kernels: torch's threads cannot be bound one by one (`headrace collect-env` says why "
            "the native ones are not used)",
            field="device.cpu_bind",
        )
    if platform.device == "cpu" and not ops.row_invariant:
        logger.warning(
            "these kernels do not promise that outputs are independent of batching; "
            "`headrace collect-env` says why the native ones are not used"
        )
    return ops


def build_model(resolved: Resolved, ops: OpTable, timeline: StartupTimeline) -> CausalLM:
    """Choose quantization and attention, build the model and read its weights."""
    with timeline.phase("import models"):
        from headrace.progress import progress_bars
        from headrace_core.parallel import SingleProcess
        from headrace_models.loader import load_model
        from headrace_models.quantization import quant_method

    config, info, platform, _ = resolved
    assert config.cache.block_size is not None
    context = BuildContext(
        config=info.config,
        dtype=info.dtype,
        device=platform.device,
        ops=ops,
        quant=quant_method(info, config.model.quantization, ops, device=platform.device),
        communicator=SingleProcess(),
        attention=attention_chooser(config, platform, ops),
        block_size=config.cache.block_size,
        kv_cache_dtype=config.cache.kv_cache_dtype,
        max_model_len=info.max_model_len,
    )
    with (
        progress_bars(config.load.use_tqdm_on_load) as progress,
        timeline.phase("read and pack weights"),
    ):
        return load_model(
            info, context, load=config.load, seed=config.model.seed, progress=progress
        )


def _read_ahead(resolved: Resolved) -> None:
    """Have the weights read from disk while torch is imported."""
    from headrace_models.read_ahead import read_ahead

    if isinstance(resolved.platform, BringsWorker):
        return
    if resolved.config.load.load_format != "dummy" and resolved.platform.device == "cpu":
        available = resolved.platform.available_memory()
        read_ahead(resolved.info.path, weight_bytes=resolved.info.weight_bytes, available=available)


def attention_chooser(
    config: EngineConfig, platform: Platform, ops: OpTable
) -> Callable[[AttentionNeed], AttentionBackend]:
    """A function from a layer's need to a backend; equal needs and classes share one object."""
    backends: dict[type[AttentionBackend], AttentionBackend] = {}

    @functools.cache
    def choose(need: AttentionNeed) -> AttentionBackend:
        backend = choose_backend(
            need, wanted=config.attention.backend, preferred=platform.attention_order
        )
        return backends.setdefault(backend, backend(ops))

    return choose


def default_sampling_params(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    """What a checkpoint's generation config says about sampling, in our fields' names."""
    if generation_config.get("do_sample") is False:
        kept = {
            k: v
            for k, v in generation_config.items()
            if k in ("max_new_tokens", "repetition_penalty")
        }
        return {"temperature": 0.0} | _renamed(kept)
    return _renamed(generation_config)


def _renamed(generation_config: Mapping[str, Any]) -> dict[str, Any]:
    return {
        field: generation_config[key]
        for key, field in SAMPLING_DEFAULTS.items()
        if generation_config.get(key) is not None
    }


def _missing(error: ImportError) -> MissingDependency:
    return MissingDependency(
        error.name or "headrace-models",
        needed_for="running a model",
        install="pip install 'headrace[all]'",
    )
