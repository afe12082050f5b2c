"""Checks the names in a configuration before the checkpoint is read and torch is imported."""

from __future__ import annotations

import os
from collections.abc import Mapping

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginNotFound
from headrace_core.kv import CACHE_DTYPES
from headrace_core.ops import check_op_names
from headrace_core.platform import BringsWorker, Platform
from headrace_engine.config import CacheConfig, EngineConfig, SimConfig
from headrace_engine.cores import plan_threads
from headrace_engine.execution.scale_constants import ScaleConstants, scale_constants
from headrace_engine.speculation.config import BY_MODEL

_LOAD_FORMATS = ("auto", "dummy")
"""Load formats that are not plug-ins."""


def check_named(
    config: EngineConfig, platform: Platform, environ: Mapping[str, str] = os.environ
) -> None:
    """Look for every plug-in, op and core that a configuration names; import none.

    Raises:
        PluginNotFound: a plug-in is not installed; lists the installed ones.
        ConfigError: an op or core does not exist, or a setting has no effect on this device.
    """
    plugins.find("headrace.schedulers", config.scheduler.scheduler_cls)
    plugins.find("headrace.executors", config.parallel.executor)
    _check_load_format(config.load.load_format.lower())
    model = config.model
    for name in (model.quantization, *model.quantization_overrides.values()):
        if name is not None:
            plugins.find("headrace.quantization", name)
    for name in (config.attention.backend, config.multimodal.mm_encoder_attn_backend):
        if name is not None:
            plugins.find("headrace.attention_backends", name)
    if config.speculative.method not in (None, *BY_MODEL):
        _check_proposer(str(config.speculative.method))
    _check_ec_transfer(config, platform)
    _check_kv_transfer(config, platform)
    if not isinstance(platform, BringsWorker):
        _check_kernels(config.device.kernels)
        _check_device(config, platform)
        kv_scale_constants(config.cache, environ)


def _check_ec_transfer(config: EngineConfig, platform: Platform) -> None:
    transfer, field = config.multimodal.ec_transfer_config, "multimodal.ec_transfer_config"
    if transfer and isinstance(platform, BringsWorker):
        raise ConfigError(
            f"{field} = {dict(transfer)!r:.200}: must be left out on this device, whose worker knows nothing "
            "of it",
            field=field,
        )
    if transfer and "ec_connector_module_path" not in transfer:
        plugins.find("headrace.ec_connectors", transfer["ec_connector"])


def _check_kv_transfer(config: EngineConfig, platform: Platform) -> None:
    transfer, field = config.cache.kv_transfer_config, "cache.kv_transfer_config"
    if transfer and isinstance(platform, BringsWorker):
        raise ConfigError(
            f"{field} = {dict(transfer)!r:.200}: must be left out on this device, whose worker knows nothing "
            "of it",
            field=field,
        )
    if transfer and "kv_connector_module_path" not in transfer:
        plugins.find("headrace.kv_connectors", transfer["kv_connector"])


def _check_proposer(name: str) -> None:
    try:
        plugins.find("headrace.draft_proposers", name)
    except PluginNotFound as error:
        raise PluginNotFound(
            f"speculative_config.method: {error}; besides: {', '.join(BY_MODEL)}"
        ) from None


def _check_load_format(name: str) -> None:
    if name in _LOAD_FORMATS:
        return
    try:
        plugins.find("headrace.weight_formats", name)
    except PluginNotFound as error:
        raise PluginNotFound(
            f"load.load_format: {error}; besides: {', '.join(_LOAD_FORMATS)}"
        ) from None


def _check_kernels(kernels: Mapping[str, str]) -> None:
    check_op_names(kernels, field="device.kernels")
    for provider in kernels.values():
        plugins.find("headrace.kernels", provider)


def _check_device(config: EngineConfig, platform: Platform) -> None:
    device = config.device
    if config.sim != SimConfig():
        raise ConfigError(
            f"sim = {config.sim!r}: has no effect on device {platform.device!r}; use --device sim",
            field="sim",
        )
    if platform.device == "cpu":
        plan_threads(device.num_threads, device.cpu_bind, default=1)
    elif device.cpu_bind != "none":
        raise ConfigError(
            f"device.cpu_bind = {device.cpu_bind!r}: must be 'none' on device {platform.device!r}, "
            "whose steps are not computed by CPU threads",
            field="device.cpu_bind",
        )


def kv_scale_constants(cache: CacheConfig, environ: Mapping[str, str]) -> ScaleConstants | None:
    """Numbers that the largest measured keys and values are stored as; None: no scales are measured.

    Raises:
        ConfigError: an environment variable is out of range.
    """
    if not cache.calculate_kv_scales:
        return None
    return scale_constants(CACHE_DTYPES[cache.kv_cache_dtype], environ)
