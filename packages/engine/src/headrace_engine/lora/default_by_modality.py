"""The adapter of prompts that name none and bring media (``lora.default_mm_loras``)."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any, cast, get_args

from headrace_core.lora import LoRARequest, media_adapters
from headrace_core.multimodal import Modality
from headrace_core.request import ChatPrompt, Prompt, modality_of


def default_adapter(paths: Mapping[str, str], prompt: Prompt) -> LoRARequest | None:
    """The adapter that a prompt is computed with if it names none; None: the base model alone.

    A prompt has one adapter, so where it brings media of two modalities that each have one, it gets none,
    unless both together have one.

    Args:
        paths: by modality; see :func:`headrace_core.lora.media_adapters`.
    """
    if not paths:
        return None
    adapters = media_adapters(paths)
    known = {modality for key in adapters for modality in key.split("+")}
    return adapters.get("+".join(sorted(known & modalities_of(prompt))))


def modalities_of(prompt: Prompt) -> frozenset[str]:
    """Modalities of the media that a prompt brings; its form is not checked."""
    if isinstance(prompt, ChatPrompt):
        return frozenset(_of_messages(prompt))
    return frozenset(_of_data(prompt))


def _of_messages(prompt: ChatPrompt) -> Iterator[Modality]:
    for message in prompt.messages:
        content = message.get("content") if isinstance(message, Mapping) else None
        for part in content if isinstance(content, list) else ():
            if (modality := modality_of(part)) is not None:
                yield modality


def _of_data(prompt: object) -> Iterator[str]:
    if not isinstance(prompt, Mapping):
        return
    data: Any = prompt.get("multi_modal_data")
    if isinstance(data, Mapping):
        given = cast(Mapping[str, Any], data)
        yield from (m for m in get_args(Modality) if m in given and not _is_empty(given[m]))
    yield from _of_data(prompt.get("encoder_prompt"))


def _is_empty(media: object) -> bool:
    """True of a list without items. Arrays have no truth value."""
    return isinstance(media, list | tuple) and not media
