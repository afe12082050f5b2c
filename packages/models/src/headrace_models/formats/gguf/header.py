"""The header of a GGUF file, read with every number taken as hostile. No torch.

A file is: magic, version, counts; metadata (key, type, value); for each tensor its name, sizes (the
fastest first), type of block and offset; then, aligned, the blocks. All little-endian.
"""

from __future__ import annotations

import array
import math
import mmap
import os
import re
import struct
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.errors import WeightsError
from headrace_core.reliability import failpoints
from headrace_models.checkpoint.regular_file import open_regular

MAGIC = b"GGUF"
VERSIONS = (2, 3)
MAX_TENSORS = 1_000_000
MAX_KEYS = 65_536
MAX_VALUES = 1 << 24
MAX_DIMENSIONS = 4
MAX_STRING_BYTES = 64 << 20
MAX_ALIGNMENT = 1 << 20
MAX_PARTS = 1000


class BlockType(NamedTuple):
    """Storage of numbers: so many in a block of so many bytes."""

    name: str
    elements: int
    num_bytes: int


BLOCK_TYPES: Mapping[int, BlockType] = {
    0: BlockType("F32", 1, 4), 1: BlockType("F16", 1, 2), 30: BlockType("BF16", 1, 2),
    2: BlockType("Q4_0", 32, 18), 3: BlockType("Q4_1", 32, 20), 6: BlockType("Q5_0", 32, 22),
    7: BlockType("Q5_1", 32, 24), 8: BlockType("Q8_0", 32, 34), 10: BlockType("Q2_K", 256, 84),
    11: BlockType("Q3_K", 256, 110), 12: BlockType("Q4_K", 256, 144),
    13: BlockType("Q5_K", 256, 176), 14: BlockType("Q6_K", 256, 210),
    20: BlockType("IQ4_NL", 32, 18), 23: BlockType("IQ4_XS", 256, 136),
    16: BlockType("IQ2_XXS", 256, 66), 17: BlockType("IQ2_XS", 256, 74),
    18: BlockType("IQ3_XXS", 256, 98), 19: BlockType("IQ1_S", 256, 50),
    21: BlockType("IQ3_S", 256, 110), 22: BlockType("IQ2_S", 256, 82),
    29: BlockType("IQ1_M", 256, 56), 34: BlockType("TQ1_0", 256, 54),
    35: BlockType("TQ2_0", 256, 66), 39: BlockType("MXFP4", 32, 17), 40: BlockType("NVFP4", 64, 36),
}  # fmt: skip
"""The types that are read, by the number that stands for them."""

PLAIN = ("F32", "F16", "BF16")
"""Types whose numbers stand by themselves."""
_UNREAD = {
    9: "Q8_1", 15: "Q8_K", 24: "I8", 25: "I16", 26: "I32", 27: "I64", 28: "F64", 41: "Q1_0",
}  # fmt: skip
_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 10: "Q", 11: "q", 12: "d"}
_BOOL, _STRING, _ARRAY = 7, 8, 9


class GGUFTensor(NamedTuple):
    """One tensor of a file, and its place."""

    name: str
    shape: tuple[int, ...]
    """Slowest first, as in torch."""
    type: BlockType
    file: Path
    offset: int
    """Bytes from the start of the file."""
    num_bytes: int


class GGUFHeader(NamedTuple):
    """Content of a file before the blocks."""

    path: Path
    metadata: Mapping[str, Any]
    """Numbers, strings, booleans, and lists of one of these."""
    tensors: tuple[GGUFTensor, ...]
    """Tensors in the order of files and positions."""


def read_gguf(path: Path) -> GGUFHeader:
    """Metadata and tensors of one file.

    Raises:
        WeightsError: the file is no GGUF file, is truncated, has blocks of an unknown type, or its
            header lies.
    """
    try:
        if failpoints.PLAN is not None:
            failpoints.hit("loader.read")
        with open_regular(path) as file:
            size = os.fstat(file.fileno()).st_size
            if size < 24:
                raise _bad(path, f"{size} bytes are too few for a header")
            with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as content:
                return _Reader(path, content).header()
    except OSError as error:
        raise WeightsError(f"{path}: cannot be read: {error}") from error


