"""Media processors by architecture: entry points, nothing else."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core import plugins
from headrace_core.errors import PluginNotFound, UnsupportedFeature
from headrace_core.multimodal import MediaProcessor

GROUP = "headrace.multimodal_processors"
AUTO = "transformers"
"""The entry that is no architecture: it drives the processors of checkpoints
(:mod:`headrace_multimodal.auto_processor`)."""


def supported_architectures() -> tuple[str, ...]:
    """Architectures for which a processor is installed."""
    return tuple(name for name in plugins.installed(GROUP) if name != AUTO)


def processor_for(architecture: str, config: Mapping[str, Any], path: Path) -> MediaProcessor:
    """The processor of a checkpoint.

    Args:
        config: ``config.json``, whole.
        path: the checkpoint's folder.

    Raises:
        UnsupportedFeature: none is installed; the message lists those that are.
        PluginLoadError: it is installed and fails to import.
    """
    try:
        factory = plugins.load(GROUP, architecture)
    except PluginNotFound as error:
        names = ", ".join(supported_architectures()) or "none"
        raise UnsupportedFeature(
            f"model architecture {architecture!r} takes no images, audio or video: no media "
            f"processor is installed for it (installed: {names})",
            param="messages",
        ) from error
    processor: MediaProcessor = factory(config, path)
    return processor
