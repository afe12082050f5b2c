"""Ops that work on one row at a time."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

import headrace_reference as reference
from headrace_core.errors import ConfigError
from headrace_core.ops import ACTIVATIONS, GATED_ACTIVATIONS, OPENINGS
from headrace_testing.ops.inputs import bits_equal, call_wide
from headrace_testing.ops.suite import OpSuite

ROWS = (0, 1, 2, 3, 7, 33)
WIDTHS = (1, 8, 40, 64, 100, 257)


class RMSNormConformance(OpSuite):
    """``rms_norm``."""

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_rms_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, offset: float
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype)
            out = op("rms_norm")(x, weight, 1e-6, offset=offset)
            expected = call_wide(reference.rms_norm, x, weight, 1e-6, offset=offset)
            self.check(out, expected, dtype)

    def test_rms_norm_of_heads_in_a_fused_projection(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        fused = self.rand(5, 6 * 40, dtype=dtype)
        heads = torch.unflatten(fused[:, 80:200], 1, (3, 40))
        weight = self.rand(40, dtype=dtype)
        before = fused.clone()
        out = op("rms_norm")(heads, weight, 1e-6)
        self.check(out, call_wide(reference.rms_norm, heads, weight, 1e-6), dtype)
        assert bits_equal(fused, before)

    def test_rms_norm_leaves_small_rows_to_eps(self, op: Callable[[str], Any], dtype: str) -> None:
        x = self.rand(2, 64, dtype=dtype) * 1e-3
        weight = self.rand(64, dtype=dtype)
        out = op("rms_norm")(x, weight, 1e-2)
        self.check(out, call_wide(reference.rms_norm, x, weight, 1e-2), dtype)

    def test_rms_norm_is_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        run, weight = invariant_op("rms_norm"), self.rand(100, dtype=dtype)
        self.check_rows(self.rand(70, 100, dtype=dtype), lambda rows: run(rows, weight, 1e-6))


class RowwiseConformance(RMSNormConformance):
    """Norms, activations, sums, copies, embedding."""

    @pytest.mark.parametrize("rows", ROWS)
    def test_embedding(self, op: Callable[[str], Any], dtype: str, rows: int) -> None:
        weight = self.rand(11, 24, dtype=dtype)
        ids = (torch.arange(rows) * 7 % 11).to(self.device)
        out = op("embedding")(ids, weight)
        assert bits_equal(out, weight[ids])

    def test_embedding_of_ids_beyond_the_table(self, op: Callable[[str], Any], dtype: str) -> None:
        weight = self.rand(11, 24, dtype=dtype)
        ids = torch.tensor([3, 11, -1, 2**40, 10], device=self.device)
        out = op("embedding")(ids, weight, beyond=4)
        assert bits_equal(out, weight[torch.tensor([3, 4, 4, 4, 10], device=self.device)])

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("offset", [0.0, 1.0])
    def test_add_rms_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, offset: float
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype)
            residual = self.rand(rows, width, dtype=dtype, seed=2)
            total = x + residual
            out, kept = op("add_rms_norm")(x, residual, weight, 1e-6, offset=offset)
            expected = call_wide(reference.rms_norm, total, weight, 1e-6, offset=offset)
            assert bits_equal(kept, total)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("biased", [False, True])
    def test_layer_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, biased: bool
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        bias = self.rand(width, dtype=dtype, seed=2) if biased else None
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype) + 3
            out = op("layer_norm")(x, weight, bias, 1e-5)
            expected = call_wide(reference.layer_norm, x, weight, bias, 1e-5)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("width", WIDTHS)
    @pytest.mark.parametrize("biased", [False, True])
    def test_add_layer_norm(
        self, op: Callable[[str], Any], dtype: str, width: int, biased: bool
    ) -> None:
        weight = self.rand(width, dtype=dtype, seed=1)
        bias = self.rand(width, dtype=dtype, seed=2) if biased else None
        for rows in ROWS:
            x = self.rand(rows, width, dtype=dtype) + 3
            residual = self.rand(rows, width, dtype=dtype, seed=3)
            total = x + residual
            out, kept = op("add_layer_norm")(x, residual, weight, bias, 1e-5)
            assert bits_equal(kept, total)
            self.check(out, call_wide(reference.layer_norm, total, weight, bias, 1e-5), dtype)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_activation(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        for shape in [(0, 5), (1, 1), (3, 257), (2, 3, 7)]:
            x = self.rand(*shape, dtype=dtype) * 4
            out = op("activation")(x, kind)
            self.check(out, call_wide(reference.activation, x, kind), dtype)

    @pytest.mark.parametrize("kind", ACTIVATIONS)
    def test_activation_over_its_whole_range(
        self, op: Callable[[str], Any], dtype: str, kind: str
    ) -> None:
        limit = 60.0 if kind == "relu2" else 200.0
        x = torch.linspace(-limit, limit, 4001).to(getattr(torch, dtype)).to(self.device)
        out = op("activation")(x, kind)
        self.check(out, call_wide(reference.activation, x, kind), dtype)

    @pytest.mark.parametrize("kind", GATED_ACTIVATIONS)
    def test_activation_and_mul(self, op: Callable[[str], Any], dtype: str, kind: str) -> None:
        for rows, width in [(0, 8), (1, 1), (1, 100), (3, 257), (33, 64)]:
            x = self.rand(rows, 2 * width, dtype=dtype) * (4 if kind == "clamped_swiglu" else 1)
            out = op("activation_and_mul")(x, kind)
            self.check(out, call_wide(reference.activation_and_mul, x, kind), dtype)

    def test_what_is_only_a_gate_is_no_activation(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        with pytest.raises(ConfigError, match="clamped_swiglu"):
            op("activation")(self.rand(1, 8, dtype=dtype), "clamped_swiglu")

    def test_activations_pass_on_what_is_no_number(
        self, op: Callable[[str], Any], dtype: str
    ) -> None:
        """A broken layer shows in its output."""
        whole, parts = self.rand(2, 70, dtype=dtype), self.rand(4, 70, dtype=dtype)
        whole[1, ::3] = parts[1, 3::9] = parts[2, 38::9] = torch.nan
        for kind in ACTIVATIONS:
            assert torch.equal(op("activation")(whole, kind).isnan(), whole.isnan()), kind
        bad = parts[:, :35].isnan() | parts[:, 35:].isnan()
        for kind in GATED_ACTIVATIONS:
            assert torch.equal(op("activation_and_mul")(parts, kind).isnan(), bad), kind

    def test_activation_and_mul_of_a_slice(self, op: Callable[[str], Any], dtype: str) -> None:
        x = self.rand(5, 100, dtype=dtype)[:, 6:86]
        out = op("activation_and_mul")(x, "silu")
        self.check(out, call_wide(reference.activation_and_mul, x, "silu"), dtype)

    @pytest.mark.parametrize("width", [*WIDTHS, 5000])
    def test_add_and_scale(self, op: Callable[[str], Any], dtype: str, width: int) -> None:
        for rows in ROWS:
            x, y = self.rand(rows, width, dtype=dtype), self.rand(rows, width, dtype=dtype, seed=1)
            assert bits_equal(op("add")(x, y), x + y)
            scaled = (x.float() * 5.65625).to(x.dtype)
            assert bits_equal(op("scale")(x, 5.65625), scaled)

    def test_add_and_scale_of_slices(self, op: Callable[[str], Any], dtype: str) -> None:
        x, y = self.rand(5, 100, dtype=dtype)[:, 6:86], self.rand(10, 80, dtype=dtype)[::2]
        assert bits_equal(op("add")(x, y), x + y)
        assert bits_equal(op("scale")(x, 2.0), x * 2)

    @pytest.mark.parametrize("rows", ROWS)
    def test_copy_rows_to_a_part(self, op: Callable[[str], Any], dtype: str, rows: int) -> None:
        """Side by side, and with dimensions in another order."""
        out = self.rand(rows, 40, dtype=dtype)
        x, y = self.rand(rows, 24, dtype=dtype, seed=1), self.rand(2 * rows, 20, dtype=dtype)[::2]
        kept = out[:, 29:].clone()
        op("copy_rows")(x, out[:, :24])
        op("copy_rows")(y[:, 15:], out[:, 24:29])
        assert bits_equal(out, torch.cat((x, y[:, 15:], kept), dim=1))
        heads = torch.empty((rows, 4, 3, 8), dtype=x.dtype, device=self.device)
        whole = self.rand(rows, 3, 4, 8, dtype=dtype)
        for place in range(3):
            op("copy_rows")(whole[:, place], heads[:, :, place])
        assert bits_equal(heads, whole.transpose(1, 2))

    @pytest.mark.parametrize("activation", [None, *OPENINGS])
    def test_gate_of_runs(
        self, op: Callable[[str], Any], dtype: str, activation: str | None
    ) -> None:
        """Each of a few gates opens some neighbours."""
        for rows, gates, run in [(0, 2, 4), (1, 1, 1), (3, 5, 24), (33, 4, 37)]:
            x = self.rand(rows, gates * run + 3, dtype=dtype)[:, 3:]
            gate = self.rand(rows, 2 * gates, dtype=dtype)[:, :gates]
            out = op("gate")(x, gate, activation=activation)
            expected = call_wide(reference.gate, x, gate, activation=activation)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("activation", [None, *OPENINGS])
    def test_gate(self, op: Callable[[str], Any], dtype: str, activation: str | None) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (2, 5000)]:
            x, gate = self.rand(rows, 2 * width, dtype=dtype).chunk(2, dim=1)
            out = op("gate")(x, gate, activation=activation)
            expected = call_wide(reference.gate, x, gate, activation=activation)
            self.check(out, expected, dtype)

    @pytest.mark.parametrize("soft_cap", [0.0, 30.0])
    def test_to_float32(self, op: Callable[[str], Any], dtype: str, soft_cap: float) -> None:
        for rows, width in [(0, 8), (1, 1), (3, 257), (2, 5000)]:
            x = self.rand(rows, width, dtype=dtype) * 40
            out = op("to_float32")(x, soft_cap=soft_cap)
            self.check(out, call_wide(reference.to_float32, x, soft_cap=soft_cap), "float32")
            if not soft_cap:
                assert bits_equal(out, x.float())

    def test_rowwise_ops_are_row_invariant(
        self, invariant_op: Callable[[str], Any], dtype: str
    ) -> None:
        weight, bias = self.rand(100, dtype=dtype), self.rand(100, dtype=dtype, seed=1)
        x = self.rand(70, 100, dtype=dtype)
        for name, arguments in [
            ("layer_norm", (weight, bias, 1e-5)),
            ("activation_and_mul", ("silu",)),
            ("activation", ("gelu",)),
            ("activation", ("gelu_tanh",)),
            ("scale", (0.3,)),
            ("to_float32", ()),
        ]:
            run = invariant_op(name)
            self.check_rows(x, lambda rows, run=run, rest=arguments: run(rows, *rest), name)  # type: ignore[misc]
        add = invariant_op("add_rms_norm")
        self.check_rows(
            x, lambda rows: add(rows.clone(), rows.clone(), weight, 1e-6)[0], "add_rms_norm"
        )
        add_layer = invariant_op("add_layer_norm")
        self.check_rows(
            x,
            lambda rows: add_layer(rows.clone(), rows.clone(), weight, bias, 1e-5)[0],
            "add_layer_norm",
        )
