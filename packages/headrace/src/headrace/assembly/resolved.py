"""The model, the device and all settings resolved: :func:`resolve_engine`.

Reads JSON only: a mistake shows before torch is imported.
"""

from __future__ import annotations

import dataclasses
import logging
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import NamedTuple

from headrace import demo
from headrace.assembly.detection import detect
from headrace.assembly.drafts.head import with_head, with_verifier
from headrace.assembly.missing_packages import missing
from headrace.assembly.named import check_named
from headrace.assembly.parallel.experts import check_experts
from headrace.assembly.parallel.ranks import check_ranks
from headrace.assembly.resolution import resolve
from headrace.assembly.served import SAMPLING_DEFAULTS
from headrace.assembly.speech.transcription import without_faults
from headrace.assembly.transfer.encoder import check_ec_role
from headrace.environment import with_cpu_variables
from headrace.lora.of_checkpoints import with_own_adapters
from headrace.suggestions import near_names
from headrace_core import plugins
from headrace_core.errors import ConfigError, DeviceError, RequestError
from headrace_core.model import ModelInfo
from headrace_core.platform import BringsWorker, CpuPlatform, Platform
from headrace_core.sampling.params import SamplingParams
from headrace_engine.config import EngineConfig, ProfilerConfig

logger = logging.getLogger(__name__)


class ResolvedConfig(NamedTuple):
    """A configuration with nothing left to choose, and the checkpoint it is for."""

    config: EngineConfig
    info: ModelInfo
    platform: Platform
    fit_context: bool = False
    """``max_model_len = -1``: the context may be shortened to what fits into memory."""


def resolve_engine(config: EngineConfig) -> ResolvedConfig:
    """Find the checkpoint and fill in every ``auto``. Reads no weights.

    Raises:
        ConfigError, UnsupportedModel: a setting and the model do not fit.
        MissingDependency: a package of headrace that this needs is not installed.
    """
    try:
        from headrace_models.resolve import resolve as resolve_model
    except ImportError as error:
        raise missing(error) from error
    if config.model.model is None:
        names = config.model.served_model_name or (demo.NAME,)
        model = dataclasses.replace(config.model, model=str(demo.path()), served_model_name=names)
        config = dataclasses.replace(config, model=model)
    config = with_verifier(config)
    platform = choose_platform(config.device.device)
    config = with_cpu_variables(config, platform)
    check_named(config, platform)
    _check_overrides(config)
    _try_profiler_folder(config.profiler)
    info = without_faults(resolve_model(config.model, config.load, platform))
    _check_extensions(config, info)
    check_ec_role(config, info)
    check_ranks(config, info, platform)
    check_experts(config, info)
    _check_sampling_defaults(info)
    config = with_head(config, info)
    if not isinstance(config.model.hf_overrides, Mapping):  # what the function made
        model = dataclasses.replace(config.model, hf_overrides=info.whole_config)
        config = dataclasses.replace(config, model=model)
    if not isinstance(platform, BringsWorker):  # whose workers have no slots
        config = with_own_adapters(config, info)
        config.lora.check_used()
    fit_context = config.model.max_model_len == -1
    return ResolvedConfig(resolve(config, info, platform), info, platform, fit_context)


def warn_of_revision(resolved: ResolvedConfig) -> None:
    """Log that ``revision`` has no effect, if it is given with a local folder or file."""
    model = resolved.config.model
    if model.revision is not None and Path(model.model or "").expanduser().exists():
        logger.warning(
            "revision = %r: has no effect: %s is local; a revision needs a hub name",
            model.revision,
            model.model,
        )


def _check_extensions(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse a setting that only the other kind of model has, generating or pooling."""
    if config.model.pooler_config and info.runner != "pooling":
        raise ConfigError(
            f"model.pooler_config = {dict(config.model.pooler_config)!r}: must be left out for "
            f"{info.architecture}, which runs as a generator (runner {info.runner}); --runner "
            "pooling makes it pool",
            field="model.pooler_config",
        )
    for name in ("logits_processors", "enable_prompt_embeds"):
        value = getattr(config.model, name)
        if value and "generate" not in info.tasks:
            raise ConfigError(
                f"model.{name} = {value!r}: must be off for {info.architecture}, which generates "
                "no text",
                field=f"model.{name}",
            )
    method = config.speculative.method
    if method is not None and "generate" not in info.tasks:
        raise ConfigError(
            f"speculative_config.method = {method!r}: must be left out for {info.architecture}, which "
            "generates no text",
            field="speculative_config.method",
        )


def _try_profiler_folder(config: ProfilerConfig) -> None:
    """Make the folder of traces and try it: when a recording ends is too late.

    Raises:
        ConfigError: nothing can be written there.
    """
    if config.profiler != "torch":
        return
    folder = Path(config.torch_profiler_dir)
    try:
        folder.mkdir(parents=True, exist_ok=True)
        tempfile.TemporaryFile(dir=folder).close()
    except OSError as error:
        raise ConfigError(
            f"profiler_config.torch_profiler_dir = {str(folder)!r}: cannot be written into: "
            f"{error.strerror}",
            field="profiler_config.torch_profiler_dir",
        ) from error


GENERATION_KEYS = frozenset(
    {
        *SAMPLING_DEFAULTS, "do_sample", "eos_token_id", "decoder_start_token_id", "alignment_heads",
        "begin_suppress_tokens", "is_multilingual", "lang_to_id", "max_initial_timestamp_index",
        "no_timestamps_token_id", "prev_sot_token_id", "suppress_tokens", "task_to_id",
    }
)  # fmt: skip
"""Keys of a generation config that are read."""


def _check_overrides(config: EngineConfig) -> None:
    """Whoever overrides a key means it: one that nobody reads is refused.

    Raises:
        ConfigError: naming the key, and the nearest that is read.
    """
    for key in config.model.override_generation_config:
        if key not in GENERATION_KEYS:
            near = near_names(str(key), GENERATION_KEYS, 1)
            hint = f"did you mean {near[0]}? " if near else ""
            raise ConfigError(
                f"model.override_generation_config.{key}: unknown key; {hint}keys are "
                f"{', '.join(sorted(GENERATION_KEYS))}",
                field="model.override_generation_config",
            )


def _check_sampling_defaults(info: ModelInfo) -> None:
    """Every request would inherit them, and be refused."""
    from headrace.assembly.served import default_sampling_params

    try:
        SamplingParams(**default_sampling_params(info.generation_config)).validate()
    except RequestError as error:
        raise ConfigError(
            f"model.generation_config: {error} (override_generation_config changes it)",
            field="model.generation_config",
        ) from error


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
        raise missing(error) from error
    return SimPlatform()
