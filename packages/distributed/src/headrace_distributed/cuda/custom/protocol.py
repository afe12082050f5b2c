"""Where ranks find what in each other's memory, and why nobody reads too early or writes too soon.

Each rank has one allocation, which all map::

    flags       [programs, ranks] int64   written by others: "my program has come to meeting F"
    operation   int64                     number of this rank's next operation
    done        int32                     programs of it that have ended
    slots       2 x slot_bytes            what this rank brings to the operation

Program p of a rank talks to the programs p of the others only. In operation n it copies its piece of the
input to slot ``n % 2``, *meets* the others (sets its flag in each one's memory to ``flag(n, 0)``, and waits
until its own flags have come so far), and reads their pieces. Two-shot meets a second time, ``flag(n, 1)``,
before it reads sums that others have put in place of their input.

- Flags only grow, so nobody resets them. They are 64 bits wide: at 10,000 operations a second, 32 bits would
  be used up in two days.
- Nothing is waited for at an operation's end. A slot is written again in operation n + 2, which a rank begins
  when its operation n + 1 has ended; in that one its program 0 met everyone's program 0, which they begin
  after their operation n has ended, with all that it read.
- The slot goes by the number of the operation, not by how often a program has run: operations have different
  numbers of programs.
- The number lives in the rank's memory, and the operation's last program raises it. So a recorded operation
  (a CUDA graph) may be replayed any number of times between others.
- A program waits for its partner on another GPU, so all programs of a launch must be able to run at once:
  there are at most :data:`MOST_PROGRAMS`, fewer than any such GPU has multiprocessors.
"""

from __future__ import annotations

MOST_RANKS = 8
MOST_PROGRAMS = 64
FLAG_BYTES = 8
OPERATION_AT = MOST_PROGRAMS * MOST_RANKS * FLAG_BYTES
DONE_AT = OPERATION_AT + 8
SLOTS_AT = OPERATION_AT + 256
"""Offsets in bytes from the allocation's begin."""
PART_MULTIPLE = 64
"""Elements: parts of two-shot begin at multiples, so that their values are read 16 bytes at a time."""


def slot_of(operation: int) -> int:
    """Which of a rank's two slots an operation uses."""
    return operation % 2


def flag(operation: int, meeting: int) -> int:
    """What a rank's flag is at least once its program has come to a meeting (0 or 1) of an operation."""
    return 2 * operation + meeting + 1


def num_bytes(slot_bytes: int) -> int:
    """Bytes of a rank's allocation."""
    return SLOTS_AT + 2 * slot_bytes


def part_size(numel: int, world_size: int) -> int:
    """Elements that one rank adds up in two-shot; the last ranks may have fewer, or none."""
    each = -(-numel // world_size)
    return -(-each // PART_MULTIPLE) * PART_MULTIPLE


def num_programs(numel: int, block: int) -> int:
    """Programs of a launch, the same on every rank.

    Args:
        numel: elements that a rank adds up: of the tensor in one-shot, of a part in two-shot.
        block: elements that a program takes at once.
    """
    return max(1, min(MOST_PROGRAMS, -(-numel // block)))
