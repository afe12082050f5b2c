"""Safetensors read by Run:ai's model streamer: many ranges of many files at once.

Library: github.com/run-ai/runai-model-streamer, an extra. headrace reads the headers itself, and
hands over what has been checked.
"""

from __future__ import annotations

import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.index import checkpoint_files, checkpoint_headers
from headrace_models.formats.safetensors import num_bytes
from headrace_models.formats.sharded import PATTERN, Headers, ShardedStateFormat, checked_pattern

if TYPE_CHECKING:
    from torch import Tensor

_KEYS: Mapping[str, type] = {"concurrency": int, "memory_limit": int, "distributed": bool}
_VARIABLES = {
    "concurrency": "RUNAI_STREAMER_CONCURRENCY",
    "memory_limit": "RUNAI_STREAMER_MEMORY_LIMIT",
}


class StreamedFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    Args:
        load: its extra config may have ``concurrency`` (threads that read) and ``memory_limit``
            (bytes of staging memory).
    """

    name = "runai_streamer"

    def __init__(self, load: LoadConfig) -> None:
        _set_up(extra_config(load, _KEYS))

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(checkpoint_files(path))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file; MissingDependency."""
        return _stream(checkpoint_headers(path), progress)


class StreamedShardsFormat(ShardedStateFormat):
    """Sharded state, read by the streamer. As above, and ``pattern`` of the files' names."""

    name = "runai_streamer_sharded"

    def __init__(self, load: LoadConfig) -> None:
        given = extra_config(load, {**_KEYS, "pattern": str})
        self.pattern = checked_pattern(given.pop("pattern", PATTERN))
        _set_up(given)

    def read(
        self, headers: Headers, progress: ProgressCallback
    ) -> Iterator[tuple[str, Tensor, Path]]:
        return _stream(headers, progress)


def _set_up(given: Mapping[str, Any]) -> None:
    if given.get("distributed"):
        raise ConfigError(
            "load.model_loader_extra_config: distributed = True: must be left out: workers that "
            "share the reading are on CUDA only, and here each reads its own",
            field="load.model_loader_extra_config",
        )
    for key, variable in _VARIABLES.items():
        if key in given:
            os.environ[variable] = str(given[key])


def _stream(headers: Headers, progress: ProgressCallback) -> Iterator[tuple[str, Tensor, Path]]:
    try:
        from runai_model_streamer import SafetensorsStreamer
    except ImportError as error:
        raise MissingDependency(
            "runai_model_streamer",
            needed_for="load format runai_streamer",
            install="pip install 'headrace-models[runai]'",
        ) from error
    origin = {entry.name: path for path, entries in headers.items() for entry in entries}
    total, done = num_bytes(headers), 0
    try:
        with SafetensorsStreamer() as streamer:
            streamer.stream_files([str(path) for path in headers])
            for name, tensor in streamer.get_tensors():
                yield name, tensor, origin[name]
                done += tensor.nbytes
                progress(LoadProgress("weights", done, total, "B", origin[name].name))
    except (OSError, RuntimeError, ValueError) as error:
        files = ", ".join(path.name for path in headers)
        raise WeightsError(f"{files}: the streamer cannot read them: {error}") from error
