"""Passes of steps from bytes (:mod:`.pass_frames`), on the ranks that follow.

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
from headrace_engine.multiproc.pass_frames import (
    COUNT,
    HEAD,
    LARGE_FROM,
    NO_NUMBER,
    OF_BATCH,
    OF_GROUP,
    SAME,
    SPARSE,
    WHOLE,
    Layout,
    aligned,
)

if TYPE_CHECKING:
    from torch import Tensor

REHEARSED_BYTES = 96 << 10
"""Size of the longest pass that is rehearsed (:meth:`PassDecoder.prepare`): copies take their time, too."""
_LAYOUTS = msgspec.msgpack.Decoder(Layout)


class PassDecoder:
    """Another rank's side. One thread."""

    def __init__(self) -> None:
        self._layout: _ReceivedLayout | None = None
        self._memory: _Memory | None = None
        """Memory for the next pass, if it is of this layout."""
        self._last: bytes | bytearray = b""
        """The last pass, as one of the layout before it; empty: it was long."""

    def decode(self, body: bytes | bytearray) -> ModelPass:
        """The pass of a frame of :meth:`PassEncoder.encode`. Its tensors are nobody else's.

        Args:
            body: the frame without its lengths.

        Raises:
            BadFrame: it is none.
        """
        try:
            return self._decoded(body)
        except (
            msgspec.MsgspecError, struct.error, ValueError, TypeError, IndexError, RuntimeError,
        ) as error:  # fmt: skip
            raise BadFrame(f"a pass of {len(body)} bytes has no value: {error}") from error

    def prepare(self, *, rehearse: bool = False) -> None:
        """Use time in which nobody waits for this rank: have memory for the next pass.

        Args:
            rehearse: decode the last pass once more, so that what this takes is in the processor's caches.
        """
        if rehearse and self._last:
            self._decoded(self._last)
        if self._memory is None and self._layout is not None:
            self._memory = self._layout.memory()

    def _decoded(self, body: bytes | bytearray) -> ModelPass:
        size, num_ints = HEAD.unpack_from(body)
        at = HEAD.size + size
        if size:
            said = _LAYOUTS.decode(memoryview(body)[HEAD.size : at])
            self._layout, self._memory = _ReceivedLayout(said, num_ints, len(body)), None
        layout, begin = self._layout, at
        if layout is None or num_ints != layout.num_ints:
            raise BadFrame(f"a pass of {num_ints} numbers does not say what it is")
        ints = layout.ints.unpack_from(body, at)
        at += layout.ints.size
        memory, self._memory = self._memory or layout.memory(), None
        # A view cannot be resized: a part that is too short is an error.
        view, end = memoryview(body), at + layout.small_bytes
        memory.view[: layout.small_bytes] = view[at:end]
        if layout.large:
            end = layout.update_large(view, end)
            memory.view[layout.small_bytes :] = layout.large_state
        if end != len(body):
            raise BadFrame(f"a pass of {len(body)} bytes brings {end}")
        self._last = body
        if size or end > REHEARSED_BYTES:
            self._last = HEAD.pack(0, num_ints) + body[begin:] if end <= REHEARSED_BYTES else b""
        return layout.made(memory.tensors, ints)


