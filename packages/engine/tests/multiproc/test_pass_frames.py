"""Passes that are sent as differences are the passes that were led, whatever steps do."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.incoming import EXPECT, Incoming, pass_pieces
from headrace_engine.multiproc.messages import ModelPass, Stop, WorkerCall
from headrace_engine.multiproc.pass_frames import PassDecoder, PassEncoder

BLOCK_SIZE = 4


def same(left: Any, right: Any) -> bool:
    """Equal, tensors with their dtypes."""
    if isinstance(left, torch.Tensor):
        return left.dtype == right.dtype and torch.equal(left, right)
    if isinstance(left, ForwardBatch | GroupBatch):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return bool(left == right) and type(left) is type(right)


def ints(values: Any, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    return torch.tensor(values, dtype=dtype)


class Steps:
    """A small scheduler: requests that join, go on, guess, are preempted, and end.

    Args:
        num_groups: of the cache; the last of several has states.
    """

    def __init__(self, num_groups: int) -> None:
        self.num_groups = num_groups
        self.computed: dict[int, int] = {}
        self.names = self.blocks = 0
        self.tables: dict[int, list[int]] = {}

    def batch(self, event: str, number: int) -> ForwardBatch | None:
        """The next step's batch; None: nobody runs."""
        if event == "join":
            self.names += 1
            self.computed[self.names], self.tables[self.names] = 0, []
        elif event in ("end", "preempt") and self.computed:
            name = sorted(self.computed)[number % len(self.computed)]
            self.computed[name], self.tables[name] = 0, []
            if event == "end":
                del self.computed[name], self.tables[name]
        names = list(self.computed)
        if event == "reorder":
            names.reverse()
        counts = [
            number % 7 + 1 if not self.computed[n] else 1 + (number % 3 if event == "guess" else 0)
            for n in names
        ]
        return self._run(names, counts, number) if names else None

    def _run(self, names: list[int], counts: list[int], number: int) -> ForwardBatch:
        before = [self.computed[name] for name in names]
        for name, count in zip(names, counts):
            self.computed[name] += count
            while len(self.tables[name]) * BLOCK_SIZE < self.computed[name]:
                self.blocks += 1
                self.tables[name].append(self.blocks)
        lengths = [self.computed[name] for name in names]
        widest = max(len(self.tables[name]) for name in names)
        table = [self.tables[n] + [0] * (widest - len(self.tables[n])) for n in names]
        positions = [p for b, c in zip(before, counts) for p in range(b, b + c)]
        places = [self.tables[n][p // BLOCK_SIZE] for n, b, c in zip(names, before, counts)
                  for p in range(b, b + c)]  # fmt: skip
        slots = [block * BLOCK_SIZE + p % BLOCK_SIZE for block, p in zip(places, positions)]
        group = GroupBatch(ints(table, torch.int32), ints(slots))
        state = GroupBatch(
            torch.zeros((len(names), 0), dtype=torch.int32), ints([]),
            state_in=ints([b - 1 for b in before]), state_out=ints(lengths),
        )  # fmt: skip
        groups = (*(group,) * (self.num_groups - 1), state) if self.num_groups > 1 else (group,)
        rows = None if number % 2 else ints([sum(counts) - 1])
        extra = {"rotary": torch.arange(3 * len(positions)).view(3, -1)} if number % 5 == 0 else {}
        return ForwardBatch(
            ints([(p * 31 + number) % 97 for p in positions]), ints(positions),
            ints([sum(counts[:i]) for i in range(len(counts) + 1)], torch.int32),
            ints(lengths, torch.int32), max(counts), max(lengths), groups, logits_rows=rows,
            extra=extra,
        )  # fmt: skip


EVENTS = st.sampled_from(["join", "go on", "go on", "go on", "guess", "preempt", "reorder", "end"])


@given(
    st.integers(1, 3),
    st.lists(st.tuples(EVENTS, st.integers(0, 20), st.sampled_from([(), (None,), (3,)]))),
)
def test_a_run_of_passes_is_what_was_led(num_groups: int, run: list[Any]) -> None:
    steps, encoder, decoder = Steps(num_groups), PassEncoder(), PassDecoder()
    for event, number, others in run:
        batch = steps.batch(event, number)
        if batch is None:
            continue
        message = ModelPass("replay" if others else "forward", (batch, *others))
        body = encoder.encode(message)
        assert body is not None
        assert same(decoder.decode(bytearray(body)), message)


def decode_batch(num_seqs: int, length: int, swapped: int = 0) -> ForwardBatch:
    table = torch.arange(num_seqs * 64, dtype=torch.int32).view(num_seqs, 64)
    table[0, 0] = swapped
    lengths = torch.full((num_seqs,), length, dtype=torch.int32)
    return ForwardBatch(
        torch.arange(num_seqs), lengths.long() - 1, torch.arange(num_seqs + 1, dtype=torch.int32),
        lengths, 1, length, (GroupBatch(table, lengths.long()),),
    )  # fmt: skip


def test_of_a_large_table_only_what_differs_is_sent() -> None:
    encoder, decoder, sizes = PassEncoder(), PassDecoder(), []
    for step in range(3):
        message = ModelPass("forward", (decode_batch(64, 900 + step, swapped=step // 2),))
        body = encoder.encode(message)
        assert body is not None
        assert same(decoder.decode(bytearray(body)), message)
        sizes.append(len(body))
    first, unchanged, one_changed = sizes
    assert first > 64 * 64 * 4
    assert unchanged < 1500, "positions, lengths and slots of 64 requests"
    assert one_changed == unchanged + 12, "a count, a place and a value"


def test_what_a_model_writes_into_its_batch_stays_there() -> None:
    """The next pass is made of what was sent."""
    encoder, decoder = PassEncoder(), PassDecoder()
    message = ModelPass("forward", (decode_batch(2, 9),))
    for _ in range(2):
        got = decoder.decode(bytearray(encoder.encode(message) or b""))
        assert same(got, message)
        got.args[0].input_ids.zero_()
        got.args[0].groups[0].block_table.zero_()


def test_a_number_that_is_none_differs_by_its_bits() -> None:
    nan = dataclasses.replace(decode_batch(2, 9), extra={"scale": torch.full((600,), torch.nan)})
    encoder, decoder = PassEncoder(), PassDecoder()
    for _ in range(2):
        got = decoder.decode(bytearray(encoder.encode(ModelPass("forward", (nan,))) or b""))
        assert torch.isnan(got.args[0].extra["scale"]).all()


@pytest.mark.parametrize(
    "args",
    [
        (3, 4), (), (decode_batch(1, 2), 1.5), (decode_batch(1, 2), True),
        (dataclasses.replace(decode_batch(1, 2), encoder_states=torch.ones(2, 3)),),
        (dataclasses.replace(decode_batch(1, 2), attention=("made",)),),
        (dataclasses.replace(
            decode_batch(1, 2), extra={INPUT_EMBEDS: InputEmbeds(ints([1]), torch.ones(1, 8))}
        ),),
        (dataclasses.replace(decode_batch(1, 2), extra={"x": torch.ones(2).bfloat16()}),),
    ],
)  # fmt: skip
def test_other_passes_are_sent_whole(args: tuple[Any, ...]) -> None:
    assert PassEncoder().encode(ModelPass("forward", args)) is None


@given(st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255))
def test_what_no_rank_sends_is_refused(noise: bytes, place: int, value: int) -> None:
    """Cut, changed or foreign frames: never another error, nor memory that the frame did not bring."""
    encoder = PassEncoder()
    bodies = [
        encoder.encode(ModelPass("forward", (decode_batch(16, 9 + n, swapped=n),))) or b""
        for n in range(2)
    ]
    for body in bodies:
        changed = bytearray(body)
        changed[place % len(changed)] = value
        for wrong in (changed, bytearray(body[: place % len(body)]), bytearray(noise)):
            decoder = PassDecoder()
            decoder.decode(bytearray(bodies[0]))
            try:
                decoder.decode(wrong)
            except frames.BadFrame:
                continue


@pytest.mark.parametrize("spins", [False, True])
def test_frames_of_all_kinds_come_in_order(spins: bool) -> None:
    """Whole frames, passes, large ones, and what only wakes."""
    passes = [ModelPass("forward", (decode_batch(size, 900 + size),)) for size in (2, 2, 700, 3)]
    calls = [WorkerCall(1, "load", ("x" * 300_000,)), Stop()]
    here, there = socket.socketpair()

    def send() -> None:
        encoder = PassEncoder()
        frames.send(here, frames.pack(calls[0]))
        for message in passes:
            frames.send(here, [EXPECT])
            frames.send(here, pass_pieces(encoder.encode(message) or b""))
        frames.send(here, frames.pack(calls[1]))
        here.close()

    with here, there:
        sender = threading.Thread(target=send)
        sender.start()
        incoming = Incoming(there, spins=spins)
        for message in (calls[0], *passes, calls[1]):
            assert same(incoming.receive(), message)
        sender.join()
        with pytest.raises(EOFError):
            incoming.receive()
