"""Passes of steps as bytes: what a batch has in common with the one before is not sent again.

Both sides keep the tensors of the last batch that was sent so. A frame of a pass says which of them are as
they were, brings those that are not, and of a large one only the elements that differ. How many tensors there
are, and their shapes (the *layout*), is said when it changes; all tensors come with it. So nothing depends on
what a step does: requests that join, go on, are preempted or guess are batches like others.

One sender writes passes, all receivers read all of them in order, and whichever ends, ends the engine: the
two sides cannot come apart. Nothing is pickled, nothing evaluated.

Letters: N tensors, K ints.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import msgspec

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_engine.multiproc.frames import DTYPES, BadFrame
from headrace_engine.multiproc.messages import ModelPass

if TYPE_CHECKING:
    import numpy as np
    import numpy.typing as npt
    from torch import Tensor

    Array = npt.NDArray[Any]

SPARSE_FROM = 2048
"""Bytes of a tensor from which on elements that differ are sent alone, if they are few."""
_SAME, _WHOLE, _SPARSE = range(3)
_HEAD = struct.Struct("<II")
"""Bytes of the layout (0: as before), and K."""
_COUNT = struct.Struct("<I")
_OF_BATCH, _OF_GROUP = 8, 5
"""Tensors of a batch itself, and of each of its groups."""
_ALIGNMENT = 64
_NONE = -(1 << 62)
"""Stands for None among the ints."""


class _Layout(msgspec.Struct, frozen=True, array_like=True, forbid_unknown_fields=True):
    """Everything about a pass but its ints and the contents of its tensors."""

    method: str
    num_groups: int
    extra: tuple[str, ...]
    """Names of further tensors."""
    tensors: tuple[tuple[str, tuple[int, ...]] | None, ...]
    """[N]; dtype and shape. Those of the batch, of each group, and the further ones; None: not there."""


_DECODER = msgspec.msgpack.Decoder(_Layout)


def _tensors_of(batch: ForwardBatch) -> list[Tensor | None]:
    found = [
        batch.input_ids, batch.positions, batch.cu_seqlens_q, batch.seq_lens, batch.logits_rows,
        batch.token_type_ids, batch.key_lens, batch.last_keys,
    ]  # fmt: skip
    for group in batch.groups:
        found += (
            group.block_table, group.slot_mapping, group.seq_lens, group.state_in, group.state_out,
        )  # fmt: skip
    found += batch.extra.values()
    return found


class PassEncoder:
    """Rank 0's side. One thread at a time."""

    def __init__(self) -> None:
        self._key: tuple[Any, ...] = ()
        """The last layout, as numpy says it."""
        self._known: list[bytes] = []
        """Contents of the last tensors."""

    def encode(self, message: ModelPass) -> bytes | None:
        """A pass of a batch, and perhaps of a number; None: it is another one, or holds what is not sent so
        (vectors, numbers of a dtype that numpy has not)."""
        batch = message.args[0] if message.args else None
        if type(batch) is not ForwardBatch or batch.encoder_states is not None or batch.attention:
            return None
        ints = [batch.max_seqlen_q, batch.max_seqlen_k, *[g.max_seqlen_k for g in batch.groups]]
        for other in message.args[1:]:
            if other is not None and type(other) is not int:
                return None
            ints.append(_NONE if other is None else other)
        try:
            arrays = [None if t is None else _array(t) for t in _tensors_of(batch)]
        except (TypeError, AttributeError, RuntimeError):
            return None
        shapes = [None if a is None else (a.dtype, a.shape) for a in arrays]
        key = (message.method, len(batch.groups), tuple(batch.extra), shapes)
        contents = [b"" if a is None else a.tobytes() for a in arrays]
        if key == self._key:
            layout, codes, parts = b"", *_differences(arrays, contents, self._known)
        else:
            layout = msgspec.msgpack.encode(_layout(*key))
            codes, parts = bytes([_WHOLE]) * len(contents), contents
        self._key, self._known = key, contents
        head = _HEAD.pack(len(layout), len(ints))
        return b"".join([head, layout, struct.pack(f"<{len(ints)}q", *ints), codes, *parts])


