"""Inspection of a model without loading it: facts, interfaces, routes, and what is missing."""

from __future__ import annotations

import dataclasses
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any, NamedTuple

from headrace.assembly import model_description
from headrace.assembly.footprint import Footprint, UnknownFootprint, footprint
from headrace.assembly.interfaces import interfaces_of
from headrace.assembly.media import media_processor
from headrace.assembly.plugged import read_tokenizer
from headrace.assembly.resolved import resolve_engine, warn_of_revision
from headrace.assembly.served import served_model
from headrace.assembly.speech.transcription import TASK, missing_libraries, model_class, registered
from headrace_core import plugins
from headrace_core.model import ModelInfo
from headrace_core.multimodal import media_limit
from headrace_core.served_model import ServedModel
from headrace_engine.config import EngineConfig


class Inspection(NamedTuple):
    """A model as it would be served."""

    info: ModelInfo
    model: ServedModel
    interfaces: tuple[str, ...]
    routes: tuple[str, ...]
    memory: Footprint | UnknownFootprint | None = None
    quantization: str = "none"
    """Method that the weights are loaded with."""

    def facts(self) -> dict[str, Any]:
        """Plain data."""
        found = model_description.facts(self.model, routes=self.routes, interfaces=self.interfaces)
        found["quantization"] = self.quantization
        if blocks := self.blocks():
            found["block_types"] = blocks
        return found if self.memory is None else {**found, "memory": self.memory.facts()}

    def blocks(self) -> dict[str, int]:
        """Type of a GGUF file's blocks -> tensors of that type; {} of other checkpoints."""
        block = self.info.config.get("quantization_config") or {}
        return dict(Counter(block["types"].values())) if self.quantization == "gguf" else {}

    def __str__(self) -> str:
        text = model_description.describe(
            self.model, routes=self.routes, interfaces=self.interfaces
        )
        blocks = ", ".join(f"{kind}: {count}" for kind, count in self.blocks().items())
        text += f"\n{'quantization':<17}{self.quantization}" + (f" ({blocks})" if blocks else "")
        return text if self.memory is None else f"{text}\n{self.memory}"


def inspect_model(config: EngineConfig, *, memory: bool = False) -> Inspection:
    """Look at a model. Imports its class, and with it torch; reads no weights.

    Args:
        memory: also say what it takes, for which it is built.

    Raises:
        HeadraceError: whatever would keep an engine from starting before weights are read.
    """
    from headrace_models.quantization import quant_method_name

    resolved = resolve_engine(config)
    warn_of_revision(resolved)
    info = resolved.info
    processor, limits = media_processor(info), resolved.config.model.limit_mm_per_prompt
    possible = processor.modalities() if processor is not None else ()
    embeds = resolved.config.model.enable_mm_embeds
    modalities = tuple(one for one in possible if embeds or media_limit(limits, one))
    model = served_model(resolved, read_tokenizer(resolved), None, modalities)
    if TASK in info.tasks and (lacking := missing_libraries()):
        model = dataclasses.replace(model, unmet={**model.unmet, TASK: lacking})
    found = footprint(resolved) if memory else None
    method = quant_method_name(info, resolved.config.model.quantization)
    interfaces = interfaces_of(model_class(info))
    return Inspection(info, model, interfaces, routes_of(model), found, method)


def routes_of(model: ServedModel) -> tuple[str, ...]:
    """Paths that a server with default settings has for a model's tasks; () without a server."""
    try:
        from headrace_server.settings import ServerSettings
    except ImportError:
        return ()
    settings, engine = ServerSettings(), _ModelOnly(model)
    paths: set[str] = set()
    for plugin in plugins.installed("headrace.routers").values():
        router = plugin.load()
        if router.tasks and set(router.tasks) & set(model.tasks):
            paths |= {route.path for route in router.build(engine, settings).routes}
    return tuple(sorted(paths))


def start_block(model: ServedModel, paths: Sequence[str]) -> str:
    """Log block about a model before requests are accepted.

    Args:
        paths: of the server's routes, those for health and control included.
    """
    return model_description.describe(
        model, routes=_inference(paths), interfaces=_interfaces_if_imported(model)
    )


def _inference(paths: Sequence[str]) -> list[str]:
    from headrace_server.routes.availability import INFERENCE_ROUTES

    return [path for path in paths if path in INFERENCE_ROUTES]


def _interfaces_if_imported(model: ServedModel) -> tuple[str, ...]:
    """Interfaces of the class, if the engine runs in this process: it is not imported only for this."""
    plugin = registered(model.architecture)
    if plugin is None or plugin.target.partition(":")[0] not in sys.modules:
        return ()
    return interfaces_of(plugin.load())


@dataclasses.dataclass(frozen=True)
class _ModelOnly:
    """As much of an engine as routers look at when they are built."""

    model: ServedModel
    speech: None = None
    io_processor: None = None
