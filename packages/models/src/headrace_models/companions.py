"""Checkpoints of which a part is in another checkpoint, that their config names: Ultravox leaves its language
model where it is."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import UnsupportedModel
from headrace_models.catalogue.multimodal import WRAPPERS
from headrace_models.checkpoint.lfs import refuse_pointers
from headrace_models.checkpoint.regular_file import refuse_special_files
from headrace_models.checkpoint.source import fetch
from headrace_models.formats.contents import stated_config, stored_tensors
from headrace_models.formats.header import TensorEntry

if TYPE_CHECKING:
    from torch import Tensor

FOLDERS = "headrace_companions"
"""Key that a config gets: prefix of names of tensors -> folder of the checkpoint that has them."""
Tensors = Iterable[tuple[str, "Tensor", Path]]


def with_companions(
    whole: Mapping[str, Any],
    config: ModelConfig,
    load: LoadConfig,
    stored: Sequence[TensorEntry],
) -> dict[str, Any]:
    """A config with those of the checkpoints that it names in the place of its parts, and their folders;
    other configs come back as they are. Downloads what is not there yet.

    Args:
        whole: ``config.json``.
        stored: the checkpoint's own tensors; a part that is among them is nowhere else.

    Raises:
        UnsupportedModel: a part is stored quantized, or cannot be read.
        ConfigError, NetworkError: see :func:`~headrace_models.checkpoint.source.fetch`.
    """
    kept = {key: value for key, value in whole.items() if key != FOLDERS}
    folders: dict[str, str] = {}
    for key, (part, prefix) in _companions(whole).items():
        name = whole.get(key)
        if not isinstance(name, str) or any(entry.name.startswith(prefix) for entry in stored):
            continue
        folder = fetch(
            name, token=config.hf_token, download_dir=load.download_dir, offline=load.offline
        )
        reads_weights = load.load_format.lower() != "dummy"
        refuse_special_files(folder, weights=reads_weights)
        refuse_pointers(folder, weights=reads_weights)
        kept[part] = stated_config(folder)
        if "quantization_config" in kept[part]:
            raise UnsupportedModel(
                f"config.json: {key} = {name!r}: is stored quantized, which is not supported there"
            )
        folders[prefix] = str(folder)
    return {**kept, FOLDERS: folders} if folders else kept


def companion_entries(whole: Mapping[str, Any], load: LoadConfig) -> list[TensorEntry]:
    """Tensors of a config's companions under the names that they have in the whole.

    Args:
        whole: of :func:`with_companions`.
    """
    return [
        entry._replace(name=prefix + entry.name)
        for prefix, folder in whole.get(FOLDERS, {}).items()
        for entry in stored_tensors(Path(folder), load)
    ]


def companion_tensors(whole: Mapping[str, Any], read: Callable[[Path], Tensors]) -> Tensors:
    """The same with their values.

    Args:
        read: folder -> tensors of a checkpoint.
    """
    for prefix, folder in whole.get(FOLDERS, {}).items():
        for name, tensor, file in read(Path(folder)):
            yield prefix + name, tensor, file


def _companions(whole: Mapping[str, Any]) -> Mapping[str, tuple[str, str]]:
    named = whole.get("architectures")
    first = named[0] if isinstance(named, list) and named else None
    wrapper = WRAPPERS.get(first) if isinstance(first, str) else None
    return {} if wrapper is None else wrapper.companions