def _array(tensor: Tensor) -> Array:
    found: Array = (tensor if tensor.device.type == "cpu" else tensor.cpu()).numpy()
    return found


def _layout(
    method: str,
    num_groups: int,
    extra: tuple[str, ...],
    shapes: Sequence[tuple[np.dtype[Any], tuple[int, ...]] | None],
) -> _Layout:
    tensors = tuple(None if one is None else (one[0].name, one[1]) for one in shapes)
    return _Layout(method, num_groups, extra, tensors)


def _differences(
    arrays: Sequence[Array | None], contents: Sequence[bytes], known: Sequence[bytes]
) -> tuple[bytes, list[bytes]]:
    """[N] codes, and what is sent of the tensors."""
    codes = bytearray(len(contents))
    parts: list[bytes] = []
    for i, (content, before) in enumerate(zip(contents, known)):
        if content == before:
            continue
        codes[i] = _WHOLE
        if len(content) >= SPARSE_FROM:
            array = arrays[i]
            assert array is not None
            sparse = _sparse(content, before, array.dtype)
            if sparse is not None:
                codes[i] = _SPARSE
                parts += sparse
                continue
        parts.append(content)
    return bytes(codes), parts


def _sparse(content: bytes, before: bytes, dtype: np.dtype[Any]) -> tuple[bytes, ...] | None:
    """Number, places and values of the elements that differ; None: they are many."""
    import numpy as np

    new = np.frombuffer(content, dtype)
    # Bits, not numbers, are compared: a NaN differs from itself.
    bits = f"u{dtype.itemsize}"
    places = (new.view(bits) != np.frombuffer(before, bits)).nonzero()[0]
    if len(places) * (_COUNT.size + dtype.itemsize) * 2 > len(content):
        return None
    return _COUNT.pack(len(places)), places.astype("<u4").tobytes(), new[places].tobytes()


