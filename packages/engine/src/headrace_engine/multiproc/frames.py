"""Values and tensors as bytes, between the ranks of an engine. Nothing is pickled, nothing evaluated.

A frame is two lengths, a msgpack tree and the bytes of its tensors, each at a multiple of
:data:`ALIGNMENT`. Objects in the tree are of the classes in :data:`CLASSES`, by name and fields; whatever
else is not plain data is refused where it is packed.
"""

from __future__ import annotations

import ctypes
import dataclasses
import math
import socket
import struct
import sys
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Any, cast

import msgspec

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.errors import EngineError
from headrace_core.executor import MemoryProfile
from headrace_core.kv import (
    ChunkedLocalSpec,
    CrossAttentionSpec,
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    KVCacheSpec,
    MLASpec,
    RecurrentSpec,
    SlidingWindowSpec,
    SparseIndexerSpec,
    StateShape,
)
from headrace_core.model import InputEmbeds
from headrace_engine.multiproc.messages import (
    Answer,
    Failed,
    ModelPass,
    Raised,
    Stop,
    WorkerCall,
)
from headrace_engine.multiproc.nodes.messages import (
    MirrorJoins,
    NodeAccepted,
    NodeEnds,
    NodeJoins,
    NodeRefused,
    RankJoins,
)

if TYPE_CHECKING:
    from torch import Tensor

ALIGNMENT = 64
COPIED_BYTES = 16 << 10
"""Size up to which a tensor's bytes are copied: a view of them takes longer to make."""
CLASSES: dict[str, type[Any]] = {
    cls.__name__: cls
    for cls in (
        ForwardBatch, GroupBatch, InputEmbeds, MemoryProfile, KVCacheConfig, KVCacheGroup, KVCacheSpec,
        FullAttentionSpec, SlidingWindowSpec, ChunkedLocalSpec, MLASpec, SparseIndexerSpec, StateShape,
        RecurrentSpec, CrossAttentionSpec, ModelPass, WorkerCall, Stop, Answer, Raised, Failed,
        NodeJoins, NodeAccepted, NodeRefused, NodeEnds, RankJoins, MirrorJoins,
    )
}  # fmt: skip
"""Classes whose objects may be in a frame, beside plain data and tensors."""
DTYPES = (
    "float32", "float16", "bfloat16", "float64", "int64", "int32", "int16", "int8", "uint8", "bool",
)  # fmt: skip
"""Names of torch's dtypes that tensors may have."""
_LENGTHS = struct.Struct("<QQ")
_TENSOR, _TUPLE, _LIST, _MAP, _OBJECT = "t", "u", "l", "m", "o"
_PLAIN = (int, float, str, bytes, bool, type(None))


# torch is imported where a tensor is, so that a rank's process listens before it has been imported.


class BadFrame(EngineError):
    """A frame is not what a rank of this engine sends."""


def pack(value: Any) -> list[bytes | memoryview]:
    """A frame, in pieces that are to be sent one after the other.

    Args:
        value: a tree of plain data, tensors (any device; copied from it) and objects of :data:`CLASSES`.

    Raises:
        TypeError: it holds something else.
    """
    tensors: list[Tensor] = []
    offsets = [0]
    tree = msgspec.msgpack.encode(_packed(value, tensors, offsets))
    pieces: list[bytes | memoryview] = [_LENGTHS.pack(len(tree), offsets[-1]), tree]
    end = 0
    for tensor, start in zip(tensors, offsets):
        if start > end:
            pieces.append(bytes(start - end))
        data = _bytes(tensor)
        pieces.append(data)
        end = start + len(data)
    if offsets[-1] > end:
        pieces.append(bytes(offsets[-1] - end))
    return pieces


def unpack(tree: bytes, data: bytearray) -> Any:
    """The value of a frame; its tensors are views of ``data``.

    Raises:
        BadFrame: it is none of :func:`pack`.
    """
    try:
        return _unpacked(msgspec.msgpack.decode(tree), data)
    except BadFrame:
        raise
    except (msgspec.MsgspecError, KeyError, ValueError, TypeError, IndexError) as error:
        raise BadFrame(
            f"a frame of {len(tree)} + {len(data)} bytes has no value: {error}"
        ) from error


def send(connection: socket.socket, pieces: Sequence[bytes | memoryview]) -> None:
    """Send a frame whole. Raises OSError."""
    left = [memoryview(piece) for piece in pieces if len(piece)]
    while left:
        count = connection.sendmsg(left[:512])
        while left and count >= len(left[0]):
            count -= len(left.pop(0))
        if count:
            left[0] = left[0][count:]


