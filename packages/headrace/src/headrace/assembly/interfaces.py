"""Interfaces of a model, read off its class: no model is built, and torch is not imported.

Every predicate takes a class or an instance. A capability is its protocol's members
(:mod:`headrace_core.model`), as attributes or, where only instances have them, as annotations.
"""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping

from headrace_core.speech import diagnosis as speech_diagnosis

_MEMBERS: Mapping[str, tuple[str, ...]] = {
    "generation": ("compute_logits", "forward"),
    "pooling": ("pooler", "forward"),
    "multimodal": ("embed_media", "modalities"),
    "encoder-decoder": ("encode", "compute_logits"),
    "prompt embeddings": ("input_vectors",),
    "guides sampling": ("logits_processors",),
}
"""Interface -> the members that make it one."""


def supports_transcription(model: object) -> bool:
    """True if it turns speech into text: a ``SupportsTranscription`` that lacks nothing."""
    return not speech_diagnosis.faults(_class_of(model))


def supports_lora(model: object) -> bool:
    """True if its layers take low-rank adapters: it is built of headrace's, and does not say why not."""
    found = _class_of(model)
    return hasattr(found, "module_names") and not getattr(found, "no_adapters", "")


def supports_pipeline_stages(model: object) -> bool:
    """True if its layers can be on several stages: it says so, as headrace's decoders do."""
    says: Callable[[], bool] = getattr(_class_of(model), "runs_in_stages", lambda: False)
    return says()


def supports_multimodal(model: object) -> bool:
    """True if prompts may bring media."""
    return _has(model, "multimodal")


def is_text_generation_model(model: object) -> bool:
    """True if it has logits, and is not for transcription only."""
    only = getattr(_class_of(model), "supports_transcription_only", False)
    return _has(model, "generation") and only is not True


def is_pooling_model(model: object) -> bool:
    """True if it pools by itself, without being converted."""
    return _has(model, "pooling")


def interfaces_of(model: object) -> tuple[str, ...]:
    """Names of all interfaces that it has."""
    further = {
        "pipeline parallel": supports_pipeline_stages(model),
        "LoRA": supports_lora(model),
        "transcription": supports_transcription(model),
    }
    found = tuple(name for name in _MEMBERS if _has(model, name))
    return (*found, *(name for name, has in further.items() if has))


def _class_of(model: object) -> type:
    return model if isinstance(model, type) else type(model)


def _has(model: object, interface: str) -> bool:
    bases = _class_of(model).__mro__
    annotated = {name for base in bases for name in inspect.get_annotations(base)}
    return all(hasattr(model, name) or name in annotated for name in _MEMBERS[interface])
