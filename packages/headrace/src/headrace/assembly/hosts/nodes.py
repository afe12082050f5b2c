"""Several hosts with ranks of one engine (``--nnodes``): what each must know, and what they must agree on."""

from __future__ import annotations

import dataclasses
import hashlib
import json
import os
from collections.abc import Mapping
from typing import TYPE_CHECKING, Any

from headrace.assembly.parallel.ranks import FOLLOWER_FACTORY
from headrace.assembly.resolved import ResolvedConfig, resolve_engine
from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_engine.config import EngineConfig
    from headrace_engine.multiproc.nodes.plan import NodePlan

OF_A_HOST = frozenset(
    {
        "model.model", "model.tokenizer", "model.served_model_name", "model.hf_token",
        "model.logits_processors",
        "load.download_dir", "load.use_tqdm_on_load",
        "cache.gpu_memory_utilization", "cache.max_memory_bytes", "cache.kv_cache_memory_bytes",
        "cache.kv_cache_ahead_bytes", "cache.num_gpu_blocks_override",
        "device.num_threads", "device.cpu_bind",
        "parallel.node_rank", "parallel.node_secret_file", "parallel.master_addr", "parallel.master_port",
    }
)  # fmt: skip
"""Settings that may differ: of paths, memory and cores of a host, or used on host 0 only."""
OF_ALL = ("model", "cache", "scheduler", "parallel", "device", "load", "attention", "graph", "lora")
"""Sections whose other settings must be the same."""


def node_plan(resolved: ResolvedConfig) -> NodePlan | None:
    """What this host must know of the others; None: there are none.

    Raises:
        ConfigError: there is no secret, though others could reach the address.
    """
    parallel = resolved.config.parallel
    if parallel.nnodes == 1:
        return None
    from headrace_engine.multiproc.nodes.plan import NodePlan
    from headrace_engine.multiproc.nodes.secret import read_secret

    secret = read_secret(parallel.node_secret_file, parallel.master_addr)
    return NodePlan(
        parallel.nnodes, parallel.master_addr, parallel.master_port, secret, shared_settings(resolved),
        parallel.node_rank,
    )  # fmt: skip


def shared_settings(
    resolved: ResolvedConfig, environ: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """What must be the same on all hosts: resolved settings as text, by name, and the checkpoint's facts."""
    import headrace_core
    from headrace_models.stages.division import PARTITION

    config, info = resolved.config, resolved.info
    found = {
        f"{section}.{field.name}": _text(getattr(getattr(config, section), field.name))
        for section in OF_ALL
        for field in dataclasses.fields(getattr(config, section))
        if f"{section}.{field.name}" not in OF_A_HOST
    }
    if config.parallel.pipeline_parallel_size > 1:
        found[PARTITION] = environ.get(PARTITION, "unset")
    of_model = json.dumps(info.whole_config, sort_keys=True, default=str).encode()
    return {
        **found,
        "config.json": f"sha256 {hashlib.sha256(of_model).hexdigest()[:16]}",
        "checkpoint's weights": f"{info.weight_bytes} bytes",
        "architecture": info.architecture,
        "dtype": info.dtype,
        "max_model_len": str(info.max_model_len),
        "headrace-core": headrace_core.__version__,
    }


def _text(value: Any) -> str:
    """A setting for people, equal if and only if the value is; long ones as a digest."""
    if dataclasses.is_dataclass(value) and not isinstance(value, type):
        value = dataclasses.asdict(value)
    text = json.dumps(value, sort_keys=True, default=str)
    if len(text) <= 200:
        return text
    return f"sha256 {hashlib.sha256(text.encode()).hexdigest()[:16]}"


def serve_ranks(config: EngineConfig) -> int:
    """Run this host's ranks until the engine ends; returns the process's exit status.

    Raises:
        ConfigError: this is host 0, or its settings differ from that host's.
        HeadraceError: the checkpoint cannot be resolved, or the engine cannot be joined.
    """
    if config.parallel.node_rank == 0:
        raise ConfigError(
            "headless: must be given together with --nnodes above 1 and a --node-rank above 0: host 0 serves",
            field="headless",
        )
    from headrace_engine.multiproc.nodes.host import run_node

    resolved = resolve_engine(config)
    plan = node_plan(resolved)
    assert plan is not None
    return run_node(plan, FOLLOWER_FACTORY, config)


def check_leads(config: EngineConfig) -> None:
    """Refuse to build an engine on a host that only has ranks.

    Raises:
        ConfigError: as said.
    """
    node = config.parallel.node_rank
    if node:
        raise ConfigError(
            f"parallel.node_rank = {node}: must be 0 where requests are taken; this host runs `headrace "
            f"serve MODEL --headless --node-rank {node}` with the same settings",
            field="parallel.node_rank",
        )
