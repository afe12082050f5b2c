"""KV transfer: the connector that a configuration names, and the name of what its blocks depend on."""

from __future__ import annotations

import dataclasses
import importlib
import json
import logging
import secrets
from collections.abc import Iterator
from functools import partial
from hashlib import blake2b, sha256
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.kv import KVConnector
from headrace_engine.kv_transfer.settings import BY_LAYER, FIELD
from headrace_engine.speculation.config import HEADS, WITHIN

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_engine.config import EngineConfig
    from headrace_engine.worker.settings import DividesBlocks

logger = logging.getLogger(__name__)

GROUP = "headrace.kv_connectors"
WEIGHT_FILES = (".safetensors", ".bin", ".pt", ".pth", ".gguf")
SAMPLES, SAMPLE_BYTES = 256, 4096
"""Pieces that are read of each file of weights, evenly apart."""


def kv_connector(config: EngineConfig, rank: int = 0) -> KVConnector | None:
    """The connector of checked settings; None: there is no transfer. It is given them with what it may have
    to know of the engine: ``rank``, ``num_ranks``, ``num_stages`` and ``block_size``.

    Args:
        rank: whose connector it is.

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
    if rank == 0:
        engine_id = settings.get("engine_id", "")
        logger.info("KV transfer: %s %s by %s", settings["kv_role"], engine_id, name)
    of_engine = {
        "rank": rank,
        "num_ranks": config.parallel.num_ranks,
        "num_stages": config.parallel.pipeline_parallel_size,
        "block_size": config.cache.block_size,
    }
    return found({**settings, **of_engine})


def with_engine_id(resolved: ResolvedConfig) -> ResolvedConfig:
    """The same, with an ``engine_id`` that all ranks know, where there are several and connectors."""
    config = resolved.config
    settings = config.cache.kv_transfer_config
    if not settings or "engine_id" in settings or config.parallel.num_ranks == 1:
        return resolved
    named = {**settings, "engine_id": secrets.token_hex(16)}
    cache = dataclasses.replace(config.cache, kv_transfer_config=named)
    return resolved._replace(config=dataclasses.replace(config, cache=cache))


def block_divider(config: EngineConfig, rank: int) -> DividesBlocks:
    """Says which parts of blocks a rank has."""
    from headrace_engine.kv_transfer.parts import PARTS, Division, LayerParts, parts_of_groups

    settings, parallel = config.cache.kv_transfer_config, config.parallel
    of_stages = LayerParts.STAGE if parallel.pipeline_parallel_size > 1 else LayerParts.ALL
    division = Division(
        settings.get(PARTS),
        rank % parallel.tensor_parallel_size,
        parallel.tensor_parallel_size,
        LayerParts.EACH if settings.get(BY_LAYER) else of_stages,
        _head_name(config) if settings else None,
    )
    return partial(parts_of_groups, division=division)


def _head_name(config: EngineConfig) -> str | None:
    """Tells heads apart whose caches belong to blocks; None: nothing, or nothing of the kind, guesses."""
    speculative = config.speculative
    if speculative.method in WITHIN:  # the model's weights tell it
        return speculative.method
    if speculative.method not in HEADS:
        return None
    folder = Path(str(speculative.model)).expanduser()
    named: list[Any] = [speculative.model, speculative.revision]
    facts = [list(one) for one in _weights(folder)] if folder.exists() else named
    facts = [speculative.method, speculative.quantization, *facts]
    return sha256(json.dumps(facts).encode()).hexdigest()


def check_ranks_transfer(config: EngineConfig) -> None:
    """Refuse what has not been combined with KV transfer of several ranks yet.

    Raises:
        ConfigError: naming the setting.
    """
    parallel = config.parallel
    if not config.cache.kv_transfer_config:
        return
    for name, value, why in (
        ("prefill_context_parallel_size", parallel.prefill_context_parallel_size > 1 and "above 1",
         "not tried together"),
        ("decode_context_parallel_size", parallel.decode_context_parallel_size > 1 and "above 1",
         "ranks have other tokens of a block"),
        ("nnodes", parallel.nnodes > 1 and "above 1", "not tried together"),
        ("distributed_executor_backend", parallel.executor != "mp" and repr(parallel.executor),
         "not tried together"),
    ):  # fmt: skip
        if value:
            raise ConfigError(
                f"{FIELD}: must be left out with {name} {value} while {parallel.describe_ranks()}: {why}",
                field=FIELD,
            )


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
