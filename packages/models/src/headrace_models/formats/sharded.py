"""Sharded state: for each rank the tensors that its model holds, in files of its own.

The files are safetensors. Names are those of the built model's layers, so what is read needs no fusing
and no cutting; but only a model of the same class on as many ranks can read it.
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from headrace_core.config import LoadConfig
from headrace_core.errors import ConfigError, WeightsError
from headrace_core.model import ProgressCallback, ignore_progress
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.header import TensorEntry, read_header
from headrace_models.formats.safetensors import read_tensors
from headrace_models.formats.writer import SafetensorsWriter

if TYPE_CHECKING:
    from torch import Tensor

PATTERN = "model-rank-{rank}-part-{part}.safetensors"
MAX_FILE_BYTES = 5 << 30
WORLD_SIZE = "world_size"
"""Key of a file's metadata."""

Headers = Mapping[Path, tuple[TensorEntry, ...]]


class ShardedStateFormat:
    """See :class:`headrace_core.model.SharesByRank`.

    Args:
        load: its extra config may name the files' ``pattern``.
    """

    name = "sharded_state"

    def __init__(self, load: LoadConfig) -> None:
        self.eager = load.safetensors_load_strategy == "eager"
        self.pattern = checked_pattern(extra_config(load, {"pattern": str}).get("pattern", PATTERN))

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(rank_files(path, self.pattern))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Tensors of a model on one rank. Raises: WeightsError naming the file."""
        return self.rank_tensors(path, 0, 1, progress)

    def rank_tensors(
        self, path: Path, rank: int, world_size: int, progress: ProgressCallback = ignore_progress
    ) -> Iterable[tuple[str, Tensor, Path]]:
        """Raises: WeightsError, the files are damaged or for another number of ranks."""
        return self.read(rank_headers(path, self.pattern, rank, world_size), progress)

    def read(
        self, headers: Headers, progress: ProgressCallback
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """The tensors of files whose headers have been checked."""
        return read_tensors(headers, progress, eager=self.eager)


def checked_pattern(pattern: str) -> str:
    """A name with ``{rank}`` and ``{part}``.

    Raises:
        ConfigError: it is not.
    """
    plain = pattern.replace("{rank}", "", 1).replace("{part}", "", 1)
    if len(plain) != len(pattern) - 12 or re.search(r"[{}/\\]", plain):
        raise ConfigError(
            f"pattern = {pattern!r}: must be a file's name with {{rank}} and {{part}} in it once each",
            field="load.model_loader_extra_config",
        )
    return pattern


def rank_files(folder: Path, pattern: str) -> dict[int, list[Path]]:
    """The files of each rank, by part."""
    spelled = re.escape(pattern)
    for key in ("rank", "part"):
        spelled = spelled.replace(re.escape(f"{{{key}}}"), rf"(?P<{key}>\d{{1,6}})")
    found: dict[int, list[tuple[int, Path]]] = {}
    for path in folder.iterdir():
        match = re.fullmatch(spelled, path.name)
        if match is not None:
            found.setdefault(int(match["rank"]), []).append((int(match["part"]), path))
    return {rank: [path for _, path in sorted(parts)] for rank, parts in sorted(found.items())}


def rank_headers(folder: Path, pattern: str, rank: int, world_size: int) -> Headers:
    """The headers of one rank's files.

    Raises:
        WeightsError: they are missing, damaged, or for another number of ranks.
    """
    files = rank_files(folder, pattern).get(rank)
    if not files:
        raise WeightsError(f"{folder}: holds no files of rank {rank} ({pattern})")
    headers = {}
    for path in files:
        headers[path] = read_header(path)  # before its metadata: it checks the JSON
        saved_for = _metadata(path).get(WORLD_SIZE)
        if saved_for != str(world_size):
            raise WeightsError(
                f"{path}: was saved for tensor_parallel_size = {saved_for}, this is "
                f"{world_size}: load it with as many ranks, or save it anew"
            )
    return headers


def _metadata(path: Path) -> Mapping[str, object]:
    with open(path, "rb") as file:
        header = json.loads(file.read(int.from_bytes(file.read(8), "little")))
    found = header.get("__metadata__")
    return found if isinstance(found, dict) else {}


class ShardedStateWriter:
    """Writes one rank's tensors into as many files as the largest size asks for.

    Args:
        names: of all tensors that may come.
        max_file_bytes: of a file's tensors; a larger tensor has a file of its own.
    """

    def __init__(
        self,
        folder: Path,
        *,
        rank: int,
        world_size: int,
        names: Iterable[str],
        pattern: str = PATTERN,
        max_file_bytes: int = MAX_FILE_BYTES,
    ) -> None:
        self._folder, self._pattern, self._rank = folder, checked_pattern(pattern), rank
        self._metadata = {"format": "headrace sharded state", WORLD_SIZE: str(world_size),
                          "rank": str(rank)}  # fmt: skip
        self._room = 1024 + sum(256 + len(name) for name in names)
        self._max_file_bytes = max_file_bytes
        self._open: SafetensorsWriter | None = None
        self.files: list[Path] = []
        """Written so far."""

    def add(self, name: str, tensor: Tensor) -> None:
        """Write a tensor now; its memory may be used again."""
        if self._open is not None and self._open.num_bytes + tensor.nbytes > self._max_file_bytes:
            self.close()
        if self._open is None:
            name_of_file = self._pattern.replace("{rank}", str(self._rank)).replace(
                "{part}", str(len(self.files))
            )
            self._open = SafetensorsWriter(
                self._folder / name_of_file, room=self._room, metadata=self._metadata
            )
            self.files.append(self._folder / name_of_file)
        self._open.add(name, tensor)

    def close(self, error: BaseException | None = None) -> None:
        """Complete the open file, or drop it."""
        if self._open is not None:
            self._open.__exit__(type(error) if error is not None else None, error, None)
            self._open = None
