"""Passes of steps as bytes: what a batch has in common with the one before is not said again.

A frame of a pass is

    lengths   :data:`PASS` and the number of bytes that follow
    head      bytes of the layout (0: it is the last frame's), and K
    layout    what the pass is, beside numbers: a msgpack tree
    ints      [K] int64
    small     the tensors of less than :data:`LARGE_FROM` bytes, one after the other, each filled up to a
              multiple of 64 bytes
    large     for each of the others a byte, which says whether it is as it was, comes whole, or comes as
              places and values of the elements that differ; and what comes

While the same requests decode, the layout is the same, and nothing is large but tables of many blocks. Then
a frame is one copy of the tensors' memory, and the other side's tensors are made before it comes: few lines
run on either side, as they run once a step, from cold caches. Nothing depends on what a step does: requests
that join, go on, are preempted or guess are batches like others.

One sender writes passes, all receivers read all of them in order, and whichever ends, ends the engine: the
two sides cannot come apart. Nothing is pickled, nothing evaluated.

Letters: N tensors, K ints.
"""

from __future__ import annotations

import ctypes
import math
import struct
from collections.abc import Sequence
from operator import attrgetter
from typing import TYPE_CHECKING, Any

import msgspec

from headrace_core.batch import ForwardBatch
from headrace_engine.multiproc.messages import ModelPass

if TYPE_CHECKING:
    from torch import Tensor

PASS = (1 << 64) - 1
"""In place of the length of a frame's tree: the frame is a pass."""
LARGE_FROM = 64 << 10
"""Bytes of a tensor from which on it is compared with the last one's; smaller ones are copied sooner."""
SAME, WHOLE, SPARSE = b"\x00", b"\x01", b"\x02"
"""How a large tensor comes."""
HEAD = struct.Struct("<II")
COUNT = struct.Struct("<I")
"""Number of elements that differ."""
OF_BATCH, OF_GROUP = 8, 5
"""Tensors of a batch itself, and of each of its groups."""
NO_NUMBER = -(1 << 62)
"""Stands for None among the ints."""
_ALIGNMENT = 64
_START = struct.Struct("<QQII")
"""Lengths and head."""
_of_batch = attrgetter(
    "input_ids", "positions", "cu_seqlens_q", "seq_lens", "logits_rows", "token_type_ids", "key_lens",
    "last_keys",
)  # fmt: skip
_of_group = attrgetter("block_table", "slot_mapping", "seq_lens", "state_in", "state_out")
# ctypes.string_at without its own lines, and numpy's way to memory without numpy: fewer of both are cold.
_bytes_at = ctypes.PYFUNCTYPE(ctypes.py_object, ctypes.c_void_p, ctypes.c_ssize_t)(
    ("PyBytes_FromStringAndSize", ctypes.pythonapi)
)


class Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything about a pass but its ints and the contents of its tensors."""

    method: str
    num_groups: int
    extra: tuple[str, ...]
    """Names of further tensors."""
    tensors: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """[N]; dtype and shape. Those of the batch, of each group, and the further ones; None: not there."""


def aligned(size: int) -> int:
    """The least multiple of 64 that is as large."""
    return -(-size // _ALIGNMENT) * _ALIGNMENT


class PassEncoder:
    """Rank 0's side. One thread at a time."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        """The last layout, as torch says it, and K."""
        self._ints = struct.Struct("")
        self._size = 0
        """Bytes of head, ints and small tensors."""
        self._fill: list[bytes | None] = []
        """[N]; what follows each of the small tensors."""
        self._large: list[int] = []
        """Indices of the large ones."""
        self._known: dict[int, bytes] = {}
        """Their last contents."""

    def encode(self, message: ModelPass) -> bytes | None:
        """The frame of a pass of a batch, and perhaps of numbers, without the batch's attention metadata.

        None: it is another pass, or holds what is not sent so (vectors).
        """
        method, args = message
        batch = args[0] if args else None
        if type(batch) is not ForwardBatch or batch.encoder_states is not None:
            return None
        tensors, ints = _of_batch(batch), [batch.max_seqlen_q, batch.max_seqlen_k]
        for group in batch.groups:
            tensors += _of_group(group)
            ints.append(group.max_seqlen_k)
        if batch.extra:
            tensors += tuple(batch.extra.values())
        for other in args[1:]:
            if other is not None and type(other) is not int:
                return None
            ints.append(NO_NUMBER if other is None else other)
        try:
            shapes, contents = _contents(tensors)
        except AttributeError:  # one is no tensor
            return None
        key = (method, len(batch.groups), tuple(batch.extra), shapes, len(ints))
        layout = b"" if key == self._key else self._begin(key)
        pieces = [b"", layout, self._ints.pack(*ints)]
        for content, fill in zip(contents, self._fill):
            if fill is not None:
                pieces += (content, fill)
        size = self._size + len(layout)
        if self._large:
            parts = self._large_parts(contents)
            pieces += parts
            size += sum(map(len, parts))
        pieces[0] = _START.pack(PASS, size, len(layout), len(ints))
        return b"".join(pieces)

    def _begin(self, key: tuple[Any, ...]) -> bytes:
        """From now on passes are of this layout, which is returned."""
        self._key, self._large, self._known, self._fill = key, [], {}, []
        method, num_groups, extra, shapes, num_ints = key
        self._ints = struct.Struct(f"<{num_ints}q")
        self._size = HEAD.size + self._ints.size
        for i, one in enumerate(shapes):
            size = 0 if one is None else math.prod(one[1]) * one[0].itemsize
            if size >= LARGE_FROM:
                self._large.append(i)
            is_small = one is not None and size < LARGE_FROM
            self._fill.append(bytes(aligned(size) - size) if is_small else None)
            self._size += aligned(size) if is_small else 0
        tensors = tuple(
            None if one is None else (str(one[0]).removeprefix("torch."), tuple(one[1]))
            for one in shapes
        )
        return msgspec.msgpack.encode(Layout(method, num_groups, extra, tensors))

    def _large_parts(self, contents: Sequence[bytes]) -> list[bytes]:
        """Frames' part of the large tensors."""
        parts: list[bytes] = []
        for i in self._large:
            before, content = self._known.get(i), contents[i]
            self._known[i] = content
            if content == before:
                parts.append(SAME)
            else:
                itemsize = self._key[3][i][0].itemsize
                sparse = None if before is None else _sparse(content, before, itemsize)
                parts += (WHOLE, content) if sparse is None else (SPARSE, *sparse)
        return parts


_Shape = tuple[Any, Sequence[int]]


def _contents(tensors: Sequence[Tensor | None]) -> tuple[list[_Shape | None], list[bytes]]:
    """[N] each: dtype and shape, and the bytes of the elements; None and none where there is no tensor."""
    shapes: list[_Shape | None] = []
    contents: list[bytes] = []
    for tensor in tensors:
        if tensor is None:
            shapes.append(None)
            contents.append(b"")
            continue
        if not (tensor.is_cpu and tensor.is_contiguous()):
            tensor = tensor.detach().cpu().contiguous()
        shapes.append((tensor.dtype, tensor.shape))
        contents.append(_bytes_at(tensor.data_ptr(), tensor.nbytes))
    return shapes, contents


def _sparse(content: bytes, before: bytes, itemsize: int) -> tuple[bytes, ...] | None:
    """Number, places and values of the elements that differ; None: they are many."""
    import numpy as np

    # Bits, not numbers, are compared: a NaN differs from itself.
    bits = np.dtype(f"u{itemsize}")
    new = np.frombuffer(content, bits)
    places = (new != np.frombuffer(before, bits)).nonzero()[0]
    if len(places) * (COUNT.size + itemsize) * 2 > len(content):
        return None
    return COUNT.pack(len(places)), places.astype("<u4").tobytes(), new[places].tobytes()