def read_parts(path: Path) -> GGUFHeader:
    """The first file's metadata and the tensors of all parts, given the first
    (``...-00001-of-00003.gguf``) or the only one.

    Raises:
        WeightsError: as :func:`read_gguf`; or a part is missing, or is not the first.
    """
    first = read_gguf(path)
    count = first.metadata.get("split.count", 1)
    if type(count) is not int or not 0 <= count <= MAX_PARTS:
        raise _bad(path, f"split.count = {count!r}: must be a number up to {MAX_PARTS}")
    if count <= 1:
        return first
    if first.metadata.get("split.no") != 0:
        raise WeightsError(
            f"{path}: is part {first.metadata.get('split.no')!r} of {count}, counted from 0: name "
            f"the first one (...-00001-of-{count:05d}.gguf)"
        )
    found = re.fullmatch(r"(.*)-00001-of-(\d{5})\.gguf", path.name)
    if found is None or int(found[2]) != count:
        raise WeightsError(
            f"{path}: is the first of {count} parts, but not named ...-00001-of-{count:05d}.gguf"
        )
    others = [path.with_name(f"{found[1]}-{n:05d}-of-{found[2]}.gguf") for n in range(2, count + 1)]
    tensors = [tensor for other in others for tensor in read_gguf(other).tensors]
    return first._replace(tensors=(*first.tensors, *tensors))


