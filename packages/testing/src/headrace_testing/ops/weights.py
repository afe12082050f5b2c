"""Packed weights of every kind that published formats have, drawn at random."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from headrace_core.ops import QuantizedWeight
from headrace_testing.ops.inputs import rand

_E2M1 = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0)
_IQ4_NL = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)
_NF4 = (
    -1.0, -0.6961928009986877, -0.5250730514526367, -0.39491748809814453, -0.28444138169288635,
    -0.18477343022823334, -0.09105003625154495, 0.0, 0.07958029955625534, 0.16093020141124725,
    0.24611230194568634, 0.33791524171829224, 0.44070982933044434, 0.5626170039176941,
    0.7229568362236023, 1.0,
)  # fmt: skip
"""Quantiles of a normal distribution: Dettmers et al. 2023, arXiv:2305.14314, appendix E."""
_E3M2 = (
    *(m / 16 for m in range(4)), *((4 + m) / 16 * 2.0**e for e in range(7) for m in range(4)),
)  # fmt: skip
_IQ2 = (1.0, 3.125, 5.375)
TABLES = {
    "e2m1": (*_E2M1, *(-value for value in _E2M1)),
    "e3m2": (*_E3M2, *(-value for value in _E3M2)),
    "iq2": (0.0, *(-value for value in reversed(_IQ2)), *_IQ2, 0.0),
    "iq4_nl": _IQ4_NL,
    "nf4": _NF4,
}


@dataclass(frozen=True, slots=True)
class WeightKind:
    """What a :class:`~headrace_core.ops.QuantizedWeight` of one format has."""

    bits: int
    group_size: int | None = None
    has_zeros: bool = False
    has_minimums: bool = False
    table: str | None = None
    """Of :data:`TABLES`, or a torch dtype of 8-bit floats."""
    block_size: int | None = None
    """With it there are outer scales: of so many inputs, or 0 for one an output."""
    scales: str = "any"
    """``any``: no 16-bit float holds them; ``half``: float16 does; ``power``: powers of two; ``e4m3``; or
    whole numbers: ``signed`` bytes, or ``bits6``, ``bits4`` that are not negative."""

    def draw(
        self, features: int, inputs: int, device: str = "cpu", seed: int = 0
    ) -> QuantizedWeight:
        """Every code there is, the extremes too; products with rows of ones near one."""
        generator = torch.Generator().manual_seed(features + inputs + self.bits + 1000 * seed)
        groups, half = _count(inputs, self.group_size), 1 << (self.bits - 1)
        codes = torch.randint(-half, half, (features, inputs), generator=generator)
        table = self._table()
        if table is not None and not bool(table.isfinite().all()):
            codes[~table.isfinite()[codes + half]] = 0
        norm = inputs**-0.5 / (half if table is None else float(table.nan_to_num().abs().amax()))
        blocks = None
        if self.block_size is not None:
            blocks = _count(inputs, self.block_size or None)
        scales = self._scales(features, groups, generator)
        if blocks is None and self.scales != "power":
            scales = scales * norm
        elif blocks is None:
            scales = scales * 2.0 ** torch.tensor(norm).log2().round()
        if self.scales == "half":
            scales = scales.half().float()
        outer = norm / float(scales.abs().amax().clamp(min=1e-9))
        parts: dict[str, Any] = {
            "scales": scales,
            "zero_points": torch.randint(-half, half, (features, groups), generator=generator)
            if self.has_zeros
            else None,
            "table": table,
            "minimums": self._scales(features, groups, generator) * (norm if blocks is None else 1)
            if self.has_minimums
            else None,
            "block_scales": None
            if blocks is None
            else ((rand(features, blocks).abs() + 0.1) * outer).half().float(),
            "block_minimums": ((rand(features, blocks, seed=1).abs() + 0.1) * outer).half().float()
            if blocks is not None and self.has_minimums
            else None,
        }
        if parts["zero_points"] is not None:
            parts["zero_points"] = parts["zero_points"].to(torch.int8)
        moved: dict[str, Any] = {
            name: None if part is None else part.to(device) for name, part in parts.items()
        }
        return QuantizedWeight(
            codes.to(torch.int8).to(device),
            **moved,
            bits=self.bits,
            group_size=self.group_size,
            block_size=self.block_size or None,
        )

    def _table(self) -> Tensor | None:
        if self.table is None:
            return None
        if self.table in TABLES:
            return torch.tensor(TABLES[self.table], dtype=torch.float32)
        return torch.arange(256).byte().view(getattr(torch, self.table)).float()

    def _scales(self, features: int, groups: int, generator: torch.Generator) -> Tensor:
        def whole(low: int, high: int) -> Tensor:
            return torch.randint(low, high, (features, groups), generator=generator).float()

        if self.scales == "signed":
            return whole(-128, 128)
        if self.scales in ("bits6", "bits4"):
            return whole(0, 64 if self.scales == "bits6" else 16)
        if self.scales == "power":
            return 2.0 ** whole(-3, 4)
        drawn = rand(features, groups).abs() + 0.1
        return drawn.to(torch.float8_e4m3fn).float() if self.scales == "e4m3" else drawn


def _count(inputs: int, size: int | None) -> int:
    return max(1, -(-inputs // (size or max(1, inputs))))


KINDS = {
    "int8": WeightKind(8),
    "int8-32": WeightKind(8, 32),
    "int8-zeros": WeightKind(8, has_zeros=True),
    "int4": WeightKind(4),
    "int4-32": WeightKind(4, 32),
    "int4-32-zeros": WeightKind(4, 32, has_zeros=True),
    "int4-128-zeros": WeightKind(4, 128, has_zeros=True),
    "int4-1024": WeightKind(4, 1024),
    "int3-128-zeros": WeightKind(3, 128, has_zeros=True, scales="half"),
    "int2-64-zeros": WeightKind(2, 64, has_zeros=True, scales="half"),
    "ternary": WeightKind(2),
    "q4_0": WeightKind(4, 32, scales="half"),
    "q4_1": WeightKind(4, 32, has_minimums=True, scales="half"),
    "q5_0": WeightKind(5, 32, scales="half"),
    "q5_1": WeightKind(5, 32, has_minimums=True, scales="half"),
    "q8_0": WeightKind(8, 32, scales="half"),
    "q2_k": WeightKind(2, 16, has_minimums=True, block_size=256, scales="bits4"),
    "q3_k": WeightKind(3, 16, block_size=256, scales="signed"),
    "q4_k": WeightKind(4, 32, has_minimums=True, block_size=256, scales="bits6"),
    "q5_k": WeightKind(5, 32, has_minimums=True, block_size=256, scales="bits6"),
    "q6_k": WeightKind(6, 16, block_size=256, scales="signed"),
    "iq2_xxs": WeightKind(3, 32, table="iq2", block_size=256, scales="signed"),
    "iq2_s": WeightKind(3, 16, table="iq2", block_size=256, scales="signed"),
    "iq4_nl": WeightKind(4, 32, table="iq4_nl", scales="half"),
    "iq4_xs": WeightKind(4, 32, table="iq4_nl", block_size=256, scales="signed"),
    "nf4": WeightKind(4, 64, table="nf4"),
    "mxfp4": WeightKind(4, 32, table="e2m1", scales="power"),
    "mxfp6": WeightKind(6, 32, table="e3m2", scales="power"),
    "nvfp4": WeightKind(4, 16, table="e2m1", block_size=0, scales="e4m3"),
    "fp8": WeightKind(8, table="float8_e4m3fn"),
    "fp8-128": WeightKind(8, 128, table="float8_e4m3fn"),
    "fp8-e5m2": WeightKind(8, table="float8_e5m2"),
    "mxfp8": WeightKind(8, 32, table="float8_e4m3fn", scales="power"),
}
"""Name of a format, or of its numbers -> kind. Each provider of ``quant_linear`` takes them all."""
