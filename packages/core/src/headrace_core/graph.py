"""The captured step: record a forward pass once, replay it without Python.

A decode step is hundreds of kernel calls, each a few microseconds of Python. A :class:`StepGraph`
runs a step once while it records what the step does, and from then on does the same to other
inputs in one call. Native kernels on a CPU record their calls; CUDA graphs fit the same contract.

Letters: T tokens in this step, B requests in it, R rows with logits, V vocabulary, H hidden size.

What an implementation may rely on:

- A step's work depends on its batch's *shapes* and on the tensors' content as read by kernels;
  no Python reads content. What breaks that (a host copy, an operation of torch that is no recorded
  kernel) must be found while capturing and refused with its name.
- Weights and cache stay where they are from capture to :meth:`StepGraph.close`.
- One thread uses a graph, the one that runs the steps.

What it must do: give the bits that the eager step gives. How is its affair: a CPU patches the
addresses and row counts of its recorded calls, so one recording serves every size up to a bucket's;
a GPU copies inputs into static buffers and pads to the bucket.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, runtime_checkable

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.batch import ForwardBatch

Step = Callable[["ForwardBatch"], "Tensor"]
"""A whole step but for sampling: batch (without attention metadata) -> logits [R, V], of a floating dtype.

It prepares attention metadata, runs the model and computes logits, with ``logits_rows`` given. A step
that ends with hidden states gives [R, H], or with :attr:`GraphNeed.all_rows` [T, H].
"""


@runtime_checkable
class RecordsCalls(Protocol):
    """What makes native calls in a step without being a kernel provider: a communicator."""

    def recording(self, record: Callable[[Any, Any], None]) -> AbstractContextManager[None]:
        """While this lasts its calls do not run: ``record(call, arguments)`` gets them. A call has a
        ``name``, the ctypes of its ``arguments``, and ``packed``, the address of a function that takes them
        from an array of 64-bit words, and returns 0 for success."""


@dataclass(frozen=True, slots=True)
class GraphNeed:
    """Steps to capture."""

    capture_sizes: tuple[int, ...]
    """Buckets: most tokens of a step, ascending."""
    max_num_seqs: int
    num_groups: int
    """Cache groups; 0 of a model that caches nothing."""
    device: str = "cpu"
    all_rows: bool = False
    """The result has a row for each token: batches have ``logits_rows`` None."""
    token_types: bool = False
    """Batches have ``token_type_ids``."""
    cross_groups: tuple[int, ...] = ()
    """Groups of cross-attention layers: they have ``seq_lens`` and
    ``max_seqlen_k`` of their own. Steps are captured in which no encoder runs: ``slot_mapping`` [0],
    no ``encoder_states``."""
    state_groups: tuple[int, ...] = ()
    """Groups of recurrent layers: they have ``state_in`` and ``state_out``, and
    nothing else."""
    parts: bool = False
    """Steps may also be run in parts (:meth:`StepGraph.replay_parts`). Only of a model that caches
    nothing, so that no request reads what another one writes. Costs memory for two more results."""
    recorders: tuple[RecordsCalls, ...] = ()
    """Who else makes native calls in the step, to be recorded with the kernels'; it then has no parts."""


class StepGraph(ABC):
    """Recorded steps of one model with its cache bound."""

    @property
    @abstractmethod
    def buckets(self) -> tuple[int, ...]:
        """Most tokens of a step, by recording, ascending; empty before :meth:`capture`."""

    @property
    @abstractmethod
    def num_bytes(self) -> int:
        """Memory held for intermediate results of all buckets together."""

    @property
    @abstractmethod
    def num_calls(self) -> int:
        """Kernel calls of one replayed step."""

    @abstractmethod
    def capture(self, step: Step, need: GraphNeed) -> None:
        """Record the step for every bucket. Nothing is sampled, no cache slot changes.

        Raises:
            CaptureRefused: the step does what cannot be recorded; says what. Nothing is held then.
        """

    @abstractmethod
    def fits(self, batch: ForwardBatch, num_logits: int | None = None) -> bool:
        """True if :meth:`replay` can take the batch: its size, and that it has nothing that was
        not recorded. One with ``key_lens`` never fits."""

    @abstractmethod
    def replay(self, batch: ForwardBatch, num_logits: int | None = None) -> Tensor:
        """Run the step on a batch that fits.

        Args:
            batch: attention metadata is not needed.
            num_logits: compute only the first of ``logits_rows``; 0 = no logits are wanted. Not
                with :attr:`GraphNeed.all_rows`.

        Returns:
            The step's result (logits [R, V], say), which the next replay overwrites; the caller
            may change it.

        Raises:
            ReplayFailed: a kernel met bad input (a slot beyond the cache, say). The step may be
                run again eagerly, which raises the error with its details; not where layers are
                recurrent, whose states may have moved on.
        """

    @property
    def lanes(self) -> int:
        """Parts of a step that :meth:`replay_parts` computes at the same time; 1 = it has no use for
        any."""
        return 1

    @property
    def part_tokens(self) -> int:
        """Most tokens of a part."""
        return 0

    def replay_parts(
        self, batch: ForwardBatch, cuts: Sequence[int], meanwhile: Callable[[], None]
    ) -> Tensor:
        """Run a step whose requests are divided into parts that are computed side by side.

        Kernels that share their work wait for the slowest thread after each of them. Parts need not
        wait for each other: with more parts than :attr:`lanes`, large ones first, a thread that is
        done with one takes the next.

        Args:
            batch: fits; without :attr:`GraphNeed.all_rows`, ``logits_rows`` are one of each request,
                in order.
            cuts: where parts begin and end, as indices of requests: 0, ..., B. None is longer than
                :attr:`part_tokens`.
            meanwhile: called once, in this thread, while others compute already.

        Returns:
            The same as :meth:`replay`; overwritten by the next call but one.

        Raises:
            ReplayFailed: as :meth:`replay`.
            ValueError: a part is too long.
        """
        meanwhile()
        return self.replay(batch).clone()

    @abstractmethod
    def close(self) -> None:
        """Free what is held. Idempotent."""


StepGraphFactory = Callable[[], StepGraph]
"""Makes an empty graph for the ops that it came with."""