class _Reader:
    """Walks through a header; whatever would lie beyond the file's end is refused."""

    def __init__(self, path: Path, content: mmap.mmap) -> None:
        self.path, self.content, self.size = path, content, len(content)
        self.place = 0

    def header(self) -> GGUFHeader:
        if self._take(4) != MAGIC:
            raise _bad(self.path, "it does not begin with GGUF")
        version = self._number("I")
        if version not in VERSIONS:
            swapped = int.from_bytes(version.to_bytes(4, "little"), "big") in VERSIONS
            why = "it is big-endian" if swapped else f"its version is {version}"
            raise _bad(self.path, f"{why}; versions {VERSIONS[0]} to {VERSIONS[-1]}, "
                       "little-endian, are read")  # fmt: skip
        tensors = self._count("tensors", MAX_TENSORS)
        keys = self._count("metadata keys", MAX_KEYS)
        metadata: dict[str, Any] = {}
        for _ in range(keys):
            key = self._string("a metadata key")
            if key in metadata:
                raise _bad(self.path, f"the metadata key {key!r} occurs twice")
            metadata[key] = self._value(key, self._number("I"))
        listed = [self._tensor() for _ in range(tensors)]
        return GGUFHeader(self.path, metadata, self._placed(listed, self._alignment(metadata)))

    def _take(self, count: int) -> bytes:
        if count > self.size - self.place:
            raise _bad(
                self.path, f"its header goes on after the last byte, {self.size} (truncated?)"
            )
        self.place += count
        return self.content[self.place - count : self.place]

    def _number(self, code: str) -> int:
        value: int = struct.unpack(f"<{code}", self._take(struct.calcsize(f"<{code}")))[0]
        return value

    def _count(self, what: str, most: int) -> int:
        count = self._number("Q")
        if count > most:
            raise _bad(self.path, f"{count} {what}; at most {most} are read")
        return count

    def _string(self, what: str) -> str:
        length = self._number("Q")
        if length > MAX_STRING_BYTES:
            raise _bad(self.path, f"{what} of {length} bytes; at most {MAX_STRING_BYTES} are read")
        # Vocabularies trained on bytes hold pieces that are no UTF-8.
        return self._take(length).decode("utf-8", "replace")

    def _value(self, key: str, kind: int) -> Any:
        if kind in _SCALARS:
            return self._number(_SCALARS[kind])
        if kind == _BOOL:
            return self._number("B") != 0
        if kind == _STRING:
            return self._string(f"the value of {key!r}")
        if kind == _ARRAY:
            return self._array(key)
        raise _bad(self.path, f"metadata {key!r}: type {kind} is not known")

    def _array(self, key: str) -> list[Any]:
        kind, count = self._number("I"), self._number("Q")
        least = 8 if kind == _STRING else struct.calcsize(f"<{_SCALARS.get(kind, 'B')}")
        if count > (self.size - self.place) // least:
            raise _bad(self.path, f"metadata {key!r}: {count} values do not fit into the file")
        if count > MAX_VALUES:
            raise _bad(
                self.path, f"metadata {key!r}: {count} values; at most {MAX_VALUES} are read"
            )
        if kind == _STRING:
            return [self._string(f"a value of {key!r}") for _ in range(count)]
        if kind != _BOOL and kind not in _SCALARS:
            raise _bad(self.path, f"metadata {key!r}: an array of type {kind} is not read")
        values = array.array(_SCALARS.get(kind, "B"))
        values.frombytes(self._take(count * least))
        if sys.byteorder == "big":
            values.byteswap()
        return [value != 0 for value in values] if kind == _BOOL else values.tolist()

    def _tensor(self) -> GGUFTensor:
        name = self._string("a tensor's name")
        rank = self._number("I")
        if not 1 <= rank <= MAX_DIMENSIONS:
            raise _bad(self.path, f"tensor {name!r}: {rank} dimensions: must be 1 to 4")
        sizes = [self._number("Q") for _ in range(rank)]
        if any(not 0 < size < 2**48 for size in sizes):
            raise _bad(self.path, f"tensor {name!r}: sizes {sizes}: must be above 0 and below 2^48")
        kind = self._number("I")
        block = BLOCK_TYPES.get(kind)
        if block is None:
            known = ", ".join(each.name for each in BLOCK_TYPES.values())
            raise WeightsError(
                f"{self.path}: tensor {name!r}: blocks of type {_UNREAD.get(kind, kind)} are not "
                f"read; these are: {known}"
            )
        if sizes[0] % block.elements:
            raise _bad(self.path, f"tensor {name!r}: rows of {sizes[0]} numbers: must be multiples "
                       f"of {block.elements} for {block.name}")  # fmt: skip
        num_bytes = math.prod(sizes) // block.elements * block.num_bytes
        shape, offset = tuple(reversed(sizes)), self._number("Q")
        return GGUFTensor(name, shape, block, self.path, offset, num_bytes)

    def _alignment(self, metadata: Mapping[str, Any]) -> int:
        value = metadata.get("general.alignment", 32)
        if type(value) is not int or not 8 <= value <= MAX_ALIGNMENT or value % 8:
            raise _bad(self.path, f"general.alignment = {value!r}: must be a multiple of 8 up to "
                       f"{MAX_ALIGNMENT}")  # fmt: skip
        return value

    def _placed(self, listed: list[GGUFTensor], alignment: int) -> tuple[GGUFTensor, ...]:
        """Tensors with offsets from the file's start; none may overlap another or the file's end."""
        start = end = -(-self.place // alignment) * alignment
        names: set[str] = set()
        placed = []
        for tensor in sorted(listed, key=lambda tensor: tensor.offset):
            if tensor.name in names:
                raise _bad(self.path, f"tensor {tensor.name!r} occurs twice")
            names.add(tensor.name)
            offset = start + tensor.offset
            if tensor.offset % alignment:
                raise _bad(self.path, f"tensor {tensor.name!r}: offset {tensor.offset}: must be a "
                           f"multiple of {alignment}")  # fmt: skip
            if offset < end:
                raise _bad(self.path, f"tensor {tensor.name!r} overlaps the tensor before it")
            end = offset + tensor.num_bytes
            if end > self.size:
                raise _bad(self.path, f"tensor {tensor.name!r} ends at byte {end}, the file has "
                           f"{self.size} (truncated?)")  # fmt: skip
            placed.append(tensor._replace(offset=offset))
        return tuple(placed)


def _bad(path: Path, why: str) -> WeightsError:
    return WeightsError(f"{path}: not a valid GGUF file: {why}")
