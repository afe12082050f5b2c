from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import msgspec
import pytest
import torch

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.kv import (
    FullAttentionSpec,
    KVCacheConfig,
    KVCacheGroup,
    RecurrentSpec,
    StateShape,
)
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.messages import ModelPass, Stop, WorkerCall


def passed_on(*values: Any) -> list[Any]:
    """Values that went through a socket, in order."""
    here, there = socket.socketpair()
    with here, there:
        sender = threading.Thread(
            target=lambda: [frames.send(here, frames.pack(value)) for value in values]
        )
        sender.start()
        found = [frames.receive(there) for _ in values]
        sender.join()
    return found


def same(left: Any, right: Any) -> bool:
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if dataclasses.is_dataclass(left):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, tuple | list):
        return (
            type(left) is type(right)
            and len(left) == len(right)
            and all(same(a, b) for a, b in zip(left, right))
        )
    if isinstance(left, dict):
        return left.keys() == right.keys() and all(same(left[key], right[key]) for key in left)
    return bool(left == right) and type(left) is type(right)


BATCH = ForwardBatch(
    input_ids=torch.arange(5),
    positions=torch.arange(5),
    cu_seqlens_q=torch.tensor([0, 2, 5], dtype=torch.int32),
    seq_lens=torch.tensor([2, 3], dtype=torch.int32),
    max_seqlen_q=3,
    max_seqlen_k=3,
    groups=(
        GroupBatch(torch.zeros(2, 0, dtype=torch.int32), torch.arange(5), state_in=torch.tensor([-1, 4])),
    ),
    extra={INPUT_EMBEDS: InputEmbeds(torch.tensor([1]), torch.randn(1, 8).bfloat16())},
)  # fmt: skip


@pytest.mark.parametrize(
    "value",
    [
        None, 3, -1.5, "text", b"bytes", True, [], (), {}, [1, (2, [3])], {"a": {"b": None}},
        torch.randn(3, 5), torch.randn(4, 6).T, torch.tensor(3.0), torch.zeros(0, 4, dtype=torch.int8),
        torch.tensor([True, False]), torch.randn(7).half(), [torch.ones(1), torch.ones(33)],
        ModelPass("forward", (BATCH,)), WorkerCall(3, "load", ()), Stop(),
        KVCacheConfig((5, 2), (
            KVCacheGroup(("a",), FullAttentionSpec(8, 2, 16, "float32")),
            KVCacheGroup(("b",), RecurrentSpec(8, (StateShape((2, 3), "float32"),)), 1),
        )),
    ],
    ids=lambda value: type(value).__name__,
)  # fmt: skip
def test_values_arrive_as_they_were(value: Any) -> None:
    [found] = passed_on(value)
    assert same(value, found)


def test_frames_do_not_run_into_each_other() -> None:
    values = [torch.arange(count) for count in (1, 0, 100_000, 7)] + ["end"]
    assert all(same(a, b) for a, b in zip(values, passed_on(*values), strict=True))


def test_received_tensors_may_be_changed() -> None:
    [found] = passed_on(torch.ones(4))
    assert found.add_(1).tolist() == [2, 2, 2, 2]


@pytest.mark.parametrize("value", [{1, 2}, lambda: 0, frames.BadFrame("x"), object()])
def test_what_is_no_data_is_not_sent(value: Any) -> None:
    with pytest.raises(TypeError, match="is not sent to other ranks"):
        frames.pack([value])


@pytest.mark.parametrize(
    "tree",
    [["x", 1], ["o", "Popen", [["l", ["true"]]]], ["o", "Stop", [1]], ["t", "float32", [9], 0],
     ["t", "no_dtype", [1], 0], ["t"], [], ["m", ["a"], []], ["t", "float32", [1], 64]],
    ids=repr,
)  # fmt: skip
def test_frames_of_others_are_refused(tree: Any) -> None:
    with pytest.raises(frames.BadFrame):
        frames.unpack(msgspec.msgpack.encode(tree), bytearray(8))
    with pytest.raises(frames.BadFrame):
        frames.unpack(b"\xc1", bytearray())


def test_the_end_of_the_other_side() -> None:
    here, there = socket.socketpair()
    with there:
        here.send(b"half")
        here.close()
        with pytest.raises(EOFError):
            frames.receive(there)
