"""PyTorch's own files (``pytorch_model.bin``, ``.pt``): pickles, of which only tensors are read.

``torch.load(weights_only=True)`` builds tensors, numbers, texts and their lists and mappings, and
calls nothing that a file names. A file that needs more is refused; tensors of TorchAO's are taken apart
(:mod:`~headrace_models.formats.torchao_pickles`).
"""

from __future__ import annotations

import ctypes
import mmap
import re
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

import torch
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.errors import WeightsError
from headrace_core.model import LoadProgress, ProgressCallback, ignore_progress
from headrace_core.reliability import failpoints
from headrace_models.checkpoint.regular_file import check_regular
from headrace_models.formats.extra_config import extra_config
from headrace_models.formats.index import (
    PICKLES,
    PT_FILES,
    checkpoint_files,
    file_bytes,
    has_index,
    missing_from,
    read_index,
)
from headrace_models.formats.rank_parts import join
from headrace_models.formats.torchao_pickles import plain_parts, stand_ins

_WRAPPERS = ("state_dict", "model")
"""Keys under which some trainers keep the weights, beside other things."""
_NAMED_WRAPPER = "model_key"
"""Key under which fairseq2 names the key of the weights."""
_RANK = re.compile(r"model\.(\d{1,4})\.pt")


class PickledFormat:
    """See :class:`headrace_core.model.WeightFormat`.

    Args:
        load: ``safetensors_load_strategy = "eager"`` reads files whole instead of mapping them.
    """

    name = "pt"

    def __init__(self, load: LoadConfig) -> None:
        extra_config(load, {})
        self.eager = load.safetensors_load_strategy == "eager"

    def recognises(self, path: Path) -> bool:
        return path.is_dir() and bool(pickled_files(path))

    def tensors(
        self, path: Path, progress: ProgressCallback = ignore_progress
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """Raises: WeightsError naming the file, and what it holds that is no tensor."""
        files = pickled_files(path)
        ranks = rank_files(files)
        if ranks:
            yield from self._joined(ranks, progress)
            return
        indexed = read_index(path, PICKLES) if has_index(path, PICKLES) else {}
        sizes = {file: file_bytes(file) for file in files}
        total, done = sum(sizes.values()), 0
        for file, size in sizes.items():
            tensors = read_pickled(file, eager=self.eager)
            for name, place in indexed.items():
                if place == file.name and name not in tensors:
                    raise missing_from(file, name, PICKLES.index)
            before, mapping = done, _Mapping(file)
            for name in list(tensors):
                tensor = tensors.pop(name)
                yield name, tensor, file
                done = min(done + tensor.nbytes, before + size)
                progress(LoadProgress("weights", done, total, "B", file.name))
                mapping.let_go(tensor)
            done = before + size
            progress(LoadProgress("weights", done, total, "B", file.name))

    def _joined(
        self, files: Sequence[Path], progress: ProgressCallback
    ) -> Iterator[tuple[str, Tensor, Path]]:
        ranks = [read_pickled(file, eager=self.eager) for file in files]
        for file, tensors in zip(files, ranks):
            if odd := ranks[0].keys() ^ tensors.keys():
                raise WeightsError(f"{file}: tensor {min(odd)!r} is not in the files of all ranks")
        total, done = sum(tensor.nbytes for tensors in ranks for tensor in tensors.values()), 0
        for name in list(ranks[0]):
            pieces = [tensors.pop(name) for tensors in ranks]
            yield name, join(name, pieces, files[0]), files[0]
            done += sum(piece.nbytes for piece in pieces)
            progress(LoadProgress("weights", done, total, "B", files[0].name))


def rank_files(files: Sequence[Path]) -> list[Path]:
    """The files by rank, if each holds a rank's part of every tensor (fairseq2), else none.

    Raises:
        WeightsError: a rank's file is missing.
    """
    ranks = {int(found[1]): file for file in files if (found := _RANK.fullmatch(file.name))}
    if not ranks or len(ranks) != len(files):
        return []
    if missing := set(range(max(ranks) + 1)) - ranks.keys():
        raise WeightsError(f"{files[0].parent}: file model.{min(missing)}.pt is missing")
    return [ranks[rank] for rank in sorted(ranks)]


def pickled_files(folder: Path) -> tuple[Path, ...]:
    """``.bin`` files of a folder's checkpoint, else its ``.pt`` files.

    Raises:
        WeightsError: see :func:`~headrace_models.formats.index.checkpoint_files`.
    """
    return checkpoint_files(folder, PICKLES) or checkpoint_files(folder, PT_FILES)


def read_pickled(file: Path, *, eager: bool = False) -> dict[str, Tensor]:
    """The tensors of one file, mapped where the file allows it (zip files, from torch 1.6 on).

    Raises:
        WeightsError: it is damaged, needs more than tensors, or holds something else.
    """
    if failpoints.PLAN is not None:
        failpoints.hit("loader.read")
    try:
        check_regular(file)
    except OSError as error:
        raise WeightsError(f"{file}: cannot be read: {error}") from error
    try:
        found = _loaded(file, mapped=not eager and zipfile.is_zipfile(file))
    except WeightsError:
        raise
    except MemoryError as error:
        raise WeightsError(f"{file}: not a valid PyTorch file: it asks for {error}") from error
    except Exception as error:  # whatever the unpickler trips over in a damaged file
        if type(error).__name__ == "UnpicklingError":
            raise WeightsError(
                f"{file}: not read: it is damaged, or needs more than tensors, which could run code "
                f"of the file's author: {_reason(error)}. Convert it to safetensors where you trust it"
            ) from error
        raise WeightsError(
            f"{file}: not a valid PyTorch file (truncated?): {type(error).__name__}: "
            f"{_reason(error)}"
        ) from error
    return _checked(file, found)


def _loaded(file: Path, *, mapped: bool) -> object:
    """What a file holds; tensors of TorchAO's as stand-ins."""
    known = stand_ins(file) if zipfile.is_zipfile(file) else ()
    with torch.serialization.safe_globals(list(known)):
        return torch.load(file, map_location="cpu", weights_only=True, mmap=mapped)


def _checked(file: Path, found: object) -> dict[str, Tensor]:
    named = found.get(_NAMED_WRAPPER) if isinstance(found, Mapping) else None
    for wrapper in (*((named,) if isinstance(named, str) else ()), *_WRAPPERS):
        if isinstance(found, Mapping) and isinstance(found.get(wrapper), Mapping):
            found = found[wrapper]
    if not isinstance(found, Mapping):
        raise WeightsError(f"{file}: holds a {type(found).__name__}, not tensors by name")
    checked: dict[str, Tensor] = {}
    for name, tensor in found.items():
        if not isinstance(tensor, Tensor):
            raise WeightsError(f"{file}: {name!r} is a {type(tensor).__name__}, not a tensor")
        if not isinstance(name, str):
            raise WeightsError(f"{file}: a tensor's name is {name!r}: must be text")
        for part, plain in plain_parts(file, name, tensor):
            _check_plain(file, part, plain)
            if part in checked:
                raise WeightsError(
                    f"{file}: tensor {part!r} is there twice, once as part of another"
                )
            checked[part] = plain
    return checked


def _check_plain(file: Path, name: str, tensor: Tensor) -> None:
    if tensor.layout != torch.strided or tensor.device.type != "cpu" or tensor.is_quantized:
        raise WeightsError(
            f"{file}: tensor {name!r} is {tensor.layout} on {tensor.device}: must be a plain one"
        )
    if _end(tensor) > tensor.untyped_storage().nbytes():
        raise WeightsError(f"{file}: tensor {name!r} ends after the bytes that it names")


def _end(tensor: Tensor) -> int:
    """End of the tensor's bytes within its storage."""
    if not tensor.numel():
        return 0
    last = sum((size - 1) * step for size, step in zip(tensor.shape, tensor.stride()))
    return int(tensor.storage_offset() + last + 1) * tensor.element_size()


class _Mapping:
    """Addresses where a file is mapped into memory, to give pages back as for safetensors: torch has no
    call for it. Elsewhere than on Linux, and for files that were read whole, it does nothing."""

    def __init__(self, file: Path) -> None:
        self.ranges: list[tuple[int, int]] = []
        maps = Path("/proc/self/maps")
        if not maps.is_file() or not hasattr(mmap, "MADV_DONTNEED"):
            return
        self.advise = ctypes.CDLL(None).madvise
        for line in maps.read_text(encoding="utf-8", errors="replace").splitlines():
            if line.endswith(f" {file.resolve()}"):
                start, _, end = line.split(" ", 1)[0].partition("-")
                self.ranges.append((int(start, 16), int(end, 16)))

    def let_go(self, tensor: Tensor) -> None:
        """Whoever still looks gets the pages again, from the file."""
        begin, end = tensor.data_ptr(), tensor.data_ptr() + tensor.nbytes
        first = -(-begin // mmap.PAGESIZE) * mmap.PAGESIZE
        last = end // mmap.PAGESIZE * mmap.PAGESIZE
        if first < last and any(low <= first and last <= high for low, high in self.ranges):
            self.advise(ctypes.c_void_p(first), ctypes.c_size_t(last - first), mmap.MADV_DONTNEED)


def _reason(error: Exception) -> str:
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    named = [line for line in lines if "GLOBAL" in line or "Unsupported" in line]
    return (named or lines or ["no details"])[0][:300]
