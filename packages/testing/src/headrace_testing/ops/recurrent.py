"""Ops of recurrent layers: numbers, states where they belong, and the same bits however a request is
cut."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, ClassVar

import pytest
import torch
from torch import Tensor

import headrace_reference as reference
from headrace_reference.definitions import definitions
from headrace_testing.ops.inputs import bits_equal, call_wide, wide
from headrace_testing.ops.optional import mlstm, rg_lru, wkv
from headrace_testing.ops.recurrences import Rand, Recurrence, RecurrentCase
from headrace_testing.ops.suite import OpSuite

BLOCKS = 9
Run = Callable[..., Tensor]
"""``run(op, rows, state, state_in, state_out, cu_seqlens_q)``: the op on these rows of its inputs."""


def _causal_conv(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    channels, taps = (70, 4) if variant == 0 else (17, 2 + 4 * variant)
    weight = rand(channels, taps, dtype=dtype, seed=1)
    whole = {
        "weight": weight if variant else weight.T.contiguous().T,
        "bias": None if variant else rand(channels, dtype=dtype, seed=2),
        "activation": None if variant else "silu",
    }
    x = rand(tokens, channels + 9, dtype=dtype)[:, 5 : 5 + channels]
    return RecurrentCase("causal_conv", {"x": x}, whole, (channels, taps - 1), dtype)


def _selective_scan(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    channels, length = (50, 16) if variant == 0 else (7, 3)
    fused = rand(tokens, 2 * channels + 2 * length, dtype=dtype, seed=1)
    inner, gate, b, c = torch.split(fused, [channels, channels, length, length], dim=1)
    by_token = {"x": inner, "dt": rand(tokens, channels, dtype=dtype), "b": b, "c": c}
    whole = {"a": -rand(channels, length, seed=2).exp(), "d": rand(channels, seed=3)}
    if variant == 0:
        by_token["gate"] = gate
        whole["dt_bias"] = rand(channels, seed=4)
    return RecurrentCase("selective_scan", by_token, whole, (channels, length))


def _state_space_scan(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    heads, size, groups, length = ((6, 8, 2, 200), (3, 5, 1, 16), (2, 9, 2, 7))[variant]
    fused = rand(tokens, heads * size + 2 * groups * length, dtype=dtype, seed=1)
    x, b, c = torch.split(fused, [heads * size, groups * length, groups * length], dim=1)
    x = torch.unflatten(x, 1, (heads, size))
    b, c = (torch.unflatten(v, 1, (groups, length)) for v in (b, c))
    by_token = {"x": x, "b": b, "c": c}
    whole: dict[str, Any] = {"a": -rand(heads, seed=2).exp() * 0.3, "d": None, "dt": None}
    if variant != 1:
        del whole["dt"]
        by_token["dt"] = rand(tokens, heads, dtype=dtype, seed=3)
        whole.update(d=rand(heads, seed=4), dt_bias=rand(heads, seed=5))
    if variant == 2:
        whole["dt_limits"] = (0.2, 0.9)
    return RecurrentCase("state_space_scan", by_token, whole, (heads, size, length))


def _delta_rule(rand: Rand, dtype: str, tokens: int, variant: int) -> RecurrentCase:
    keys, heads, length, size = ((2, 4, 24, 40), (3, 3, 9, 7), (1, 2, 33, 16), (2, 2, 10, 6))[
        variant
    ]
    fused = rand(tokens, 2 * keys * length + heads * size, dtype=dtype, seed=1)
    query, key, value = torch.split(fused, [keys * length, keys * length, heads * size], dim=1)
    gates = (heads, length) if variant in (1, 3) else (heads,)
    by_token = {
        "query": torch.unflatten(query, 1, (keys, length)),
        "key": torch.unflatten(key, 1, (keys, length)) * (0.2 if variant == 2 else 1.0),
        "value": torch.unflatten(value, 1, (heads, size)),
        "gate": rand(tokens, *gates, dtype=dtype, seed=2),
        "beta": rand(tokens, heads, dtype=dtype, seed=3),
    }
    whole = {
        "a_log": rand(heads, seed=4) - 1.5, "dt_bias": rand(*gates, seed=5),
        "scale": length**-0.5, "l2_norm_eps": None if variant == 2 else 1e-6,
        "beta_scale": 2.0 if variant == 1 else 1.0,
    }  # fmt: skip
    if variant == 3:
        whole["lower_bound"] = -2.5
    return RecurrentCase("delta_rule", by_token, whole, (heads, length, size))


RECURRENCES = {
    recurrence.name: recurrence
    for recurrence in (
        Recurrence("causal_conv", _causal_conv, 2, (0, 1)),
        Recurrence("selective_scan", _selective_scan, 2, (0,)),
        Recurrence("state_space_scan", _state_space_scan, 3, (0, 1)),
        Recurrence("delta_rule", _delta_rule, 4, (0, 1)),
        rg_lru.RECURRENCE,
        wkv.RECURRENCE,
        mlstm.RECURRENCE,
    )
}
"""By name; those that few families need come from their own modules."""
VARIANTS = [(r.name, variant) for r in RECURRENCES.values() for variant in range(r.variants)]
CUT = [(r.name, variant) for r in RECURRENCES.values() for variant in r.cut]


class RecurrentConformance(OpSuite):
    """Convolution, scans, the delta rule and their like, and the gated norm."""

    def case(self, name: str, dtype: str, tokens: int, variant: int) -> RecurrentCase:
        """See :attr:`Recurrence.make`."""
        return RECURRENCES[name].make(self.rand, dtype, tokens, variant)

    def states(self, case: RecurrentCase, seed: int = 9) -> Tensor:
        """Blocks that lie apart."""
        apart = self.rand(BLOCKS, 2, *case.state_shape, seed=seed)
        RECURRENCES[case.name].make_valid(apart)
        return apart[:, 1].to(getattr(torch, case.state_dtype))

    def indices(self, *values: int) -> Tensor:
        return torch.tensor(values, dtype=torch.int64, device=self.device)

    def bounds(self, lengths: Sequence[int]) -> Tensor:
        ends = torch.tensor([0, *lengths]).cumsum(0)
        return ends.to(torch.int32).to(self.device)

    @pytest.mark.parametrize(("name", "variant"), VARIANTS)
    def test_recurrences(
        self, op: Callable[[str], Any], dtype: str, name: str, variant: int
    ) -> None:
        """Requests that begin, go on in their block or in another, share a beginning, and have no
        token; two rows are nobody's."""
        run = op(name)
        lengths = (5, 1, 0, 41, 3)
        case = self.case(name, dtype, sum(lengths) + 2, variant)
        where = self.indices(-1, 2, 3, 4, 4), self.indices(1, 2, 3, 5, 6)
        state, cu = self.states(case), self.bounds(lengths)
        before = state.clone()
        out = case.run(run, slice(None), state, *where, cu)
        exact, kept = case.widened(), wide(before).double()
        expected = exact.run(
            definitions()[name].op, slice(None), kept, *(w.cpu() for w in where), cu.cpu()
        )
        self.check(out, expected, dtype)
        tolerance = self.tolerances[case.state_dtype if name == "causal_conv" else "float32"]
        torch.testing.assert_close(
            state.cpu().double(), kept, rtol=10 * tolerance, atol=10 * tolerance
        )
        for block in (0, 3, 4, 7, 8):
            assert bits_equal(state[block], before[block]), f"block {block} is nobody's to write"
        assert not bool(out[-2:].any())

    @pytest.mark.parametrize("name", RECURRENCES)
    def test_recurrences_without_a_state(
        self, op: Callable[[str], Any], dtype: str, name: str
    ) -> None:
        """A profiling run: all begin, nothing is kept."""
        case, cu = self.case(name, dtype, 9, 0), self.bounds((4, 5))
        out = case.run(op(name), slice(None), None, None, None, cu)
        state = self.states(case)
        began = case.run(op(name), slice(None), state, self.indices(-1, -1), self.indices(1, 2), cu)
        assert bits_equal(out, began)

    @pytest.mark.parametrize(("name", "variant"), CUT)
    def test_recurrences_cut_anywhere(
        self, invariant_op: Callable[[str], Any], dtype: str, name: str, variant: int
    ) -> None:
        """Outputs and last states have the same bits in one step, token by token, and beside others."""
        run, tokens = invariant_op(name), 39
        case = self.case(name, dtype, tokens, variant)
        state = self.states(case)
        whole = case.run(
            run, slice(None), state, self.indices(2), self.indices(1), self.bounds((tokens,))
        )
        last = state[1].clone()
        for pieces in ((1,) * tokens, (33, 6), (2, 1, 36)):
            state = self.states(case)
            begin, start, outputs = 2, 0, []
            for number, length in enumerate(pieces):
                rows, end = slice(start, start + length), 3 + number % 2
                where = self.indices(begin), self.indices(end)
                outputs.append(case.run(run, rows, state, *where, self.bounds((length,))))
                begin, start = end, start + length
            assert bits_equal(torch.cat(outputs), whole), pieces
            assert bits_equal(state[begin], last), pieces
        state = self.states(case)
        many = torch.arange(tokens).repeat(3).to(self.device)
        where = self.indices(-1, 2, 0), self.indices(3, 4, 5)
        out = case.run(run, many, state, *where, self.bounds((tokens,) * 3))
        assert bits_equal(out[tokens : 2 * tokens], whole)
        assert bits_equal(state[4], last)

    STEPPED: ClassVar = ["selective_scan", "state_space_scan"]
    """Recurrences whose step is a softplus."""

    @pytest.mark.parametrize("name", STEPPED)
    def test_small_steps_keep_their_digits(
        self, op: Callable[[str], Any], dtype: str, name: str
    ) -> None:
        """The logarithm of 1 and little more is not taken of their sum."""
        case, cu = self.case(name, dtype, 3, 0), self.bounds((3,))
        case.by_token["dt"] = case.by_token["dt"] - 8
        case.whole["d"] = torch.zeros_like(case.whole["d"])
        out = case.run(op(name), slice(None), None, None, None, cu).cpu().double()
        exact = case.widened()
        wanted = exact.run(definitions()[name].op, slice(None), None, None, None, cu.cpu())
        tolerance = self.tolerances[dtype] * float(wanted.abs().max())
        torch.testing.assert_close(out, wanted, rtol=0.0, atol=tolerance)

    @pytest.mark.parametrize("name", STEPPED)
    def test_a_step_that_is_no_number_is_seen(
        self, op: Callable[[str], Any], dtype: str, name: str
    ) -> None:
        for variant in (0, 2) if name == "state_space_scan" else (0,):
            case = self.case(name, dtype, 3, variant)
            case.by_token["dt"][1] = torch.nan
            out = case.run(op(name), slice(None), None, None, None, self.bounds((3,)))
            assert bool(out[0].isfinite().all())
            assert bool(out[1:].isnan().all())

    @pytest.mark.parametrize("norm_first", [False, True])
    @pytest.mark.parametrize(("width", "group"), [(64, None), (100, 25), (36, 12), (257, None)])
    def test_gated_rms_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, group: int | None, norm_first: bool
    ) -> None:
        fused = self.rand(7, 2 * width, dtype=dtype)
        x, gate = fused.chunk(2, dim=1)
        for size, activation in ((width, "silu"), (group or width, "sigmoid")):
            weight = self.rand(size, dtype=dtype, seed=1)
            options: dict[str, Any] = {
                "group_size": group,
                "norm_first": norm_first,
                "activation": activation,
            }
            out = op("gated_rms_norm")(x, gate, weight, 1e-5, **options)
            expected = call_wide(reference.gated_rms_norm, x, gate, weight, 1e-5, **options)
            self.check(out, expected, dtype)

    def test_gated_rms_norm_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run = invariant_op("gated_rms_norm")
        weight, x = self.rand(60, dtype=dtype, seed=1), self.rand(70, 60, dtype=dtype)
        self.check_rows(
            x, lambda rows: run(rows, rows, weight, 1e-5, group_size=20, norm_first=False)
        )
