"""``low_rank``."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, ClassVar

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from headrace_reference.low_rank import low_rank
from headrace_testing.ops.inputs import bits_equal, call_wide, rand, wide
from headrace_testing.ops.suite import OpSuite

RANKS = (0, 1, 7, 16, 64, 256)


@dataclass(frozen=True)
class Adapters:
    """Adapters of a layer of ``inputs`` and ``parts``: of each slot and part that has one, its factors."""

    inputs: int
    parts: tuple[int, ...]
    slots: int
    dtype: str
    device: str
    factors: dict[tuple[int, int], tuple[Tensor, Tensor, float]] = field(default_factory=dict)

    def draw(self, slot: int, part: int, rank: int, *, seed: int = 0) -> None:
        """Random factors whose product is about as large as a row's values."""
        seed += 10 * slot + part
        down = rand(rank, self.inputs, dtype=self.dtype, device=self.device, seed=seed)
        up = rand(self.parts[part], rank, dtype=self.dtype, device=self.device, seed=seed + 1)
        down *= self.inputs**-0.5
        self.factors[slot, part] = down, up, (1 + slot) * 0.3 / max(1, rank) ** 0.5

    def allocated(self, op: Any, max_rank: int) -> Any:
        like = torch.empty(0, dtype=getattr(torch, self.dtype), device=self.device)
        return op.allocate(self.slots, max_rank, self.inputs, self.parts, like)

    def written(self, op: Any, max_rank: int = max(RANKS)) -> Any:
        """The memory of the op under test with all of them in it."""
        memory = self.allocated(op, max_rank)
        for (slot, part), factors in self.factors.items():
            op.write(memory, slot, part, *factors)
        return memory

    def expected(self, out: Tensor, x: Tensor, slots: Tensor) -> Tensor:
        """In float64 on the CPU."""
        like = torch.empty(0, dtype=torch.float64)
        memory = low_rank.allocate(self.slots, max(RANKS), self.inputs, self.parts, like)
        for (slot, part), (down, up, scale) in self.factors.items():
            low_rank.write(memory, slot, part, wide(down), wide(up), scale)
        found: Tensor = call_wide(low_rank, out.clone(), x, memory, slots)
        return found

    def rows(self, count: int) -> tuple[Tensor, Tensor]:
        """(out, x), both with rows apart from each other."""
        out = rand(count, sum(self.parts) + 8, dtype=self.dtype, device=self.device, seed=3)
        x = rand(count, self.inputs + 3, dtype=self.dtype, device=self.device, seed=4)
        return out[:, 8:], x[:, 3:]


