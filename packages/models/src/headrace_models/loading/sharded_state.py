"""Saving a checkpoint as sharded state: for each rank what its model would hold."""

from __future__ import annotations

import dataclasses
import shutil
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

import torch

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError
from headrace_core.model import (
    BuildContext,
    ModelInfo,
    ProgressCallback,
    SharesByRank,
    ignore_progress,
)
from headrace_models.formats.sharded import MAX_FILE_BYTES, PATTERN, ShardedStateWriter
from headrace_models.loading.absent_group import AbsentGroup
from headrace_models.loading.loader import Built, checkpoint_tensors, choose_format, fill

if TYPE_CHECKING:
    from torch import Tensor

WEIGHT_SUFFIXES = (
    ".bin", ".pt", ".pth", ".safetensors", ".gguf", ".tensors",
    ".h5", ".msgpack", ".ot", ".onnx", ".onnx_data", ".tflite",
)  # fmt: skip
"""Ends of names of files with weights, also of other frameworks."""


def save_sharded_state(
    info: ModelInfo,
    context: BuildContext,
    folder: Path,
    *,
    world_size: int = 1,
    load: LoadConfig | None = None,
    pattern: str = PATTERN,
    max_file_bytes: int = MAX_FILE_BYTES,
    progress: ProgressCallback = ignore_progress,
) -> list[Path]:
    """Write the state of every rank, one after the other, and copy all files that hold no weights.

    The checkpoint is read once for each rank and never held: a few layers' tensors are in memory.

    Args:
        info: of a local folder.
        context: of any rank; its communicator is not used.
        folder: created if need be; may not be the checkpoint's own.
        max_file_bytes: of a file's tensors; a larger tensor has a file of its own.

    Returns:
        The files with weights.

    Raises:
        ConfigError: the model is no local folder, or is a sharded state already.
        WeightsError: see :func:`headrace_models.loading.loader.load_model`.
    """
    load = load or LoadConfig()
    if not info.path.is_dir() or not Path(info.name).expanduser().is_dir():
        raise ConfigError(
            f"model.model = {info.name!r}: must be a local folder to save its sharded state",
            field="model.model",
        )
    folder.mkdir(parents=True, exist_ok=True)
    if folder.samefile(info.path):
        raise ConfigError(f"{folder}: must be another folder than the model's")
    files: list[Path] = []
    for rank in range(world_size):
        ranked = dataclasses.replace(context, communicator=AbsentGroup(rank, world_size))
        files += _save_rank(info, ranked, folder, load, pattern, max_file_bytes, progress)
    copy_others(info.path, folder)
    return files


def _save_rank(
    info: ModelInfo,
    context: BuildContext,
    folder: Path,
    load: LoadConfig,
    pattern: str,
    max_file_bytes: int,
    progress: ProgressCallback,
) -> list[Path]:
    chosen = choose_format(info.path, load)
    if isinstance(chosen, SharesByRank):
        raise ConfigError(f"{info.path}: is a sharded state already", field="model.model")
    built, group = Built.of(info, context), context.communicator
    names = [f"{leaf}.{key}" for leaf, keys in built.weights.slots.items() for key in keys]
    writer = ShardedStateWriter(
        folder, rank=group.rank, world_size=group.world_size, names=names, pattern=pattern,
        max_file_bytes=max_file_bytes,
    )  # fmt: skip

    def deliver(leaf: str, tensors: Mapping[str, Tensor]) -> None:
        for key, tensor in tensors.items():
            writer.add(f"{leaf}.{key}", tensor)

    try:
        with torch.no_grad():
            stored = checkpoint_tensors(built, context, load, chosen, progress)
            fill(built, context, stored, deliver)
    except BaseException as error:
        writer.close(error)
        raise
    writer.close()
    return writer.files


def copy_others(source: Path, folder: Path) -> None:
    """Copy a checkpoint's files without weights: configs, tokenizer, and the folders beside them, but for
    hidden ones (``.git``, ``.cache``)."""
    for path in sorted(source.iterdir()):
        if path.is_dir():
            if path.name.startswith("."):
                continue
            ignored = shutil.ignore_patterns(*(f"*{suffix}" for suffix in WEIGHT_SUFFIXES))
            shutil.copytree(path, folder / path.name, dirs_exist_ok=True, ignore=ignored)
        elif path.suffix not in WEIGHT_SUFFIXES and not path.name.endswith(".index.json"):
            shutil.copyfile(path, folder / path.name)
