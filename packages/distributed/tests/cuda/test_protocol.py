"""The protocol of custom all-reduce as a model: programs of all ranks take steps in any order, and what each
reads must be of its own operation."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from headrace_distributed.cuda.custom import protocol

Cell = tuple[int, int, str]
"""(operation, rank, "input" or "sum") that wrote it."""


class Torn(Exception):
    """A program has read what another operation wrote, or nobody can go on."""


@dataclass
class Memory:
    """One rank's allocation."""

    flags: dict[tuple[int, int], int] = field(default_factory=dict)
    operation: int = 0
    done: int = 0
    slots: tuple[dict[int, Cell], dict[int, Cell]] = field(default_factory=lambda: ({}, {}))


@dataclass(frozen=True)
class Operation:
    """Cells of the tensor, programs of the launch, and the way."""

    cells: int
    programs: int
    two_shot: bool


Step = Iterator[bool]
"""Yields after each step: False while it waits."""
SlotOf = Callable[[int, int], int]
"""(operation, how often the program has run) -> slot."""


class Model:
    """Ranks that run the same operations one after the other, each as its stream does."""

    def __init__(
        self, ranks: int, operations: Sequence[Operation], slot_of: SlotOf, *, first: int = 0
    ) -> None:
        self.memories = [Memory(operation=first) for _ in range(ranks)]
        self.operations, self.slot_of = operations, slot_of
        self.runs: dict[tuple[int, int], int] = {}
        for memory in self.memories:  # as of `first` operations before
            for program in range(protocol.MOST_PROGRAMS if first else 0):
                for rank in range(ranks):
                    memory.flags[program, rank] = protocol.flag(first - 1, 1)

    def run(self, rng: random.Random) -> None:
        """Take steps in an order of ``rng`` until all have ended."""
        ranks = range(len(self.memories))
        turn = [0 for _ in ranks]
        live: dict[int, list[Step]] = {rank: self.launch(rank, 0) for rank in ranks}
        stuck = 0
        while any(live.values()):
            rank = rng.choice([rank for rank in ranks if live[rank]])
            program = rng.choice(live[rank])
            try:
                stuck = 0 if next(program) else stuck + 1
            except StopIteration:
                stuck = 0
                live[rank].remove(program)
                if not live[rank] and turn[rank] + 1 < len(self.operations):
                    turn[rank] += 1
                    live[rank] = self.launch(rank, turn[rank])
            if stuck > 20_000:
                raise Torn("nobody goes on")

    def launch(self, rank: int, turn: int) -> list[Step]:
        programs = range(self.operations[turn].programs)
        return [self.program(rank, number, self.operations[turn]) for number in programs]

    def program(self, rank: int, number: int, operation: Operation) -> Step:
        own = self.memories[rank]
        now = own.operation
        run = self.runs[rank, number] = self.runs.get((rank, number), 0) + 1
        slot = self.slot_of(now, run)
        yield True
        mine = range(number, operation.cells, operation.programs)
        for cell in mine:
            own.slots[slot][cell] = (now, rank, "input")
            yield True
        yield from self.meet(rank, number, protocol.flag(now, 0))
        if operation.two_shot:
            ranks = len(self.memories)
            for cell in mine:
                if cell // operation.programs % ranks == rank:
                    yield from self.read(cell, slot, now, "input")
                    own.slots[slot][cell] = (now, rank, "sum")
                    yield True
            yield from self.meet(rank, number, protocol.flag(now, 1))
            for cell in mine:
                owner = cell // operation.programs % ranks
                self.check(owner, cell, slot, (now, owner, "sum"))
                yield True
        else:
            for cell in mine:
                yield from self.read(cell, slot, now, "input")
        own.done += 1
        if own.done == operation.programs:
            own.done = 0
            own.operation = now + 1

    def meet(self, rank: int, number: int, flag: int) -> Step:
        for peer in self.memories:
            peer.flags[number, rank] = flag
            yield True
        flags = self.memories[rank].flags
        while min(flags.get((number, peer), 0) for peer in range(len(self.memories))) < flag:
            yield False

    def read(self, cell: int, slot: int, now: int, kind: str) -> Step:
        for peer in range(len(self.memories)):
            self.check(peer, cell, slot, (now, peer, kind))
            yield True

    def check(self, peer: int, cell: int, slot: int, wanted: Cell) -> None:
        found = self.memories[peer].slots[slot].get(cell)
        if found != wanted:
            raise Torn(f"read {found}, not {wanted}")


OPERATIONS = st.lists(
    st.builds(Operation, st.integers(1, 9), st.integers(1, 4), st.booleans()),
    min_size=1,
    max_size=6,
)


def by_operation(operation: int, run: int) -> int:
    return protocol.slot_of(operation)


@settings(max_examples=80, deadline=None)
@given(ranks=st.integers(2, 4), operations=OPERATIONS, seed=st.integers(0, 2**32))
def test_whatever_the_order_each_reads_its_own_operation(
    ranks: int, operations: list[Operation], seed: int
) -> None:
    model = Model(ranks, operations, by_operation)
    model.run(random.Random(seed))
    assert {memory.operation for memory in model.memories} == {len(operations)}


@pytest.mark.parametrize("first", [2**30 - 1, 2**31 - 1, 2**32, 2**33 + 1])
def test_flags_go_on_beyond_32_bits(first: int) -> None:
    operations = [Operation(5, 2, turn % 2 == 0) for turn in range(4)]
    Model(3, operations, by_operation, first=first).run(random.Random(first))


@pytest.mark.parametrize(
    "slot_of",
    [lambda operation, run: 0, lambda operation, run: run % 2],
    ids=["one slot", "a program's own turn"],
)
def test_the_model_finds_what_is_wrong_with_other_protocols(slot_of: SlotOf) -> None:
    """With one slot a fast rank writes over what a slow one reads; so it does where a program's slot goes
    by its own turns and operations have different numbers of programs."""
    operations = [Operation(6, 1 + turn % 3, turn % 2 == 0) for turn in range(8)]
    failures = 0
    for seed in range(300):
        try:
            Model(3, operations, slot_of).run(random.Random(seed))
        except Torn:
            failures += 1
    assert failures > 0


@given(numel=st.integers(1, 10**9), world_size=st.integers(2, 8))
def test_parts_cover_the_tensor(numel: int, world_size: int) -> None:
    part = protocol.part_size(numel, world_size)
    assert part * world_size >= numel
    assert part % protocol.PART_MULTIPLE == 0
    assert 1 <= protocol.num_programs(part, 1024) <= protocol.MOST_PROGRAMS


def test_regions_do_not_overlap() -> None:
    flags = protocol.MOST_PROGRAMS * protocol.MOST_RANKS * protocol.FLAG_BYTES
    assert flags <= protocol.OPERATION_AT < protocol.DONE_AT < protocol.SLOTS_AT
    assert protocol.SLOTS_AT % 256 == 0
    assert protocol.num_bytes(512) == protocol.SLOTS_AT + 1024
