"""Support for transcription in the class that serves a checkpoint, with the reasons if there is none.

Only classes of foreign packages are looked at, which imports torch; built-in ones have no faults.
"""

from __future__ import annotations

import dataclasses
import importlib.util
import json
from collections.abc import Iterator, Mapping
from typing import Any

from headrace_core import plugins
from headrace_core.model import ModelInfo
from headrace_core.speech.diagnosis import comes_close, faults

TASK = "transcription"
MODELS, PROCESSORS = "headrace.models", "headrace.multimodal_processors"
AUDIO_LIBRARIES = ("soundfile", "av", "soxr")
INSTALL_AUDIO = "pip install 'headrace[audio]'"


def without_faults(info: ModelInfo) -> ModelInfo:
    """A checkpoint without the task of transcribing where its class, a plug-in's, is not fit for it.

    Raises:
        PluginLoadError: the class cannot be imported; the message holds the reason.
    """
    if not is_foreign(info) or TASK not in info.tasks or not _reasons_of_class(info):
        return info
    return dataclasses.replace(info, tasks=tuple(task for task in info.tasks if task != TASK))


def unmet_tasks(info: ModelInfo) -> dict[str, tuple[str, ...]]:
    """For :attr:`~headrace_core.served_model.ServedModel.unmet`: why a checkpoint has no transcription, a
    line for each reason; {} if it has, or if nobody seems to expect it."""
    if TASK in info.tasks:
        return {}
    reasons = list(_unregistered(info))
    if is_foreign(info):
        reasons += _reasons_of_class(info) if comes_close(model_class(info)) else []
    return {TASK: tuple(reasons)} if reasons else {}


def missing_libraries() -> tuple[str, ...]:
    """Missing libraries that a model that transcribes needs at start; a line for each."""
    return tuple(
        f"the library {library!r} is not installed: run {INSTALL_AUDIO}"
        for library in AUDIO_LIBRARIES
        if importlib.util.find_spec(library) is None
    )


def is_foreign(info: ModelInfo) -> bool:
    """True if another package than headrace's own brings the class."""
    return info.source.startswith("plugin:")


def model_class(info: ModelInfo) -> type:
    """The class that serves a checkpoint; imports torch.

    Raises:
        PluginError: it cannot be imported.
    """
    if info.source == "transformers" or _is_joined(info):
        from headrace_models.convert import model_class as built

        return built(info)
    plugin = serving_plugin(info)
    found: type = plugins.load(MODELS, info.architecture if plugin is None else plugin.name)
    return found


def _is_joined(info: ModelInfo) -> bool:
    """True if the class is made of a language model's and of one with towers."""
    from headrace_models.catalogue.multimodal import WRAPPERS

    return bool(info.processor) and info.source == "native" and info.architecture in WRAPPERS


def serving_plugin(info: ModelInfo) -> plugins.Plugin | None:
    """The plug-in whose class serves a checkpoint, or the language model in it."""
    from headrace_models.catalogue.multimodal import text_architecture

    return registered(text_architecture(info.architecture, info.whole_config or {}))


def registered(architecture: str) -> plugins.Plugin | None:
    """The plug-in whose class serves an architecture, under its name or made to pool."""
    from headrace_models.architectures import served_by

    known = plugins.installed(MODELS)
    name = served_by(architecture, known)
    return None if name is None else known[name]


def _reasons_of_class(info: ModelInfo) -> list[str]:
    reasons = faults(model_class(info))
    if not info.processor:
        reasons.append(
            f"no media processor is registered for {info.architecture}: add an entry of this name "
            f"to the group {PROCESSORS}"
        )
    return reasons


def _unregistered(info: ModelInfo) -> Iterator[str]:
    """The class is not the one that config.json names first: nothing registers that."""
    named = (info.whole_config or _config_of(info)).get("architectures")
    known = plugins.installed(MODELS)
    for name in named if isinstance(named, list) else []:
        if name == info.architecture:
            return
        if isinstance(name, str) and registered(name) is None:
            others = sorted({p.distribution for p in known.values() if not _is_native(p)})
            yield (
                f"config.json names the architecture {name!r} first, which no installed package "
                f"registers, so {info.architecture} is served: install the package, in the "
                f"environment of this process, whose entry point in {MODELS} has that name "
                f"(packages with models here: {', '.join(others) or 'none but headrace-models'})"
            )


def _config_of(info: ModelInfo) -> Mapping[str, Any]:
    path = info.path / "config.json"
    found: Mapping[str, Any] = json.loads(path.read_text(encoding="utf-8"))
    return found


def _is_native(plugin: plugins.Plugin) -> bool:
    return plugin.distribution.split(" ")[0] == "headrace-models"
