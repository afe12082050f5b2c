"""CoreWeave Tensorizer: one file of tensors, from a disk, a web server or an object store.

Library: github.com/coreweave/tensorizer, an extra. The tensors have the names and shapes of the
checkpoint that was serialized.
"""

from __future__ import annotations

import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, MissingDependency, WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, WeightFormat, ignore_progress
from headrace_models.formats.extra_config import extra_config

if TYPE_CHECKING:
    from torch import Tensor

FILE = "model.tensors"
_SIDE_FILES = (".json", ".jinja", ".model", ".txt", ".tiktoken")


class TensorizedFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    Args:
        load: its extra config may have ``tensorizer_uri`` (default: the model folder's
            ``model.tensors``) and ``deserialization_kwargs``, passed on as they are.
    """

    name = "tensorizer"

    def __init__(self, load: LoadConfig) -> None:
        given = extra_config(load, {"tensorizer_uri": str, "deserialization_kwargs": dict})
        self.uri: str | None = given.get("tensorizer_uri")
        self.settings: dict[str, Any] = given.get("deserialization_kwargs", {})

    def recognises(self, path: Path) -> bool:
        return self.uri is not None or (path / FILE).is_file()

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file; MissingDependency."""
        library = _library()
        place = self.uri or str(path / FILE)
        try:
            settings = {"device": "cpu", "lazy_load": True, "verify_hash": True, **self.settings}
            with library.TensorDeserializer(place, **settings) as content:
                total, done = content.total_tensor_bytes, 0
                for _, _, name, tensor in content.read_tensors():
                    yield str(name), tensor.detach(), Path(place)
                    done += tensor.nbytes
                    progress(LoadProgress("weights", done, total, "B", Path(place).name))
        except TypeError as error:
            raise ConfigError(
                f"load.model_loader_extra_config: deserialization_kwargs = {self.settings!r}: "
                f"{error}",
                field="load.model_loader_extra_config",
            ) from error
        except Exception as error:  # a damaged file: whatever the library trips over
            raise WeightsError(
                f"{place}: tensorizer cannot read it: {type(error).__name__}: {error}"
            ) from error


def serialize(source: Path, weights: WeightFormat, folder: Path, **settings: Any) -> Path:
    """Write a checkpoint in Tensorizer's format, with its config and tokenizer beside.

    Args:
        source: folder of the checkpoint.
        weights: the format of its weights.
        folder: created if need be.
        settings: of the library's serializer.

    Returns:
        The file with the tensors.

    Raises:
        WeightsError: the checkpoint cannot be read. MissingDependency.
    """
    library = _library()
    folder.mkdir(parents=True, exist_ok=True)
    for path in sorted(source.iterdir()):
        if path.is_file() and path.suffix in _SIDE_FILES and ".index." not in path.name:
            shutil.copyfile(path, folder / path.name)
    serializer = library.TensorSerializer(str(folder / FILE), **settings)
    try:
        for index, (name, tensor, _) in enumerate(weights.tensors(source)):
            serializer.write_tensor(index, name, library.TensorType.PARAM, tensor.contiguous())
    finally:
        serializer.close()
    return folder / FILE


def _library() -> Any:
    try:
        from tensorizer import serialization
    except ImportError as error:
        raise MissingDependency(
            "tensorizer",
            needed_for="load format tensorizer",
            install="pip install 'headrace-models[tensorizer]'",
        ) from error
    return serialization