class LowRankConformance(OpSuite):
    """Any mix of adapters of any ranks, rows of none among them."""

    adapted_rows: ClassVar[Sequence[int]] = (0, 1, 2, 7, 33, 130)
    """Rows of a step."""

    @pytest.mark.parametrize(
        ("inputs", "parts", "ranks"),
        [
            (16, (16,), {(0, 0): 1}),
            (40, (24, 7, 7), {(0, 0): 7, (0, 2): 16, (1, 1): 64, (2, 0): 0, (2, 1): 1}),
            (100, (33, 130), {(0, 0): 256, (0, 1): 7, (2, 0): 64, (2, 1): 16}),
            (513, (257,), {(0, 0): 64, (1, 0): 256, (2, 0): 16, (4, 0): 7}),
        ],
    )
    def test_low_rank(
        self,
        op: Callable[[str], Any],
        dtype: str,
        inputs: int,
        parts: tuple[int, ...],
        ranks: Mapping[tuple[int, int], int],
    ) -> None:
        run, adapters = op("low_rank"), self._adapters(dtype, inputs, parts, ranks)
        memory = adapters.written(run)
        for count in self.adapted_rows:
            out, x = adapters.rows(count)
            slots = self._adapter_slots(count, adapters.slots)
            expected = adapters.expected(out, x, slots)
            assert run(out, x, memory, slots) is out
            self.check(out, expected, dtype)

    def test_low_rank_of_one_adapter(self, op: Callable[[str], Any], dtype: str) -> None:
        """A prompt: many rows, none of another adapter."""
        run = op("low_rank")
        for rank, count in zip(RANKS[1:], (50, 50, 300, 70, 70)):
            adapters = self._adapters(dtype, 70, (48,), {(0, 0): rank})
            (out, x), slots = adapters.rows(count), self._int32([0] * count)
            expected = adapters.expected(out, x, slots)
            self.check(run(out, x, adapters.written(run), slots), expected, dtype)

    def test_low_rank_keeps_bits(self, op: Callable[[str], Any], dtype: str) -> None:
        """Of rows of no adapter, and of parts that their adapter lacks."""
        run = op("low_rank")
        adapters = self._adapters(dtype, 40, (24, 7, 9), {(0, 1): 7, (1, 0): 0})
        memory, before = adapters.written(run), adapters.rows(6)[0].clone()
        before[:, ::2], before[:, 1::5] = -0.0, torch.nan
        x = self.rand(6, 40, dtype=dtype) * torch.inf
        for slots, kept in (([-1] * 6, 6), ([1] * 6, 6), ([-1, 1, 1, -1, 0, 0], 4)):
            out = run(before.clone(), x, memory, self._int32(slots))
            assert bits_equal(out[:kept], before[:kept])
            assert bits_equal(out[:, :24], before[:, :24])
            assert bits_equal(out[:, 31:], before[:, 31:])

    def test_low_rank_reads_slots_of_its_rows_alone(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        run, adapters = op("low_rank"), self._adapters(dtype, 40, (24,), {(0, 0): 7})
        (out, x), slots = adapters.rows(3), self._int32([0, -1, 0, 77, -9, 0])
        expected = adapters.expected(out, x, slots[:3])
        self.check(run(out, x, adapters.written(run), slots), expected, dtype)

    def test_low_rank_forgets_what_is_written_over(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        run = op("low_rank")
        adapters = self._adapters(dtype, 40, (24, 9), {(0, 0): 16, (0, 1): 7, (1, 0): 16})
        memory = adapters.written(run, max_rank=16)
        down, up, _ = adapters.factors[0, 0]
        slots, (before, x) = self._int32([0, 1, -1] * 3), adapters.rows(9)
        run.write(memory, 0, 0, down * torch.nan, up * torch.nan, 1.0)
        for rank in (7, 1, 0, 16):
            adapters.draw(0, 0, rank, seed=rank)
            run.write(memory, 0, 0, *adapters.factors[0, 0])
            out = run(before.clone(), x, memory, slots)
            self.check(out, adapters.expected(before, x, slots), dtype)
            fresh = run(before.clone(), x, adapters.written(run, max_rank=16), slots)
            assert bits_equal(out, fresh), rank

    def test_low_rank_writes_one_place(self, op: Callable[[str], Any], dtype: str) -> None:
        """Other slots and parts keep their bits, and the memory its place."""
        run = op("low_rank")
        ranks = {(slot, part): 7 for slot in range(3) for part in range(2)}
        adapters = self._adapters(dtype, 40, (24, 9), ranks)
        memory, slots, (before, x) = adapters.written(run), self._int32([0, 1, 2]), adapters.rows(3)
        others, where = run(before.clone(), x, memory, slots), set(_addresses(memory))
        assert where
        assert memory.num_bytes > 0
        adapters.draw(1, 1, 256, seed=5)
        run.write(memory, 1, 1, *adapters.factors[1, 1])
        out = run(before.clone(), x, memory, slots)
        assert bits_equal(out[::2], others[::2])
        assert bits_equal(out[:, :24], others[:, :24])
        assert not bits_equal(out[1, 24:], others[1, 24:])
        assert set(_addresses(memory)) == where

    def test_low_rank_takes_factors_of_any_dtype(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        run, adapters = op("low_rank"), self._adapters(dtype, 40, (24,), {(0, 0): 16})
        memory, slots, (out, x) = adapters.written(run), self._int32([0] * 5), adapters.rows(5)
        expected = run(out.clone(), x, memory, slots)
        down, up, scale = adapters.factors[0, 0]
        for other in (torch.float32, torch.float64):
            run.write(memory, 0, 0, down.T.contiguous().to(other).T, up.to(other), scale)
            assert bits_equal(run(out.clone(), x, memory, slots), expected)

    def test_low_rank_rounds_once(self, op: Callable[[str], Any], dtype: str) -> None:
        """``down @ x`` is 1 + 2^-9 + 2^-18, more digits than two halves have, and its head is taken off."""
        run, like = op("low_rank"), self.rand(1, dtype=dtype)
        memory = run.allocate(1, 4, 3, [3], like)
        down = torch.tensor([[1.0, 2**-9, 2**-18], [-1.0, -(2**-9), 0.0]], device=self.device)
        run.write(memory, 0, 0, down, torch.ones(3, 2, device=self.device), 4.0)
        x, out = torch.ones_like(like).expand(1, 3), torch.zeros_like(like).expand(1, 3).clone()
        assert (run(out, x, memory, self._int32([0])) == 2**-16).all()

    def test_low_rank_of_infinite_inputs(self, op: Callable[[str], Any], dtype: str) -> None:
        """Infinity is no NaN: nothing is multiplied that is not there."""
        run, like = op("low_rank"), self.rand(1, dtype=dtype)
        memory = run.allocate(2, 4, 5, [3], like)
        for slot in range(2):
            down, up = torch.ones(1 + slot, 5), torch.ones(3, 1 + slot)
            run.write(memory, slot, 0, down.to(self.device), up.to(self.device), 1.0)
        x, out = torch.ones_like(like).repeat(3, 5), torch.zeros_like(like).repeat(3, 3)
        x[0, 0] = x[2, 1] = torch.inf
        run(out, x, memory, self._int32([0, 0, 1]))
        assert out.tolist() == [[torch.inf] * 3, [5.0] * 3, [torch.inf] * 3]

    @settings(
        max_examples=15, deadline=None,
        suppress_health_check=[
            HealthCheck.function_scoped_fixture,
            HealthCheck.differing_executors,
            HealthCheck.too_slow,
        ],
    )  # fmt: skip
    @given(data=st.data())
    def test_low_rank_of_random_mixes(
        self, op: Callable[[str], Any], dtype: str, data: st.DataObject
    ) -> None:
        run = op("low_rank")
        parts = tuple(data.draw(st.lists(st.integers(1, 40), min_size=1, max_size=3)))
        places = st.tuples(st.integers(0, 3), st.integers(0, len(parts) - 1))
        ranks = data.draw(st.dictionaries(places, st.integers(0, 40), max_size=6))
        adapters = self._adapters(dtype, data.draw(st.integers(1, 70)), parts, ranks, slots=4)
        slots = self._int32(data.draw(st.lists(st.integers(-1, 3), max_size=20)))
        out, x = adapters.rows(data.draw(st.integers(0, len(slots))))
        expected = adapters.expected(out, x, slots)
        self.check(run(out, x, adapters.written(run, max_rank=40), slots), expected, dtype)

    def test_low_rank_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        """Alone, among rows of the same adapter, and among those of others."""
        run = invariant_op("low_rank")
        ranks = {(0, 0): 7, (0, 1): 64, (1, 1): 16, (2, 0): 256}
        adapters = self._adapters(dtype, 300, (33, 70), ranks)
        memory, (out, x) = adapters.written(run), adapters.rows(70)
        for slots in ([0] * 70, [2] * 70, [0, 1, 2, -1, 0] * 14, [2] * 20 + [0] * 50):
            chosen = self._int32(slots)

            def rows(which: Tensor, chosen: Tensor = chosen) -> Tensor:
                found: Tensor = run(out[which].clone(), x[which], memory, chosen[which])
                return found

            self.check_rows(torch.arange(70, device=self.device), rows, "low_rank")

    def test_low_rank_refuses(self, op: Callable[[str], Any], dtype: str) -> None:
        run, adapters = op("low_rank"), self._adapters(dtype, 8, (6, 4), {(0, 0): 2})
        memory = adapters.allocated(run, 3)
        down, up = self.rand(2, 8, dtype=dtype), self.rand(6, 2, dtype=dtype)
        with pytest.raises(ValueError, match=r"rank 4 .*max_rank = 3"):
            run.write(memory, 0, 0, down.repeat(2, 1), up.repeat(1, 2), 1.0)
        for wrong in ((down[:, :7], up), (down[:1], up), (down, up[:4]), (down[0], up)):
            with pytest.raises(ValueError, match=r"down is \[.*up \[.*\[r, 8\] and \[6, r\]"):
                run.write(memory, 0, 0, *wrong, 1.0)
        for slot, part, match in ((2, 0, "slot 2 "), (-1, 0, "slot -1 "), (0, 2, "part 2 ")):
            with pytest.raises(IndexError, match=match):
                run.write(memory, slot, part, down, up, 1.0)

    def test_low_rank_refuses_rows(self, op: Callable[[str], Any], dtype: str) -> None:
        run, adapters = op("low_rank"), self._adapters(dtype, 8, (6, 4), {(0, 0): 2})
        memory, (out, x), slots = adapters.written(run), adapters.rows(3), self._int32([0, -1, 0])
        for rows in ((out[:2], x), (out[:, :9], x), (out, x[:, :7]), (out, x.double())):
            with pytest.raises(ValueError, match=r"out is .*\[T, 10\] and \[T, 8\]"):
                run(*rows, memory, slots)
        for wrong in (slots[:2], slots.long(), slots[:, None]):
            with pytest.raises(ValueError, match=r"slots are .*int32"):
                run(out, x, memory, wrong)

    def _adapters(
        self,
        dtype: str,
        inputs: int,
        parts: tuple[int, ...],
        ranks: Mapping[tuple[int, int], int],
        slots: int | None = None,
    ) -> Adapters:
        """As many slots as there are adapters, if no number is given."""
        count = slots or 1 + max(slot for slot, _ in ranks)
        adapters = Adapters(inputs, parts, count, dtype, self.device)
        for (slot, part), rank in ranks.items():
            adapters.draw(slot, part, rank)
        return adapters

    def _adapter_slots(self, rows: int, slots: int) -> Tensor:
        """Mixed, rows of no adapter among them."""
        generator = torch.Generator().manual_seed(rows)
        drawn = torch.randint(-1, slots, (rows,), generator=generator)
        return drawn.to(self.device, torch.int32)

    def _int32(self, values: list[int]) -> Tensor:
        return torch.tensor(values, dtype=torch.int32, device=self.device)


def _addresses(memory: Any) -> Iterator[int]:
    """Of all tensors in an op's memory."""
    names = [name for kind in type(memory).__mro__ for name in getattr(kind, "__slots__", ())]
    for name in [*names, *getattr(memory, "__dict__", ())]:
        value = getattr(memory, name)
        for tensor in value if isinstance(value, list | tuple) else [value]:
            if isinstance(tensor, Tensor):
                yield tensor.data_ptr()
