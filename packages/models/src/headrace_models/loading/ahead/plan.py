"""A plan of packing: which tensors of a checkpoint's files become one packed weight. No torch.

Only a built model knows that; building it takes torch. So a start writes down what it packed, for the next
one. A plan says where to look and nothing more: places, shapes and bytes come from the checkpoint's own
files, and a weight is used only where the loader would have packed these very tensors.
"""

from __future__ import annotations

import hashlib
import json
import logging
import mmap
import os
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import WeightsError
from headrace_models.checkpoint.regular_file import open_regular
from headrace_models.formats.header import TensorEntry, read_header

logger = logging.getLogger(__name__)

MAX_FILES = 64
"""Plans that a folder keeps: those that were used last."""
MAX_BYTES = 4 << 20
"""Of one plan; one of thousands of layers takes a tenth."""
VERSION = 1
DTYPES: Mapping[str, str] = {"BF16": "bfloat16", "F16": "float16", "F32": "float32"}
"""Names of dtypes in files, and ours."""

Identity = tuple[int, int, int, int, int]
"""Device, inode, size, times of change (content, then either) in nanoseconds: another content has another."""
Source = tuple[str, str]
"""Name of a file in the checkpoint's folder, and of a tensor in it."""


class PackPlan(NamedTuple):
    """What a start packed."""

    files: Mapping[str, Identity]
    """By name: files whose tensors were found to be finite."""
    weights: Mapping[str, tuple[Source, ...]]
    """By path of the leaf, the parts of its weight in order."""

    def is_current(self, folder: Path) -> bool:
        """True if the files are still those that were read."""
        try:
            return bool(self.files) and all(
                identity_of(folder / name) == identity for name, identity in self.files.items()
            )
        except (OSError, ValueError):  # ValueError: a name that no file can have
            return False


class Piece(NamedTuple):
    """Rows of a weight in a mapped file."""

    file: mmap.mmap
    offset: int
    num_rows: int


class PlannedWeight(NamedTuple):
    """One weight that can be packed: its rows, as the files have them by now."""

    leaf: str
    parts: tuple[Piece, ...]
    in_features: int
    dtype: str


class KeptPlan:
    """The plan of one subject, in a folder of such files.

    A folder that cannot be read or written is as if it were empty, and so is a file that holds no plan: a
    start packs while it loads then.

    Args:
        folder: made when something is kept.
        subject: the checkpoint and the settings, as JSON has them; values that JSON does not know are told
            apart by their text.
    """

    def __init__(self, folder: Path, subject: Mapping[str, Any]) -> None:
        text = json.dumps(subject, sort_keys=True, default=str)
        self._folder = folder
        self._file = folder / f"{hashlib.sha256(text.encode()).hexdigest()}.json"

    def find(self) -> PackPlan | None:
        """The plan of an earlier start, if there is one."""
        try:
            with open_regular(self._file) as file:
                content = file.read(MAX_BYTES + 1)
            plan = _checked(content)
        except FileNotFoundError:
            return None
        except (OSError, ValueError, RecursionError) as error:
            logger.info("%s is not used, and written again: %s", self._file, error)
            return None
        with suppress(OSError):
            os.utime(self._file)  # it has been used
        return plan

    def keep(self, plan: PackPlan) -> None:
        """Write it for the next start, whole or not at all."""
        content = json.dumps({"version": VERSION, "files": plan.files, "weights": plan.weights})
        if len(content) > MAX_BYTES:
            return
        try:
            self._folder.mkdir(parents=True, exist_ok=True, mode=0o700)
            handle, name = tempfile.mkstemp(dir=self._folder, suffix=".part")
            try:
                with os.fdopen(handle, "w", encoding="ascii") as file:
                    file.write(content)
                os.replace(name, self._file)
            except BaseException:
                os.unlink(name)
                raise
            self._drop_old()
        except OSError as error:
            logger.info("what was packed is not kept for the next start: %s", error)

    def _drop_old(self) -> None:
        files = sorted(self._folder.glob("*.json"), key=_used)
        for file in files[: max(0, len(files) - MAX_FILES)]:
            file.unlink(missing_ok=True)