class _ReceivedLayout:
    """A layout of passes: where tensors lie, and how a pass is made of them.

    Args:
        num_ints: K.
        most: bytes that its tensors have at most.

    Raises:
        BadFrame: there is no such batch.
    """

    def __init__(self, said: Layout, num_ints: int, most: int) -> None:
        self._method, self._num_groups, self._extra = said.method, said.num_groups, said.extra
        named = OF_BATCH + OF_GROUP * said.num_groups
        if said.num_groups < 0 or len(said.tensors) != named + len(said.extra):
            raise BadFrame(f"a batch of {said.num_groups} groups has other tensors")
        if not 2 + said.num_groups <= num_ints <= most:
            raise BadFrame(f"{num_ints} numbers of a batch of {said.num_groups} groups")
        if None in said.tensors[:4]:
            raise BadFrame("a batch without tokens")
        if any(None in said.tensors[i : i + 2] for i in range(OF_BATCH, named, OF_GROUP)):
            raise BadFrame("a group without blocks")
        self.num_ints, self.ints = num_ints, struct.Struct(f"<{num_ints}q")
        self._slots = [None if one is None else _Slot(*one) for one in said.tensors]
        slots = [slot for slot in self._slots if slot is not None]
        size = sum(slot.size for slot in slots)
        if size > most:
            raise BadFrame(f"tensors of {size} bytes in a pass of {most}")
        self.large = [slot for slot in slots if slot.size >= LARGE_FROM]
        end = 0
        for slot in slots:
            if slot.size < LARGE_FROM:
                slot.start, end = end, end + aligned(slot.size)
        self.small_bytes = end
        for slot in self.large:
            slot.start, end = end, end + aligned(slot.size)
        self.large_state = bytearray(end - self.small_bytes)
        """Contents of the last large tensors."""
        self._bytes = end

    def memory(self) -> _Memory:
        """New memory of a pass."""
        return _Memory(self._slots, self._bytes)

    def update_large(self, view: memoryview, at: int) -> int:
        """Take over what a frame says of the large tensors; where that ends."""
        state = memoryview(self.large_state)
        for slot in self.large:
            code = bytes(view[at : at + 1])
            at += 1
            start = slot.start - self.small_bytes
            if code == WHOLE:
                state[start : start + slot.size] = view[at : at + slot.size]
                at += slot.size
            elif code == SPARSE:
                at = _put(slot, state[start:], view, at)
            elif code != SAME:
                raise BadFrame(f"a tensor comes by code {code!r}: must be same, whole or sparse")
        return at

    def made(self, tensors: Sequence[Any], ints: Sequence[int]) -> ModelPass:
        """The pass of tensors [N], None where there is none, and ints [K]."""
        count = self._num_groups
        end = OF_BATCH + OF_GROUP * count
        groups = []
        for g in range(count):
            first = OF_BATCH + OF_GROUP * g
            table, slots, seq_lens, state_in, state_out = tensors[first : first + OF_GROUP]
            groups.append(GroupBatch(table, slots, seq_lens, ints[2 + g], state_in, state_out))
        ids, positions, cu_seqlens, lengths, rows, types, key_lens, last_keys = tensors[:OF_BATCH]
        batch = ForwardBatch(
            ids, positions, cu_seqlens, lengths, ints[0], ints[1], tuple(groups), (), rows, types, None,
            key_lens, last_keys, dict(zip(self._extra, tensors[end:])),
        )  # fmt: skip
        others = [None if number == NO_NUMBER else number for number in ints[2 + count :]]
        return ModelPass(self._method, (batch, *others))


class _Memory:
    """Memory of a pass, and the tensors [N] in it."""

    __slots__ = ("tensors", "view")

    def __init__(self, slots: Sequence[_Slot | None], size: int) -> None:
        data = bytearray(size)
        self.view = memoryview(data)
        self.tensors = [None if slot is None else slot.tensor(data) for slot in slots]


class _Slot:
    """Where a tensor lies, and what it is."""

    __slots__ = ("count", "dtype", "shape", "size", "start")

    def __init__(self, name: str, shape: tuple[int, ...]) -> None:
        import torch

        if name not in DTYPES or min(shape, default=0) < 0:
            raise BadFrame(f"{name!r} of {shape}: must be of {', '.join(DTYPES)}")
        self.dtype, self.shape = getattr(torch, name), shape
        self.count = math.prod(shape)
        self.start, self.size = 0, self.count * self.dtype.itemsize

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

    [count] = COUNT.unpack_from(view, at)
    at += COUNT.size
    bits = f"u{slot.dtype.itemsize}"
    places = np.frombuffer(view, "<u4", count, at) if count else np.zeros(0, "<u4")
    at += 4 * count
    values = np.frombuffer(view, bits, count, at) if count else np.zeros(0, bits)
    np.frombuffer(state, bits, slot.count)[places] = values
    return at + values.nbytes
