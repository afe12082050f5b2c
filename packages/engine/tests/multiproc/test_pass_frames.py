"""Passes that are sent by what differs are the passes that were led, whatever steps do."""

from __future__ import annotations

import dataclasses
import socket
import threading
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from headrace_core.batch import ForwardBatch, GroupBatch
from headrace_core.model import INPUT_EMBEDS, InputEmbeds
from headrace_engine.multiproc import frames
from headrace_engine.multiproc.incoming import EXPECT, LENGTHS, Incoming
from headrace_engine.multiproc.messages import ModelPass, Stop, WorkerCall, without_metadata
from headrace_engine.multiproc.pass_decoder import REHEARSED_BYTES, PassDecoder
from headrace_engine.multiproc.pass_frames import LARGE_FROM, PASS, PassEncoder

BLOCK_SIZE = 4


def same(left: Any, right: Any) -> bool:
    """Equal; tensors bit by bit, with their dtypes."""
    if isinstance(left, torch.Tensor):
        bits = [one.reshape(-1).clone(memory_format=torch.contiguous_format).view(torch.uint8)
                for one in (left, right)]  # fmt: skip
        return left.dtype == right.dtype and left.shape == right.shape and torch.equal(*bits)
    if isinstance(left, ForwardBatch | GroupBatch):
        return type(left) is type(right) and all(
            same(getattr(left, f.name), getattr(right, f.name)) for f in dataclasses.fields(left)
        )
    if isinstance(left, tuple):
        return len(left) == len(right) and all(map(same, left, right))
    if isinstance(left, dict):
        return list(left) == list(right) and all(same(left[name], right[name]) for name in left)
    return bool(left == right) and type(left) is type(right)


def encoded(encoder: PassEncoder, message: ModelPass) -> bytearray:
    """A pass as its decoder gets it."""
    frame = encoder.encode(message)
    assert frame is not None
    assert LENGTHS.unpack_from(frame) == (PASS, len(frame) - LENGTHS.size)
    return bytearray(frame[LENGTHS.size :])


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
OTHERS = st.sampled_from([(), (None,), (3,)])


@given(st.integers(1, 3), st.lists(st.tuples(EVENTS, st.integers(0, 20), OTHERS)))
def test_a_run_of_passes_is_what_was_led(num_groups: int, run: list[Any]) -> None:
    steps, encoder, decoder = Steps(num_groups), PassEncoder(), PassDecoder()
    for event, number, others in run:
        batch = steps.batch(event, number)
        if batch is None:
            continue
        message = ModelPass("replay" if others else "forward", (batch, *others))
        assert same(decoder.decode(encoded(encoder, message)), message)


class Shapes(NamedTuple):
    """A tensor of a batch that no scheduler need make."""

    num_tokens: int
    num_seqs: int
    width: int
    """Of a table's rows; 18,000 are large."""
    num_groups: int
    optional: frozenset[str]
    extra: frozenset[str]
    is_strided: bool
    """Elements of a tensor are not next to each other."""


OPTIONAL = ("logits_rows", "token_type_ids", "key_lens", "last_keys", "seq_lens", "state_in")
SHAPES = st.builds(
    Shapes, st.integers(0, 3), st.integers(0, 3), st.sampled_from([0, 1, 5, 18_000]), st.integers(0, 2),
    st.frozensets(st.sampled_from(OPTIONAL)), st.frozensets(st.sampled_from("abc")),
    st.booleans(),
)  # fmt: skip
assert LARGE_FROM < 18_000 * 4


