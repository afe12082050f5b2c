"""Safetensors read by fastsafetensors: whole files at once, to a GPU past the CPU where the machine can.

Library: github.com/foundation-model-stack/fastsafetensors, an extra. headrace reads the headers
itself first.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.config import LoadConfig
from headrace_core.errors import MissingDependency, WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.index import checkpoint_files, checkpoint_headers
from headrace_models.formats.safetensors import num_bytes

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)


class FastSafetensorsFormat:
    """See :class:`headrace_core.model.WeightFormat`. Tensors come on the GPU if there is one."""

    name = "fastsafetensors"

    def __init__(self, load: LoadConfig) -> None:
        extra_config(load, {})
        self.device = "cuda" if torch.cuda.is_available() else "cpu"

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(checkpoint_files(path))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file; MissingDependency."""
        try:
            from fastsafetensors import SafeTensorsFileLoader, SingleGroup
        except ImportError as error:
            raise MissingDependency(
                "fastsafetensors",
                needed_for="load format fastsafetensors",
                install="pip install 'headrace-models[fastsafetensors]'",
            ) from error
        headers = checkpoint_headers(path)
        total, done = num_bytes(headers), 0
        if self.device == "cpu":
            logger.info("fastsafetensors: no GPU, so files are read to memory by ordinary copies")
        for file, entries in headers.items():
            try:
                loader = SafeTensorsFileLoader(
                    SingleGroup(), self.device, nogds=self.device == "cpu"
                )
                loader.add_filenames({0: [str(file)]})
                content = loader.copy_files_to_device()
            except (OSError, RuntimeError, ValueError) as error:
                raise WeightsError(f"{file}: fastsafetensors cannot read it: {error}") from error
            try:
                for entry in entries:
                    # The file's memory goes with `content`; a leaf may wait for its other parts.
                    tensor = content.get_tensor(entry.name).clone()
                    yield entry.name, tensor, file
                    done += entry.num_bytes
                    progress(LoadProgress("weights", done, total, "B", file.name))
            finally:
                content.close()
                loader.close()
