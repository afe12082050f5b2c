"""KV transfer: the connector that a configuration names, and the name of what its blocks depend on."""

from __future__ import annotations

import importlib
import json
import logging
from collections.abc import Iterator
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_core import plugins
from headrace_core.errors import PluginError
from headrace_core.kv import KVConnector
from headrace_engine.kv_transfer.settings import FIELD

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_engine.config import EngineConfig

logger = logging.getLogger(__name__)

GROUP = "headrace.kv_connectors"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Pieces that are read of each file of weights, evenly apart."""


def kv_connector(config: EngineConfig) -> KVConnector | None:
    """The connector of checked settings; None: there is no transfer.

    Raises:
        PluginNotFound, PluginLoadError: it is not installed, or cannot be imported.
        PluginError: a module that is named has no such class.
        ConfigError: the connector refuses the settings.
    """
    settings = config.cache.kv_transfer_config
    if not settings:
        return None
    name, path = settings["kv_connector"], settings.get("kv_connector_module_path")
    found = plugins.load(GROUP, name) if path is None else _from_module(path, name)
    if not isinstance(found, type) or not issubclass(found, KVConnector):
        raise PluginError(f"{FIELD}.kv_connector = {name!r}: must be a subclass of KVConnector")
    logger.info(
        "KV transfer: %s %s by %s", settings["kv_role"], settings.get("engine_id", ""), name
    )
    return found(settings)


def _from_module(path: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{FIELD}.kv_connector_module_path = {path!r}: must be a Python module that has the class "
            f"{name}: {error}"
        ) from error


def model_name(resolved: ResolvedConfig) -> str:
    """Hex digits that are equal for two engines only if they compute the same keys and values: of the model's
    configuration, its weights, and the settings that change either. How the cache is laid out is for its
    worker to say.

    Weights are told apart by size and by :data:`SAMPLES` pieces of each file, so that a large checkpoint is
    not read twice at a start.
    """
    config, info = resolved.config, resolved.info
    model = config.model
    facts = [
        dict(info.whole_config), info.architecture, info.source, info.dtype, config.load.load_format,
        model.seed if config.load.load_format == "dummy" else 0, model.quantization,
        dict(model.quantization_overrides), model.quantization_activations,
        config.cache.kv_cache_dtype, config.cache.calculate_kv_scales,
        [list(one) for one in _weights(info.path)],
    ]  # fmt: skip
    return sha256(json.dumps(facts, sort_keys=True, default=repr).encode()).hexdigest()


def _weights(path: Path) -> Iterator[tuple[str, int, str]]:
    """Name, size and digest of the samples of each file."""
    files = [path] if path.is_file() else sorted(path.iterdir())
    for file in files:
        if file.suffix not in WEIGHT_FILES or not file.is_file():
            continue
        size, digest = file.stat().st_size, blake2b(digest_size=32)
        with open(file, "rb") as opened:
            for start in sorted(
                {size * i // SAMPLES for i in range(SAMPLES)} | {max(0, size - SAMPLE_BYTES)}
            ):
                opened.seek(start)
                digest.update(opened.read(SAMPLE_BYTES))
        yield file.name, size, digest.hexdigest()
