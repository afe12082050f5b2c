"""The tests that an implementation of ``sample`` and ``top_logprobs`` inherits.

Subclass :class:`SamplingConformance` with a ``provider`` fixture, as for
:class:`~headrace_testing.ops.OpConformance`. Tokens are compared with the reference's. Weights
are float32, so where the drawn number falls within 1e-5 of the border between two tokens, or a cut
within 1e-5 of the goal, another implementation may choose the neighbour; there, and only there, the
choice is checked against the distribution instead.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar, NamedTuple

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

import headrace_reference as reference
from headrace_core.ops import KernelNeed, KernelProvider, SampleOp, TopLogprobsOp
from headrace_testing.ops.suite import look_up

NEAR = 1e-5


class RowSampling(NamedTuple):
    """One row's."""

    temperature: float = 1.0
    min_p: float = 0.0
    top_k: int = 0
    top_p: float = 1.0


SETTINGS = (
    RowSampling(0.0),
    RowSampling(),
    RowSampling(0.7),
    RowSampling(1.7, top_p=0.9),
    RowSampling(0.9, top_k=1),
    RowSampling(1.0, top_k=40),
    RowSampling(0.9, top_k=900, top_p=0.35),
    RowSampling(0.8, top_k=20, top_p=0.8),
    RowSampling(0.6, top_p=0.5),
    RowSampling(1.0, top_p=0.99),
    RowSampling(1.0, min_p=0.05),
    RowSampling(0.9, min_p=0.01, top_p=0.8),
    RowSampling(0.9, min_p=0.2, top_k=7, top_p=0.95),
    RowSampling(1.0, min_p=1.0),
    RowSampling(1.0, top_p=1e-9),
)


def columns(rows: Sequence[RowSampling]) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """temperature, min_p, top_k, top_p as the op takes them."""
    temperature, min_p, top_k, top_p = zip(*rows)
    return (
        torch.tensor(temperature, dtype=torch.float32),
        torch.tensor(min_p, dtype=torch.float32),
        torch.tensor(top_k, dtype=torch.int64),
        torch.tensor(top_p, dtype=torch.float64),
    )


def is_near(logits: Tensor, row: RowSampling, uniform: float, token: int) -> bool:
    """True if a row [V] may yield ``token`` by rounding: if u, or top_p, were a little different."""
    for top_p in {row.top_p, max(row.top_p - NEAR, 1e-12), min(row.top_p + NEAR, 1.0)}:
        for u in (max(uniform - NEAR, 0.0), min(uniform + NEAR, 1 - 2**-53)):
            settings_of_row = columns([row._replace(top_p=top_p)])
            near, _ = reference.sample(
                logits[None].clone(), *settings_of_row, torch.tensor([u], dtype=torch.float64)
            )
            if int(near) == token:
                return True
    return False


