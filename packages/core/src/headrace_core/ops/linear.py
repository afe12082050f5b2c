"""Ops that multiply by weights, and the weights. Letters: :mod:`headrace_core.ops`."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from torch import Tensor

QUANT_ACTIVATIONS = ("int8", "fp8", "float")
"""Forms in which activations enter :class:`QuantLinearOp`; by ConfigError one may refuse ``fp8``."""
QUANT_BITS = (2, 3, 4, 5, 6, 8)
"""Bits of a code of :class:`QuantizedWeight`."""


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout that one implementation of a linear op wants."""

    in_features: int
    out_features: int
    dtype: str
    """Type of the activations."""
    data: Any
    """Belongs to the implementation that packed it."""
    num_bytes: int


class LinearOp(Protocol):
    pack_copies: bool
    """True if :meth:`pack` keeps nothing of its argument, so that the memory may be used again."""

    def pack(self, weight: Tensor) -> PackedLinear:
        """weight [N, K] in the activations' dtype. Done once, at load; may copy."""

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: x [T, K] -> [T, N]; bias [N]."""

    def activated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """``activation(self(x, packed, bias), kind)``: x [T, K] -> [T, N]; bias [N].

        The same bits, in one pass where the implementation has one.
        """

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """A gate and what it lets through: ``activation_and_mul(self(x, packed, bias), kind)``.

        The same bits, in one pass where the implementation has one. N is even and the weight's
        first N / 2 rows are the gate's: x [T, K] -> [T, N / 2]; bias [N].
        """

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        """Rows of the packed weight: ids [T] int64 within [0, N) -> [T, K], bit for bit.

        What :class:`EmbeddingOp` does for a table that is also the head, and held once.
        """


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Codes of a few bits that stand for a real weight.

    ``W = (T(code) - zero_point) * scale * block_scale - minimum * block_minimum``, by group and block of
    inputs; T is the table where there is one, and what is left out does nothing. Nearly every published
    format is such a weight: see docs/adr/0092.

    Raises:
        ConfigError: a shape, dtype or number of bits that contradicts the others.
    """

    values: Tensor
    """Codes [N, K] int8, within [-2^(bits - 1), 2^(bits - 1) - 1]; with a table it holds the place
    ``code + 2^(bits - 1)``."""
    scales: Tensor
    """[N, groups] float32: one for every ``group_size`` inputs, the last group may be shorter."""
    zero_points: Tensor | None = None
    """[N, groups] int8, in the values' range; not with a table."""
    bits: int = 8
    """Bits of a code; one of :data:`QUANT_BITS`."""
    group_size: int | None = None
    """None: one group, a scale per output."""
    table: Tensor | None = None
    """[2 ** bits] float32: a code book (nf4, e2m1, e4m3), by the lowest code first."""
    minimums: Tensor | None = None
    """[N, groups] float32."""
    block_scales: Tensor | None = None
    """[N, blocks] float32, of ``block_size`` inputs: a multiple of a group's."""
    block_minimums: Tensor | None = None
    """[N, blocks] float32."""
    block_size: int | None = None
    """None: one block."""

    def __post_init__(self) -> None:
        rows, inputs = self.values.shape
        size, block = (
            max(1, inputs) if each is None else each for each in (self.group_size, self.block_size)
        )
        if self.bits not in QUANT_BITS or size < 1 or (block % size and block < inputs):
            raise ConfigError(
                f"quantized weight: bits = {self.bits!r}, group_size = {self.group_size!r}, block_size = "
                f"{self.block_size!r}: bits must be of {QUANT_BITS}, a group has inputs, a block has whole "
                "groups"
            )
        by_group, by_block = ((rows, max(1, -(-inputs // each))) for each in (size, block))
        for name, tensor, shape, dtype in (
            ("values", self.values, (rows, inputs), "int8"),
            ("scales", self.scales, by_group, "float32"),
            ("zero_points", self.zero_points, by_group, "int8"),
            ("table", self.table, (1 << self.bits,), "float32"),
            ("minimums", self.minimums, by_group, "float32"),
            ("block_scales", self.block_scales, by_block, "float32"),
            ("block_minimums", self.block_minimums, by_block, "float32"),
        ):
            if tensor is not None and (
                tuple(tensor.shape) != shape or str(tensor.dtype) != f"torch.{dtype}"
            ):
                raise ConfigError(
                    f"quantized weight: {name} are {tensor.dtype} {list(tensor.shape)}; they must "
                    f"be torch.{dtype} {list(shape)}"
                )
        if self.table is not None and self.zero_points is not None:
            raise ConfigError("quantized weight: a table has its own zero; it takes no zero_points")


@dataclass(frozen=True, slots=True)
class Rounding:
    """Rounding of a real weight to integers; :mod:`headrace_reference.rounding` defines it.

    Raises:
        ConfigError: another number of bits than the two that are defined.
    """

    bits: int
    """8: symmetric, a scale per output. 4: symmetric, a bfloat16 scale per group of inputs."""
    group_size: int | None = None
    """Group size of 4-bit weights."""

    def __post_init__(self) -> None:
        if (self.bits, self.group_size is None) not in ((8, True), (4, False)):
            raise ConfigError(
                f"rounding: bits = {self.bits!r}, group_size = {self.group_size!r}: must be 8 bits "
                "without groups or 4 bits with"
            )


class QuantLinearOp(Protocol):
    """Packed weights, with activations in int8, in FP8 or in their own dtype."""

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        """Done once, at load. ``dtype`` is x's; ``activations`` of :data:`QUANT_ACTIVATIONS`."""

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        """As :meth:`pack`, of the weight [N, K] of any floating dtype once it is rounded.

        Nothing of ``weight`` is kept.

        Raises:
            WeightsError: it holds infinities or NaN.
        """

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: x [T, K] -> [T, N].

        With ``activations="int8"`` a row x_t enters as ``round(x_t / s_t) * s_t``, s_t being its
        largest magnitude / 127 in float32, ties to even; integers are summed exactly. With ``"fp8"``,
        of weights whose table is E4M3, as ``e4m3(x_t / s_t) * s_t``, s_t that magnitude / 448 (1 for
        zeros), ties to even, saturating. With ``"float"`` rows enter as they are, or in fixed point
        of at least 16 bits (22 if x is float32) over the row's largest magnitude.
        """

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """As :meth:`LinearOp.gated`."""

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        """Rows of the real weight, rounded once to the activations' dtype: ids [T] int64 within [0, N) ->
        [T, K]."""

    def join(self, each: Sequence[PackedLinear]) -> PackedLinear | None:
        """Packed weights as the experts of :meth:`routed`; nothing is copied.

        Returns:
            None: they are not of one shape and kind.
        """

    def routed(
        self,
        x: Tensor,
        packed: PackedLinear,
        ids: Tensor,
        weights: Tensor | None = None,
        biases: Tensor | None = None,
    ) -> Tensor:
        """As :class:`ExpertLinearOp`, of weights that were joined; biases [E, N] in x's dtype."""


class HeadLinearOp(Protocol):
    """A small weight for each head, as latent attention has."""

    def pack(self, weight: Tensor) -> PackedLinear:
        """weight [Hq, N, K] in the activations' dtype."""

    def __call__(self, x: Tensor, packed: PackedLinear) -> Tensor:
        """``out[t, h] = weight[h] @ x[t, h]``: x [T, Hq, K] (heads and rows may lie apart) ->
        [T, Hq, N]."""


class MoEOp(Protocol):
    """Gated experts, summed by routing weight."""

    pack_copies: bool
    """True if :meth:`pack` keeps nothing of its arguments, so that the memory may be used again."""

    def pack(
        self,
        gate_up: Tensor,
        down: Tensor,
        gate_up_bias: Tensor | None = None,
        down_bias: Tensor | None = None,
    ) -> PackedLinear:
        """gate_up [E, 2I, H] (gate rows first), down [E, H, I]; biases [E, 2I] and [E, H]."""

    def __call__(
        self,
        x: Tensor,
        packed: PackedLinear,
        topk_weights: Tensor | None,
        topk_ids: Tensor,
        kind: str,
        *,
        identities: int = 0,
        identity_scale: float = 1.0,
    ) -> Tensor:
        """x [T, H], topk_weights [T, k] float32 (None: ones), topk_ids [T, k] int64 -> [T, H]; ``kind``
        of :data:`~headrace_core.ops.GATED_ACTIVATIONS`.

        A row's experts are summed in the order of ``topk_ids``, in float32. The ``identities`` ids from E
        on stand for experts that give back ``identity_scale`` x (LongCat-Flash; arXiv:2509.01322).
        """


class ExpertLinearOp(Protocol):
    """A linear layer of each expert, for the rows that go to it."""

    pack_copies: bool
    """True if :meth:`pack` keeps nothing of its argument, so that the memory may be used again."""

    def pack(self, weight: Tensor) -> PackedLinear:
        """weight [E, N, K] in the activations' dtype."""

    def __call__(
        self, x: Tensor, packed: PackedLinear, ids: Tensor, weights: Tensor | None = None
    ) -> Tensor:
        """``out[t, j] = weight[ids[t, j]] @ x[t]``, or ``@ x[t, j]``: x [T, K] or [T, k, K], ids [T, k]
        int64 -> [T, k, N].

        With weights [T, k] float32 the sum of these by weight, [T, N], in the order of ids, in float32.
        """
