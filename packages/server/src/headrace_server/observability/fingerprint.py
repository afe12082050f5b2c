"""``system_fingerprint``: a name for everything but the request that decides an answer.

Equal requests with a seed, or greedy ones, have equal answers under equal fingerprints, where
``GET /v1/system/determinism`` says that answers do not depend on the batch. What the contract keeps out of
the answers is not part of it: the scheduler's limits, the size of the cache, chunks, captured steps, the
layout of processes.
"""

from __future__ import annotations

import hashlib
import json
import platform
from collections.abc import Iterable, Mapping, Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.engine import EngineClient
from headrace_server.settings import ServerSettings

_ENGINE: Mapping[str, tuple[str, ...]] = {
    "model": (
        "revision", "quantization", "tokenizer", "tokenizer_mode", "model_impl", "hf_overrides", "seed",
        "logprobs_mode", "logits_processors", "allow_control_tokens_in_messages", "generation_config",
        "override_generation_config",
    ),
    "cache": ("kv_cache_dtype", "calculate_kv_scales"),
    "parallel": (
        "tensor_parallel_size", "pipeline_parallel_size", "decode_context_parallel_size",
        "cp_kv_cache_interleave_size",
    ),
    "device": ("device", "num_threads", "kernels"),
    "load": ("load_format",),
    "attention": ("backend",),
    "structured_outputs": (
        "backend", "disable_any_whitespace", "disable_additional_properties", "enable_in_reasoning",
    ),
}  # fmt: skip
_SERVER = (
    "chat_template_content_format", "default_chat_template_kwargs", "tool_call_parser",
    "reasoning_parser", "exclude_tools_when_tool_choice_none",
)  # fmt: skip
_PACKAGES = ("torch", "triton", "tokenizers", "llguidance", "xgrammar")


class Fingerprint(NamedTuple):
    """The facts that decide the answers, and their name."""

    name: str
    """``fp_`` and 16 hexadecimal digits."""
    facts: Mapping[str, Any]
    """Plain data; the name is their digest."""


def fingerprint_of(
    engine: EngineClient, settings: ServerSettings, chat_template: str | None
) -> Fingerprint:
    """The fingerprint of a served model.

    Args:
        chat_template: text of the operator's.
    """
    model, given = engine.model, engine.settings
    facts: dict[str, Any] = {
        "headrace": installed_version(),
        "packages": {name: found for name in _PACKAGES if (found := _version(name))},
        "model": {
            "root": model.root, "architecture": model.architecture, "class": model.class_path,
            "dtype": model.dtype, "max_model_len": model.max_model_len,
            "default_sampling_params": dict(model.default_sampling_params),
        },
        "settings": {
            part: {name: values[name] for name in names if name in values}
            for part, names in _ENGINE.items()
            if (values := given.get(part))
        },
        "answers": {name: _plain(getattr(settings, name)) for name in _SERVER},
        "chat_template": None if chat_template is None else _digest(chat_template),
        "processor": {"machine": platform.machine(), "features": _digest(_processor_flags())},
        "accelerators": _accelerators(),
    }  # fmt: skip
    return Fingerprint("fp_" + _digest(json.dumps(facts, sort_keys=True, default=str)), facts)


def with_adapter(fingerprint: Fingerprint, path: str) -> Fingerprint:
    """The fingerprint of answers that are computed with an adapter.

    Args:
        path: the adapter's.
    """
    facts = {**fingerprint.facts, "adapter": path}
    return Fingerprint("fp_" + _digest(fingerprint.name + "\n" + path), facts)


FIRST_WEIGHTS = ("", "0")
"""Versions of weights that an engine has from its start, and a ``weights_version`` that is not known."""


def with_weights(fingerprint: Fingerprint, versions: Sequence[str]) -> Fingerprint:
    """The fingerprint of answers of weights that came after the start.

    Args:
        versions: ``weights_versions`` of the answer.
    """
    if all(version in FIRST_WEIGHTS for version in versions):
        return fingerprint
    facts = {**fingerprint.facts, "weights_versions": list(versions)}
    return Fingerprint("fp_" + _digest("\n".join([fingerprint.name, *versions])), facts)


def installed_version() -> str:
    """Version of ``headrace``; of this package if only it is installed."""
    return _version("headrace") or _version("headrace-server") or "unknown"


def _version(name: str) -> str | None:
    try:
        return version(name)
    except PackageNotFoundError:
        return None


def _digest(text: str) -> str:
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()[:16]


def _plain(value: Any) -> Any:
    return dict(value) if isinstance(value, Mapping) else value


def _processor_flags() -> str:
    """Instruction sets of the processor, which decide the kernels; empty where nobody tells."""
    for line in _lines(Path("/proc/cpuinfo")):
        name, _, value = line.partition(":")
        if name.strip() in ("flags", "Features"):
            return " ".join(sorted(value.split()))
    return ""


def _accelerators() -> list[str]:
    """Names of NVIDIA's devices as the driver tells them; [] without any."""
    found = []
    for file in sorted(Path("/proc/driver/nvidia/gpus").glob("*/information")):
        found += [
            line.partition(":")[2].strip() for line in _lines(file) if line.startswith("Model")
        ]
    return found


def _lines(file: Path) -> Iterable[str]:
    try:
        return file.read_text(errors="replace").splitlines()
    except OSError:
        return ()