class SamplingConformance:
    """Conformance suite of the sampling ops; see the module's docstring."""

    device: ClassVar[str] = "cpu"

    @pytest.fixture
    def provider(self) -> KernelProvider:
        raise NotImplementedError("override `provider` with a fixture that returns yours")

    @pytest.fixture(params=["float32", "bfloat16", "float16"])
    def dtype(self, request: pytest.FixtureRequest) -> str:
        return str(request.param)

    @pytest.fixture
    def op(self, provider: KernelProvider) -> Callable[[str], Any]:
        return look_up(provider, KernelNeed(device=self.device, dtype="float32"))

    @pytest.fixture
    def sample(self, op: Callable[[str], Any]) -> SampleOp:
        sample: SampleOp = op("sample")
        return sample

    @pytest.fixture
    def top_logprobs(self, op: Callable[[str], Any]) -> TopLogprobsOp:
        top_logprobs: TopLogprobsOp = op("top_logprobs")
        return top_logprobs

    def check(
        self, sample: SampleOp, logits: Tensor, rows: Sequence[RowSampling], uniform: Tensor
    ) -> None:
        """Tokens and largest logits are the reference's; the logits are left alone."""
        before = logits.clone()
        got, largest = sample(logits.to(self.device), *columns(rows), uniform)
        want, want_largest = reference.sample(logits.clone(), *columns(rows), uniform)
        assert torch.equal(logits, before)
        assert torch.equal(largest.cpu(), want_largest)
        for r in (got.cpu() != want).nonzero().flatten().tolist():
            assert is_near(logits[r], rows[r], float(uniform[r]), int(got[r])), (r, rows[r])

    def logits(self, rows: int, vocab_size: int, kind: str, dtype: str) -> Tensor:
        generator = torch.Generator().manual_seed(vocab_size)
        x = torch.randn(rows, vocab_size, generator=generator) * (0.5 if kind == "flat" else 2.5)
        if kind == "ties":
            x = (x * 4).round() / 4
        if kind == "peaked":
            x[:, :: max(1, vocab_size // 5)] += 9
        if kind == "masked":
            x[:, 1::2] = -torch.inf
        return x.to(getattr(torch, dtype))

    @pytest.mark.parametrize("kind", ["normal", "flat", "ties", "peaked", "masked"])
    @pytest.mark.parametrize("vocab_size", [1, 9, 64, 257, 1000, 20011])
    def test_tokens_are_the_references(
        self, sample: SampleOp, dtype: str, kind: str, vocab_size: int
    ) -> None:
        rows = SETTINGS * 2
        uniform = torch.rand(
            len(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(3)
        )
        uniform[:2] = torch.tensor([0.0, 1 - 2**-53])
        self.check(sample, self.logits(len(rows), vocab_size, kind, dtype), rows, uniform)

    def test_random_settings(self, sample: SampleOp) -> None:
        """Few distinct values, so that every cut meets ties."""

        @given(
            rows=st.lists(
                st.tuples(
                    st.lists(st.integers(-9, 9), min_size=40, max_size=40),
                    st.builds(
                        RowSampling,
                        st.sampled_from([0.0, 0.3, 1.0, 2.0]),
                        st.sampled_from([0.0, 0.0, 0.1, 0.6, 1.0]),
                        st.integers(0, 44),
                        st.sampled_from([1.0, 1.0, 0.05, 0.3, 0.55, 0.8, 0.97]),
                    ),
                    st.floats(0, 1, exclude_max=True),
                ),
                min_size=1,
                max_size=6,
            )
        )
        @settings(
            max_examples=150, deadline=None, suppress_health_check=list(HealthCheck), database=None
        )
        def run(rows: list[tuple[list[int], RowSampling, float]]) -> None:
            logits = torch.tensor([[v / 3 for v in values] for values, _, _ in rows])
            uniform = torch.tensor([u for _, _, u in rows], dtype=torch.float64)
            self.check(sample, logits, [row for _, row, _ in rows], uniform)

        run()

    @pytest.mark.parametrize("vocab_size", [9, 1000, 5003])
    def test_filtered_values_are_kept(self, sample: SampleOp, vocab_size: int) -> None:
        for kind in ("normal", "ties", "masked"):
            logits = self.logits(len(SETTINGS), vocab_size, kind, "float32")
            uniform = torch.full((len(SETTINGS),), 0.5, dtype=torch.float64)
            want, got = logits.clone(), logits.to(self.device, copy=True)
            reference.sample(want, *columns(SETTINGS), uniform, keep_filtered=True)
            sample(got, *columns(SETTINGS), uniform, keep_filtered=True)
            got = got.cpu()
            for r, row in enumerate(SETTINGS):
                # Of weights in float32, a cut may take a neighbour more or less.
                moved = int((got[r].isfinite() != want[r].isfinite()).sum())
                assert moved <= (1 if row.top_p < 1 and row.temperature else 0), row
                both = got[r].isfinite() & want[r].isfinite()
                assert torch.equal(got[r][both], want[r][both])

    def test_rows_that_are_not_finite_say_so_alone(self, sample: SampleOp, dtype: str) -> None:
        logits = self.logits(12, 300, "normal", dtype)
        rows = [RowSampling(0.0), RowSampling(0.9, top_p=0.8), RowSampling(1.0, top_k=3)] * 4
        uniform = torch.full((12,), 0.4, dtype=torch.float64)
        healthy, _ = sample(logits.to(self.device), *columns(rows), uniform)
        logits[3:6, 299], logits[6:9, 7], logits[9:] = torch.nan, torch.inf, -torch.inf
        logits[6, 3] = -torch.inf
        token_ids, largest = sample(logits.to(self.device), *columns(rows), uniform)
        assert torch.equal(token_ids[:3], healthy[:3])
        assert token_ids[3:].tolist() == [0] * 9
        assert largest[3:6].isnan().all()
        assert largest[6:].tolist() == [torch.inf] * 3 + [-torch.inf] * 3

    def test_a_row_has_the_same_token_in_any_batch(self, sample: SampleOp, dtype: str) -> None:
        rows = SETTINGS * 3
        logits = self.logits(len(rows), 5003, "normal", dtype).to(self.device)
        uniform = torch.rand(
            len(rows), dtype=torch.float64, generator=torch.Generator().manual_seed(5)
        )
        together, _ = sample(logits, *columns(rows), uniform)
        for r, row in enumerate(rows):
            alone, _ = sample(logits[r : r + 1], *columns([row]), uniform[r : r + 1])
            assert int(alone) == int(together[r]), row

    @pytest.mark.parametrize(
        "row",
        [
            RowSampling(),
            RowSampling(0.5),
            RowSampling(top_k=6),
            RowSampling(top_p=0.8),
            RowSampling(min_p=0.05),
        ],
        ids=str,
    )
    def test_tokens_come_with_their_probabilities(self, sample: SampleOp, row: RowSampling) -> None:
        """Chi-square, 40,000 draws of 24 tokens by numbers from a fixed seed."""
        draws, vocab_size = 40_000, 24
        logits = self.logits(1, vocab_size, "normal", "float32") / 2
        generator = torch.Generator().manual_seed(11)
        uniform = torch.rand(draws, dtype=torch.float64, generator=generator)
        many = logits.expand(draws, -1).contiguous().to(self.device)
        token_ids, _ = sample(many, *columns([row] * draws), uniform)
        filtered = logits.clone()
        reference.sample(filtered, *columns([row]), uniform[:1], keep_filtered=True)
        probabilities = filtered[0].double().softmax(-1)
        counts = torch.bincount(token_ids.cpu(), minlength=vocab_size).double()
        possible = probabilities > 0
        assert int(counts[~possible].sum()) == 0
        expected = probabilities[possible] * draws
        statistic = float(((counts[possible] - expected) ** 2 / expected).sum())
        freedom = max(1, int(possible.sum()) - 1)
        # Exceeded with probability about 1e-4 (Wilson-Hilferty).
        limit = freedom * (1 - 2 / (9 * freedom) + 3.72 * (2 / (9 * freedom)) ** 0.5) ** 3
        assert statistic < limit

    @pytest.mark.parametrize("normalize", [True, False])
    @pytest.mark.parametrize("vocab_size", [1, 9, 64, 257, 5003])
    def test_top_logprobs(
        self, top_logprobs: TopLogprobsOp, dtype: str, vocab_size: int, normalize: bool
    ) -> None:
        for kind in ("normal", "ties", "peaked", "masked"):
            logits = self.logits(12, vocab_size, kind, dtype)
            token_ids = torch.arange(12) * 7 % vocab_size
            token_ids[::3] = logits[::3].argmax(-1)
            counts = torch.tensor([0, 1, 2, 5, 20, 100, vocab_size] * 2)[:12].clamp(max=vocab_size)
            want = reference.top_logprobs(logits, token_ids, counts, normalize=normalize)
            got = top_logprobs(
                logits.to(self.device), token_ids.to(self.device), counts, normalize=normalize
            )
            assert torch.equal(got.sizes, want.sizes)
            for r, size in enumerate(want.sizes.tolist()):
                torch.testing.assert_close(got.values[r, :size], want.values[r, :size])
                assert self._ordered(got.values[r, 1:size], got.token_ids[r, 1:size])
                ids, ranks = got.token_ids[r, :size], got.ranks[r, :size]
                assert int(ids[0]) == int(token_ids[r])
                if not normalize:  # values are the logits: everything is exact
                    assert torch.equal(ids, want.token_ids[r, :size])
                    assert torch.equal(ranks, want.ranks[r, :size])
                assert len(set(ids.tolist())) == size

    @staticmethod
    def _ordered(values: Tensor, ids: Tensor) -> bool:
        pairs = list(zip((-values).tolist(), ids.tolist()))
        return pairs == sorted(pairs)

    def test_top_logprobs_of_rows_without_any(self, top_logprobs: TopLogprobsOp) -> None:
        logits = self.logits(4, 300, "normal", "float32")
        logits[0, 5], logits[1, 5], logits[2] = torch.nan, torch.inf, -torch.inf
        counts, token_ids = torch.full((4,), 3), torch.zeros(4, dtype=torch.int64)
        got = top_logprobs(
            logits.to(self.device), token_ids.to(self.device), counts, normalize=True
        )
        assert got.sizes.tolist() == [1, 1, 1, 4]
        assert got.values[:3, 0].isnan().all()

    def test_top_logprobs_do_not_depend_on_the_batch(self, top_logprobs: TopLogprobsOp) -> None:
        logits = self.logits(9, 5003, "normal", "float32").to(self.device)
        token_ids, counts = torch.arange(9).to(self.device), torch.arange(9) * 3
        together = top_logprobs(logits, token_ids, counts, normalize=True)
        for r in range(9):
            alone = top_logprobs(
                logits[r : r + 1], token_ids[r : r + 1], counts[r : r + 1], normalize=True
            )
            size = int(alone.sizes[0])
            assert size == int(together.sizes[r])
            for one, many in zip(alone[:3], together[:3]):
                assert torch.equal(one[0, :size], many[r, :size])