def identity_of(file: Path) -> Identity:
    """Raises: OSError: it is not there."""
    found = file.stat()
    return found.st_dev, found.st_ino, found.st_size, found.st_mtime_ns, found.st_ctime_ns


def planned_weights(plan: PackPlan, folder: Path) -> list[PlannedWeight]:
    """The weights of a plan that the files have; none if the files are others by now, or damaged."""
    if not plan.is_current(folder):
        logger.info("%s: has changed since a start packed it: packed while it is read", folder)
        return []
    entries: dict[Source, TensorEntry] = {}
    mapped: dict[str, mmap.mmap] = {}
    try:
        for name in plan.files:
            entries |= {(name, entry.name): entry for entry in read_header(folder / name)}
            with open_regular(folder / name) as file:
                # Copy-on-write, since native code is given addresses of writable memory; nobody writes.
                mapped[name] = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_COPY)
    except (OSError, ValueError, WeightsError) as error:
        logger.info("%s: not packed ahead: %s", folder, error)
        return []
    found = (_planned(leaf, parts, entries, mapped) for leaf, parts in plan.weights.items())
    return [weight for weight in found if weight is not None]


def _planned(
    leaf: str,
    sources: Sequence[Source],
    entries: Mapping[Source, TensorEntry],
    mapped: Mapping[str, mmap.mmap],
) -> PlannedWeight | None:
    """None: the files have no such tensors, or they are no rows of one matrix."""
    parts = [entries.get(source) for source in sources]
    first = parts[0]
    if first is None or first.dtype not in DTYPES or len(first.shape) != 2:
        return None
    pieces = []
    for (name, _), entry in zip(sources, parts, strict=True):
        if entry is None or entry.dtype != first.dtype or entry.shape[1:] != first.shape[1:]:
            return None
        if entry.offset + entry.num_bytes > len(mapped[name]):
            return None
        pieces.append(Piece(mapped[name], entry.offset, entry.shape[0]))
    return PlannedWeight(leaf, tuple(pieces), first.shape[1], DTYPES[first.dtype])


def _used(file: Path) -> float:
    try:
        return file.stat().st_mtime
    except FileNotFoundError:  # another start has removed it
        return 0.0


def _checked(content: bytes) -> PackPlan:
    """A file's content.

    Raises:
        ValueError: it is no plan.
    """
    if len(content) > MAX_BYTES:
        raise ValueError(f"more than {MAX_BYTES} bytes")
    fields = json.loads(content)
    if not isinstance(fields, dict) or fields.keys() != {"version", "files", "weights"}:
        raise ValueError("not the fields of a plan")
    files, weights = fields["files"], fields["weights"]
    if fields["version"] != VERSION or not isinstance(files, dict) or not isinstance(weights, dict):
        raise ValueError("a plan of another version")
    plan = PackPlan(
        {name: _identity(name, found) for name, found in files.items()},
        {leaf: _sources(parts) for leaf, parts in weights.items()},
    )
    seen: set[Source] = (
        set()
    )  # a tensor that is named again would be packed again: memory without end
    for leaf, parts in plan.weights.items():
        if not parts or any(file not in plan.files for file, _ in parts):
            raise ValueError(f"{leaf!r:.80} is made of files that it does not know")
        if len({*parts}) < len(parts) or not seen.isdisjoint(parts):
            raise ValueError(f"{leaf!r:.80} is made of a tensor that is named twice")
        seen.update(parts)
    return plan


def _identity(name: str, found: object) -> Identity:
    if Path(name).name != name or name in ("", ".", ".."):
        raise ValueError(f"{name!r} is not a plain file name")
    if not isinstance(found, list) or [type(number) for number in found] != [int] * 5:
        raise ValueError(f"{name!r} has no identity")
    return found[0], found[1], found[2], found[3], found[4]


def _sources(parts: object) -> tuple[Source, ...]:
    if not isinstance(parts, list):
        raise ValueError(f"{parts!r:.80} lists no tensors")
    return tuple(map(_source, parts))


def _source(part: object) -> Source:
    if not isinstance(part, list) or [type(text) for text in part] != [str, str]:
        raise ValueError(f"{part!r:.80} names no tensor")
    return part[0], part[1]