def receive(connection: socket.socket, most: int | None = None) -> Any:
    """The next frame's value.

    Args:
        most: bytes of the longest frame that is read; None: any.

    Raises:
        EOFError: the other side is gone.
        OSError: of the connection.
        BadFrame: it is none, or is longer.
    """
    tree_size, data_size = _LENGTHS.unpack(_read(connection, _LENGTHS.size))
    if most is not None and tree_size + data_size > most:
        raise BadFrame(f"a frame of {tree_size} + {data_size} bytes: at most {most} are read")
    return unpack(bytes(_read(connection, tree_size)), _read(connection, data_size))


def _read(connection: socket.socket, size: int) -> bytearray:
    data = bytearray(size)
    left = memoryview(data)
    while left:
        count = connection.recv_into(left)
        if not count:
            raise EOFError("the connection is closed")
        left = left[count:]
    return data


def _packed(value: Any, tensors: list[Tensor], offsets: list[int]) -> Any:
    kind = type(value)
    if kind in _PLAIN:
        return value
    if "torch" in sys.modules and isinstance(value, sys.modules["torch"].Tensor):
        return _packed_tensor(value, tensors, offsets)
    if kind.__name__ in CLASSES and CLASSES[kind.__name__] is kind:
        return [_OBJECT, kind.__name__, _all(_fields(value), tensors, offsets)]
    if kind is tuple:
        return [_TUPLE, _all(value, tensors, offsets)]
    if kind is list:
        return [_LIST, _all(value, tensors, offsets)]
    if kind is dict:
        return [_MAP, list(value), _all(value.values(), tensors, offsets)]
    raise TypeError(f"a {kind.__name__} is not sent to other ranks: {value!r:.200}")


def _all(values: Iterable[Any], tensors: list[Tensor], offsets: list[int]) -> list[Any]:
    return [_packed(value, tensors, offsets) for value in values]


def _packed_tensor(value: Tensor, tensors: list[Tensor], offsets: list[int]) -> Any:
    tensor = value
    if tensor.device.type != "cpu" or not tensor.is_contiguous():
        tensor = tensor.detach().to("cpu").contiguous()
    start = offsets[-1]
    tensors.append(tensor)
    end = start + tensor.numel() * tensor.element_size()
    offsets.append(-(-end // ALIGNMENT) * ALIGNMENT)
    return [_TENSOR, str(tensor.dtype).removeprefix("torch."), list(tensor.shape), start]


def _bytes(tensor: Tensor) -> bytes | memoryview:
    """Content of a contiguous tensor in the host's memory."""
    size = tensor.numel() * tensor.element_size()
    if size <= COPIED_BYTES:
        return ctypes.string_at(tensor.data_ptr(), size) if size else b""
    import torch

    # As bytes: numpy has no bfloat16.
    return memoryview(cast(Any, tensor.detach().view(-1).view(torch.uint8).numpy()))


def _tensor(dtype: str, shape: list[int], start: int, data: bytearray) -> Tensor:
    import torch

    if dtype not in DTYPES:
        raise BadFrame(f"{dtype!r} is not one of {', '.join(DTYPES)}")
    kind, size = getattr(torch, dtype), math.prod(shape)
    if not size:
        return torch.empty(shape, dtype=kind)
    return torch.frombuffer(data, dtype=kind, count=size, offset=start).view(shape)


def _fields(value: Any) -> list[Any]:
    if isinstance(value, tuple):
        return list(value)
    return [getattr(value, field.name) for field in dataclasses.fields(value)]


def _made(kind: Any, values: list[Any]) -> Any:
    """An object of its fields' values, some of which may be given by name only."""
    if issubclass(kind, tuple):
        return kind(*values)
    names = (field.name for field in dataclasses.fields(kind))
    return kind(**dict(zip(names, values, strict=True)))


def _unpacked(tree: Any, data: bytearray) -> Any:
    if not isinstance(tree, list):
        return tree
    kind = tree[0]
    if kind == _TENSOR:
        _, dtype, shape, start = tree
        return _tensor(dtype, shape, start, data)
    if kind == _OBJECT:
        return _made(CLASSES[tree[1]], [_unpacked(field, data) for field in tree[2]])
    if kind == _TUPLE:
        return tuple(_unpacked(item, data) for item in tree[1])
    if kind == _LIST:
        return [_unpacked(item, data) for item in tree[1]]
    if kind == _MAP:
        return dict(zip(tree[1], (_unpacked(item, data) for item in tree[2]), strict=True))
    raise BadFrame(f"{kind!r} is no kind of value")