def any_batch(shapes: Shapes, seed: int) -> ForwardBatch:
    """Numbers of a seed; of seeds that are close, tables differ in few elements."""
    generator = torch.Generator().manual_seed(seed // 4)

    def tensor(*shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor:
        values = torch.randint(-(2**31), 2**31, shape, generator=generator, dtype=torch.int64)
        if values.numel():
            values.view(-1)[seed % values.numel()] += seed
        if dtype == torch.float32:  # any bits, NaNs among them
            values = values.int().view(torch.float32)
        values = values.to(dtype)
        return torch.stack((values, values), -1)[..., 0] if shapes.is_strided else values

    def perhaps(name: str, *shape: int, dtype: torch.dtype = torch.int64) -> torch.Tensor | None:
        return tensor(*shape, dtype=dtype) if name in shapes.optional else None

    num_tokens, num_seqs = shapes.num_tokens, shapes.num_seqs
    groups = tuple(
        GroupBatch(
            tensor(num_seqs, shapes.width, dtype=torch.int32), tensor(num_tokens),
            perhaps("seq_lens", num_seqs, dtype=torch.int32), seed, perhaps("state_in", num_seqs),
        )
        for _ in range(shapes.num_groups)
    )  # fmt: skip
    dtypes = {"a": torch.float32, "b": torch.bool, "c": torch.bfloat16}
    return ForwardBatch(
        tensor(num_tokens), tensor(num_tokens), tensor(num_seqs + 1, dtype=torch.int32),
        tensor(num_seqs, dtype=torch.int32), seed, seed + 1, groups,
        logits_rows=perhaps("logits_rows", num_seqs),
        token_type_ids=perhaps("token_type_ids", num_tokens),
        key_lens=perhaps("key_lens", num_seqs, dtype=torch.int32),
        last_keys=perhaps("last_keys", num_tokens, dtype=torch.int32),
        extra={name: tensor(3, num_tokens, dtype=dtypes[name]) for name in sorted(shapes.extra)},
    )  # fmt: skip


WAITS = st.sampled_from(["comes at once", "waits", "rehearses"])


@given(
    st.lists(SHAPES, min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.integers(0, 9), OTHERS, WAITS), max_size=12),
)
def test_any_passes_are_what_was_led(layouts: list[Shapes], run: list[Any]) -> None:
    """Layouts that stay, change and come back; and no pass shares memory with another, or with rank 0's."""
    encoder, decoder = PassEncoder(), PassDecoder()
    led: list[tuple[ModelPass, ModelPass]] = []
    for layout, seed, others, waits in run:
        shapes = layouts[layout % len(layouts)]
        message = ModelPass("forward", (any_batch(shapes, seed), *others))
        body = encoded(encoder, message)
        message.args[0].input_ids.zero_()
        for group in message.args[0].groups:
            group.block_table.fill_(7)
        if waits != "comes at once":
            decoder.prepare(rehearse=waits == "rehearses")
        led.append((decoder.decode(body), ModelPass("forward", (any_batch(shapes, seed), *others))))
    for got, message in led:
        assert same(got, message)


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
        message = ModelPass("forward", (decode_batch(256, 900 + step, swapped=step // 2),))
        body = encoded(encoder, message)
        assert same(decoder.decode(body), message)
        sizes.append(len(body))
    first, unchanged, one_changed = sizes
    assert first > 256 * 64 * 4
    assert unchanged < 9000, "tokens, positions, lengths and slots of 256 requests"
    assert one_changed == unchanged + 12, "a count, a place and a value"


@pytest.mark.parametrize("num_seqs", [2, 256])
def test_what_a_model_writes_into_its_batch_stays_there(num_seqs: int) -> None:
    """The next pass is made of what was sent."""
    encoder, decoder = PassEncoder(), PassDecoder()
    message = ModelPass("forward", (decode_batch(num_seqs, 9),))
    for _ in range(3):
        got = decoder.decode(encoded(encoder, message))
        assert same(got, message)
        got.args[0].input_ids.zero_()
        got.args[0].groups[0].block_table.zero_()
        decoder.prepare(rehearse=True)


def test_a_number_that_is_none_differs_by_its_bits() -> None:
    scale = torch.full((LARGE_FROM // 4,), torch.nan)
    nan = dataclasses.replace(decode_batch(2, 9), extra={"scale": scale})
    encoder, decoder = PassEncoder(), PassDecoder()
    bodies = [encoded(encoder, ModelPass("forward", (nan,))) for _ in range(2)]
    assert len(bodies[1]) < len(bodies[0]) - scale.nbytes
    for body in bodies:
        assert torch.isnan(decoder.decode(body).args[0].extra["scale"]).all()


def test_attention_metadata_is_not_sent() -> None:
    """Each rank prepares its own."""
    plain = decode_batch(2, 9)
    prepared = dataclasses.replace(plain, attention=("made",))
    frames_of_both = [PassEncoder().encode(ModelPass("forward", (b,))) for b in (plain, prepared)]
    assert frames_of_both[0] == frames_of_both[1] is not None
    states = dataclasses.replace(prepared, encoder_states=torch.ones(2, 3))
    sent = without_metadata(ModelPass("forward", (states, (1, 2), "x")))
    assert same(sent.args[0], dataclasses.replace(states, attention=()))
    assert sent.args[1:] == ([1, 2], "x")


def test_nothing_is_made_ready_before_a_pass_has_come() -> None:
    decoder = PassDecoder()
    decoder.prepare(rehearse=True)
    with pytest.raises(frames.BadFrame):
        decoder.decode(encoded(PassEncoder(), ModelPass("forward", (decode_batch(1, 2),)))[:8])


def test_a_long_pass_is_not_rehearsed() -> None:
    """Its copies would take the time in which the next one comes."""
    encoder, decoder = PassEncoder(), PassDecoder()
    message = ModelPass("forward", (decode_batch(512, 9),))
    assert message.args[0].groups[0].block_table.nbytes > REHEARSED_BYTES
    for _ in range(2):
        assert same(decoder.decode(encoded(encoder, message)), message)
        decoder.prepare(rehearse=True)


@pytest.mark.parametrize(
    "args",
    [
        (3, 4), (), (decode_batch(1, 2), 1.5), (decode_batch(1, 2), True),
        (dataclasses.replace(decode_batch(1, 2), encoder_states=torch.ones(2, 3)),),
        (dataclasses.replace(
            decode_batch(1, 2), extra={INPUT_EMBEDS: InputEmbeds(ints([1]), torch.ones(1, 8))}
        ),),
    ],
)  # fmt: skip
def test_other_passes_are_sent_whole(args: tuple[Any, ...]) -> None:
    assert PassEncoder().encode(ModelPass("forward", args)) is None


@given(
    st.binary(max_size=200), st.integers(0, 400), st.integers(0, 255), st.sampled_from([16, 256])
)
def test_what_no_rank_sends_is_refused(noise: bytes, place: int, value: int, size: int) -> None:
    """Cut, changed or foreign frames: never another error, nor memory that the frame did not bring."""
    encoder = PassEncoder()
    bodies = [
        encoded(encoder, ModelPass("forward", (decode_batch(size, 9 + n, swapped=n),)))
        for n in range(2)
    ]
    for body in bodies:
        for at in (place, -1 - place):
            changed = bytearray(body)
            changed[at % len(changed)] = value
            for wrong in (changed, bytearray(body[: at % len(body)]), bytearray(noise)):
                decoder = PassDecoder()
                decoder.decode(bodies[0])
                try:
                    decoder.decode(wrong)
                except frames.BadFrame:
                    continue


@pytest.mark.parametrize("spins", [False, True])
def test_frames_of_all_kinds_come_in_order(spins: bool) -> None:
    """Whole frames, passes, large ones, and what only wakes."""
    passes = [
        ModelPass("forward", (decode_batch(size, 900 + step),))
        for step, size in enumerate((2, 2, 2, 700, 700, 3, 64, 64))
    ]
    calls = [WorkerCall(1, "load", ("x" * 300_000,)), Stop()]
    here, there = socket.socketpair()

    def send() -> None:
        encoder = PassEncoder()
        frames.send(here, frames.pack(calls[0]))
        for message in passes:
            here.sendall(EXPECT)
            here.sendall(encoder.encode(message) or b"")
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