class PassDecoder:
    """Another rank's side. One thread."""

    def __init__(self) -> None:
        self._method = ""
        self._num_groups = 0
        self._extra: tuple[str, ...] = ()
        self._slots: list[_Slot | None] = []
        self._state = bytearray()
        """Contents of the last tensors, each at a multiple of the alignment."""

    def decode(self, body: bytearray) -> ModelPass:
        """The pass of :meth:`PassEncoder.encode`. Its tensors are nobody else's.

        Raises:
            BadFrame: it is none.
        """
        try:
            ints = self._read(body)
            return self._made(ints)
        except (
            msgspec.MsgspecError, struct.error, ValueError, TypeError, IndexError, RuntimeError,
        ) as error:  # fmt: skip
            raise BadFrame(f"a pass of {len(body)} bytes has no value: {error}") from error

    def _read(self, body: bytearray) -> tuple[int, ...]:
        """Take over what a frame says; its ints."""
        size, num_ints = _HEAD.unpack_from(body)
        at = _HEAD.size + size
        if size:
            self._adopt(_DECODER.decode(memoryview(body)[_HEAD.size : at]), len(body))
        ints = struct.unpack_from(f"<{num_ints}q", body, at)
        at += 8 * num_ints
        slots = self._slots
        codes = body[at : at + len(slots)]
        at += len(slots)
        if len(codes) < len(slots) or (size and codes.strip(b"\x01")):
            raise BadFrame("a pass does not say what it brings")
        # A view cannot be resized: a part that is too short is an error.
        state, view = memoryview(self._state), memoryview(body)
        for slot, code in zip(slots, codes):
            if code == _SAME or slot is None:
                continue
            if code == _WHOLE:
                state[slot.start : slot.end] = view[at : at + slot.size]
                at += slot.size
            elif code == _SPARSE:
                at = _put(slot, state, view, at)
            else:
                raise BadFrame(f"{code} is no way to bring a tensor")
        if at != len(body):
            raise BadFrame(f"a pass of {len(body)} bytes brings {at}")
        return ints

    def _adopt(self, layout: _Layout, most: int) -> None:
        """Begin anew with a layout, whose tensors have so many bytes at most."""
        named = _OF_BATCH + _OF_GROUP * layout.num_groups
        if layout.num_groups < 0 or len(layout.tensors) != named + len(layout.extra):
            raise BadFrame(f"a batch of {layout.num_groups} groups has other tensors")
        slots: list[_Slot | None] = []
        end = size = 0
        for one in layout.tensors:
            if one is None:
                slots.append(None)
                continue
            slots.append(_Slot(*one, start=end))
            size += slots[-1].size  # type: ignore[union-attr] # it is one
            end = -(-(end + slots[-1].size) // _ALIGNMENT) * _ALIGNMENT  # type: ignore[union-attr]
        if size > most:
            raise BadFrame(f"tensors of {size} bytes in a pass of {most}")
        self._method, self._num_groups, self._extra = layout.method, layout.num_groups, layout.extra
        self._slots, self._state = slots, bytearray(end)

    def _made(self, ints: tuple[int, ...]) -> ModelPass:
        data = bytearray(self._state)  # a model may write into what it gets
        found = [None if slot is None else slot.tensor(data) for slot in self._slots]
        count = self._num_groups
        if len(ints) < 2 + count:
            raise BadFrame(f"{len(ints)} numbers of a batch of {count} groups")
        groups = tuple(
            _group(found[first : first + _OF_GROUP], ints[2 + g])
            for g, first in enumerate(range(_OF_BATCH, _OF_BATCH + _OF_GROUP * count, _OF_GROUP))
        )
        further = found[_OF_BATCH + _OF_GROUP * count :]
        ids, positions, cu_seqlens, seq_lens, rows, types, key_lens, last_keys = found[:_OF_BATCH]
        if ids is None or positions is None or cu_seqlens is None or seq_lens is None:
            raise BadFrame("a batch without tokens")
        batch = ForwardBatch(
            ids, positions, cu_seqlens, seq_lens, ints[0], ints[1], groups, (), rows, types, None,
            key_lens, last_keys, dict(zip(self._extra, further, strict=True)),
        )  # fmt: skip
        others = [None if number == _NONE else number for number in ints[2 + count :]]
        return ModelPass(self._method, (batch, *others))


class _Slot:
    """Where a tensor lies, and what it is."""

    __slots__ = ("count", "dtype", "end", "name", "shape", "size", "start")

    def __init__(self, name: str, shape: tuple[int, ...], start: int) -> None:
        import torch

        if name not in DTYPES or min(shape, default=0) < 0:
            raise BadFrame(f"{name!r} of {shape}: must be of {', '.join(DTYPES)}")
        self.name, self.dtype, self.shape = name, getattr(torch, name), shape
        self.count = math.prod(shape)
        self.start, self.size = start, self.count * self.dtype.itemsize
        self.end = start + self.size

    def tensor(self, data: bytearray) -> Tensor:
        """The tensor, in this memory."""
        import torch

        if not self.count:
            return torch.empty(self.shape, dtype=self.dtype)
        flat = torch.frombuffer(data, dtype=self.dtype, count=self.count, offset=self.start)
        return flat if len(self.shape) == 1 else flat.view(self.shape)


def _put(slot: _Slot, state: memoryview, view: memoryview, at: int) -> int:
    """Put single elements into a tensor; where the next part of the frame begins."""
    import numpy as np

    [count] = _COUNT.unpack_from(view, at)
    at += _COUNT.size
    bits = f"u{slot.dtype.itemsize}"
    places = np.frombuffer(view, "<u4", count, at) if count else np.zeros(0, "<u4")
    at += 4 * count
    values = np.frombuffer(view, bits, count, at) if count else np.zeros(0, bits)
    np.frombuffer(state, bits, slot.count, slot.start)[places] = values
    return at + values.nbytes


def _group(tensors: Sequence[Tensor | None], max_seqlen_k: int) -> GroupBatch:
    table, slots, seq_lens, state_in, state_out = tensors
    if table is None or slots is None:
        raise BadFrame("a group without blocks")
    return GroupBatch(table, slots, seq_lens, max_seqlen_k, state_in, state_out)
