"""The operations that models and attention are written in: names, shapes and how one is chosen.

Letters: T rows (tokens of a step), H hidden size, N output features, K input features, I
intermediate size, V vocabulary, Hq query heads, Hk key-value heads, D head size, R rotary
dimensions, B requests, S block size, E experts, k experts per token.

Each op is a callable protocol below; its plain-torch definition, the oracle that every other
implementation is tested against, is the function of the same name in
:mod:`headrace_core.reference`; shape-only versions are in :mod:`headrace_core.reference.fakes`;
the tests that an implementation inherits are in :mod:`headrace_core.testing.ops`.

Implementations come from *kernel providers* (entry-point group ``headrace.kernels``).
:func:`bind_ops` asks every installed provider once, at assembly, and freezes the best one per op
into an :class:`OpTable`; nothing is looked up per call.

Arithmetic common to all ops: accumulation and statistics in float32; the result has the input's
dtype unless said otherwise. An implementation is *row-invariant* if a row's result does not
depend, bit for bit, on the number, order or content of other rows.
"""

from __future__ import annotations

import functools
import logging
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any, NamedTuple, Protocol, runtime_checkable

from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.graph import StepGraph, StepGraphFactory

logger = logging.getLogger(__name__)

CACHE_OPS = ("cache_write", "rotary_cache_write", "paged_attention")
"""The ops that touch the cache: they take paired ones all, or none of them does."""

ACTIVATIONS = ("silu", "gelu", "gelu_tanh", "relu", "relu2")
"""``gelu`` is exact (erf); ``gelu_tanh`` the tanh approximation; ``relu2`` is relu squared."""

ONE_BYTE_CACHES = ("float8_e4m3fn", "float8_e5m2", "int8")
"""torch names of the dtypes that a cache may have besides the activations' own."""


class EmbeddingOp(Protocol):
    def __call__(self, ids: Tensor, weight: Tensor) -> Tensor:
        """Rows of a table: ids [T] int64, weight [V, H] -> [T, H]. ids are within [0, V)."""
        ...


class RMSNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0) -> Tensor:
        """``x / sqrt(mean(x^2) + eps) * (weight + offset)``, x [..., H], weight [H] -> [..., H].

        Source: Zhang & Sennrich 2019, arXiv:1910.07467. ``offset`` 1.0 is Gemma's form.
        """
        ...


class AddRMSNormOp(Protocol):
    def __call__(
        self, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, offset: float = 0.0
    ) -> tuple[Tensor, Tensor]:
        """``s = x + residual``; returns (rms_norm(s), s). The caller gives up both inputs.

        x, residual [T, H]. The sum is rounded to the input's dtype before it is normalised.
        """
        ...


class LayerNormOp(Protocol):
    def __call__(self, x: Tensor, weight: Tensor, bias: Tensor | None, eps: float) -> Tensor:
        """``(x - mean) / sqrt(var + eps) * weight + bias`` over the last axis, x [..., H]."""
        ...


class ActivationOp(Protocol):
    def __call__(self, x: Tensor, kind: str) -> Tensor:
        """Elementwise ``kind`` of :data:`ACTIVATIONS`, any shape."""
        ...


class ActivationAndMulOp(Protocol):
    def __call__(self, x: Tensor, kind: str) -> Tensor:
        """``act(x[..., :I]) * x[..., I:]``: x [T, 2I] -> [T, I]."""
        ...


class AddOp(Protocol):
    def __call__(self, x: Tensor, y: Tensor) -> Tensor:
        """``x + y``, both [T, H] and of one dtype."""
        ...


class ScaleOp(Protocol):
    def __call__(self, x: Tensor, factor: float) -> Tensor:
        """``x * factor``, x [T, H]; the factor is float32, the product is rounded once."""
        ...


class ToFloat32Op(Protocol):
    def __call__(self, x: Tensor, *, soft_cap: float = 0.0) -> Tensor:
        """x [T, V] as float32; with ``soft_cap`` t > 0, ``t * tanh(x / t)``. May be x itself."""
        ...


class TopKSoftmaxOp(Protocol):
    def __call__(self, x: Tensor, k: int, *, renormalise: bool) -> tuple[Tensor, Tensor]:
        """The k likeliest experts of each row, by a softmax over all: x [T, E] -> weights [T, k]
        float32, ids [T, k] int64, likeliest first; of equal scores, the lower id.

        ``renormalise`` divides a row's weights by their sum. 1 <= k <= E.
        """
        ...


class RotaryOp(Protocol):
    def __call__(
        self, query: Tensor, key: Tensor, positions: Tensor, cos_sin: Tensor, *, interleaved: bool
    ) -> None:
        """Rotate query [T, Hq, D] and key [T, Hk, D] in place by their positions.

        cos_sin [P, R] float32: cosines in the first R/2 columns, sines in the rest; row p is
        position p. Only the first R of the D dimensions turn. Pairs are (i, i + R/2), or
        (2i, 2i + 1) if ``interleaved``. Source: Su et al. 2021, arXiv:2104.09864.
        """
        ...


class CacheWriteOp(Protocol):
    def __call__(
        self,
        key: Tensor,
        value: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Copy key, value [T, Hk, D] to their slots in caches [N, S, Hk, D] (any strides).

        slot_mapping [T] int64: ``block * S + offset``; negative entries are skipped, and so are
        rows of key and value past its end (padding).

        Caches have the dtype of key and value, or one of :data:`ONE_BYTE_CACHES`: then
        ``x / scale`` is stored, rounded to nearest even and clamped to the finite range. k_scale,
        v_scale [Hk] float32, greater than 0; None = 1. Other caches take none.

        Providers that say so (:class:`PairsCaches`) and the reference also take caches in the order
        of :mod:`headrace_core.paired`, which is told by the number of dimensions.
        """
        ...


@dataclass(frozen=True, slots=True)
class HeadNorm:
    """RMS norm over each head's D values, of query and key before rotation (Qwen3, Gemma 3)."""

    query_weight: Tensor
    """[D]."""
    key_weight: Tensor
    """[D]."""
    eps: float
    offset: float = 0.0


class RotaryCacheWriteOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        positions: Tensor,
        cos_sin: Tensor | None,
        key_cache: Tensor,
        value_cache: Tensor,
        slot_mapping: Tensor,
        *,
        interleaved: bool = False,
        head_norm: HeadNorm | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> None:
        """Head norm (if given), rotation (if ``cos_sin``), cache write, in that order, in one pass.

        Shapes as :class:`RotaryOp` and :class:`CacheWriteOp`; query, key and value may be
        strided slices of one fused projection. query is changed in place; key may be (its
        content afterwards is unspecified), value is not.
        """
        ...


class PagedAttentionOp(Protocol):
    def __call__(
        self,
        query: Tensor,
        key_cache: Tensor,
        value_cache: Tensor,
        block_table: Tensor,
        cu_seqlens_q: Tensor,
        seq_lens: Tensor,
        *,
        max_seqlen_q: int,
        max_seqlen_k: int,
        scale: float,
        sliding_window: int | None = None,
        soft_cap: float = 0.0,
        sinks: Tensor | None = None,
        k_scale: Tensor | None = None,
        v_scale: Tensor | None = None,
    ) -> Tensor:
        """Causal attention of new tokens over the paged cache: prefill, decode and mixed alike.

        query [T, Hq, D] (may be a strided slice); caches [N, S, Hk, D], any strides, already
        holding this step's keys and values; block_table [B, M] int32; cu_seqlens_q [B + 1] int32;
        seq_lens [B] int32, including the new tokens. Returns [T, Hq, D], contiguous.

        Query head h reads kv head ``h // (Hq // Hk)``. Request b's new token i stands at
        ``p = seq_lens[b] - q_len + i`` and sees keys j <= p, and with a window W only
        ``p - j < W``. ``soft_cap`` t > 0 maps scores s to ``t * tanh(s / t)``. sinks [Hq] are
        extra logits that enter the softmax's denominator only. A row that sees nothing is 0, and so
        are rows past ``cu_seqlens_q[-1]``. A window that is None or not positive is unlimited.
        Caches (plain or paired), k_scale and v_scale are those of :class:`CacheWriteOp`: a stored x
        stands for ``x * scale``. Definition: ATTN-REF of the specification.
        """
        ...


@dataclass(frozen=True, slots=True)
class PackedLinear:
    """A weight in the layout that one implementation of a linear op wants."""

    in_features: int
    out_features: int
    dtype: str
    """Of the activations it is for."""
    data: Any
    """Belongs to the implementation that packed it."""
    num_bytes: int


class LinearOp(Protocol):
    pack_copies: bool
    """Whether :meth:`pack` keeps nothing of its argument, so that the memory may be used again."""

    def pack(self, weight: Tensor) -> PackedLinear:
        """weight [N, K] in the activations' dtype. Done once, at load; may copy."""
        ...

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: x [T, K] -> [T, N]; bias [N]."""
        ...

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """A gate and what it lets through: ``activation_and_mul(self(x, packed, bias), kind)``.

        The same bits, in one pass where the implementation has one. N is even and the weight's
        first N / 2 rows are the gate's: x [T, K] -> [T, N / 2]; bias [N].
        """
        ...

    def rows(self, ids: Tensor, packed: PackedLinear) -> Tensor:
        """Rows of the packed weight: ids [T] int64 within [0, N) -> [T, K], bit for bit.

        What :class:`EmbeddingOp` does for a table that is also the head, and held once.
        """
        ...


QUANT_ACTIVATIONS = ("int8", "float")
"""How activations enter :class:`QuantLinearOp`."""


@dataclass(frozen=True, slots=True)
class QuantizedWeight:
    """Integers that stand for a real weight: ``(values - zero_points) * scales``.

    Raises:
        ConfigError: a shape, dtype or number of bits that contradicts the others.
    """

    values: Tensor
    """[N, K] int8, within [-2^(bits - 1), 2^(bits - 1) - 1]."""
    scales: Tensor
    """[N, groups] float32: one for every ``group_size`` inputs, the last group may be shorter."""
    zero_points: Tensor | None = None
    """[N, groups] int8, in the values' range; None: zeros."""
    bits: int = 8
    """4 or 8."""
    group_size: int | None = None
    """None: one group, a scale per output."""

    def __post_init__(self) -> None:
        rows, inputs = self.values.shape
        size = max(1, inputs) if self.group_size is None else self.group_size
        if self.bits not in (4, 8) or size < 1:
            raise ConfigError(
                f"quantized weight: bits = {self.bits!r}, group_size = {self.group_size!r}: bits "
                "must be 4 or 8, and a group has inputs"
            )
        expected = (rows, max(1, -(-inputs // size)))
        for name, tensor, dtype in (
            ("scales", self.scales, "torch.float32"),
            ("zero_points", self.zero_points, "torch.int8"),
        ):
            if tensor is None:
                continue
            if tuple(tensor.shape) != expected or str(tensor.dtype) != dtype:
                raise ConfigError(
                    f"quantized weight: {name} are {tensor.dtype} {list(tensor.shape)}; they must "
                    f"be {dtype} {list(expected)}"
                )
        if str(self.values.dtype) != "torch.int8":
            raise ConfigError(f"quantized weight: values are {self.values.dtype}, must be int8")


@dataclass(frozen=True, slots=True)
class Rounding:
    """How a real weight becomes integers; :mod:`headrace_core.reference.rounding` defines it.

    Raises:
        ConfigError: another number of bits than the two that are defined.
    """

    bits: int
    """8: symmetric, a scale per output. 4: symmetric, a bfloat16 scale per group of inputs."""
    group_size: int | None = None
    """Of 4 bits."""

    def __post_init__(self) -> None:
        if (self.bits, self.group_size is None) not in ((8, True), (4, False)):
            raise ConfigError(
                f"rounding: bits = {self.bits!r}, group_size = {self.group_size!r}: must be 8 bits "
                "without groups or 4 bits with"
            )


class QuantLinearOp(Protocol):
    """Integer weights, with activations in int8 or in their own dtype."""

    def pack(self, weight: QuantizedWeight, dtype: str, *, activations: str) -> PackedLinear:
        """Done once, at load. ``dtype`` is x's; ``activations`` of :data:`QUANT_ACTIVATIONS`."""
        ...

    def round(
        self, weight: Tensor, dtype: str, rounding: Rounding, *, activations: str
    ) -> PackedLinear:
        """As :meth:`pack`, of the weight [N, K] of any floating dtype once it is rounded.

        Nothing of ``weight`` is kept.

        Raises:
            WeightsError: it holds infinities or NaN.
        """
        ...

    def __call__(self, x: Tensor, packed: PackedLinear, bias: Tensor | None = None) -> Tensor:
        """``x @ weight.T + bias``: x [T, K] -> [T, N].

        With ``activations="int8"`` a row x_t enters as ``round(x_t / s_t) * s_t``, s_t being its
        largest magnitude / 127 in float32, ties to even; integers are summed exactly. With
        ``"float"`` rows enter as they are, or in fixed point of at least 16 bits (22 if x is
        float32) over the row's largest magnitude.
        """
        ...

    def gated(
        self, x: Tensor, packed: PackedLinear, kind: str, bias: Tensor | None = None
    ) -> Tensor:
        """As :meth:`LinearOp.gated`."""
        ...


class MoEOp(Protocol):
    """Gated experts, summed by routing weight."""

    def pack(self, gate_up: Tensor, down: Tensor) -> PackedLinear:
        """gate_up [E, 2I, H] (gate rows first), down [E, H, I]."""
        ...

    def __call__(
        self, x: Tensor, packed: PackedLinear, topk_weights: Tensor, topk_ids: Tensor, kind: str
    ) -> Tensor:
        """x [T, H], topk_weights [T, k] float32, topk_ids [T, k] int64 -> [T, H].

        A row's experts are summed in the order of ``topk_ids``, in float32.
        """
        ...


class SampleOp(Protocol):
    def __call__(
        self,
        logits: Tensor,
        temperature: Tensor,
        min_p: Tensor,
        top_k: Tensor,
        top_p: Tensor,
        uniform: Tensor,
        *,
        keep_filtered: bool = False,
    ) -> tuple[Tensor, Tensor]:
        """Choose one token per row: logits [T, V] -> (token_ids [T] int64, largest [T] float32).

        The settings are on the CPU wherever the logits are, [T] each: temperature float32, min_p
        float32, top_k int64 (0 = all), top_p float64, uniform float64 in [0, 1).

        A row whose temperature is below :data:`~headrace_core.sampling.GREEDY_BELOW` gets its
        largest logit, of equals the lowest id. Any other: ``y = logits * (1 / temperature)`` in float32;
        tokens with ``y < max(y) + log(min_p)`` go; then all but the top_k largest; then all but
        the fewest of the largest whose weights ``exp(y - max(y))`` reach top_p times the weights of
        what was left; of equals the lowest ids stay. The token is the first at which the running
        sum, in token order, of the remaining weights exceeds ``uniform`` times their sum. Weights
        are float32 (below 2e-35: 0), sums float64, in any order that depends on the row alone.

        ``largest`` is the row's largest logit, NaN if one is NaN. Where it is not finite the token
        is 0 and means nothing. logits may have any floating dtype and are not changed, unless
        ``keep_filtered`` (float32 only): then rows that are not greedy become y, and -inf for the
        tokens that went.
        """
        ...


class TopLogprobs(NamedTuple):
    """Entries of T rows: the given token first, then the best ones without it, best first."""

    token_ids: Tensor
    """[T, n] int64; n at least the largest count + 1. Unspecified past a row's size."""
    values: Tensor
    """[T, n] float32."""
    ranks: Tensor
    """[T, n] int64; 1 + number of strictly greater values in the row."""
    sizes: Tensor
    """[T] int64; how many entries: count, plus one if the token is not among the best."""


class TopLogprobsOp(Protocol):
    def __call__(
        self, logits: Tensor, token_ids: Tensor, counts: Tensor, *, normalize: bool
    ) -> TopLogprobs:
        """Log-probabilities of one token and of the best of each row of logits [T, V], any dtype.

        token_ids [T] int64 within [0, V); counts [T] int64 within [0, V], how many best ones.
        Values are ``(logits - largest) - log(sum(exp(logits - largest)))`` in float32 with
        ``normalize``, else the logits. Best are the largest values, of equal values the lowest ids.
        A row that has no log-probabilities (a NaN or +inf, or nothing but -inf) has one entry, the
        token's, with the value NaN. logits are not changed; results are on the CPU.
        """
        ...


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation per op, chosen once. Passed to whoever computes."""

    embedding: EmbeddingOp
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    layer_norm: LayerNormOp
    activation: ActivationOp
    activation_and_mul: ActivationAndMulOp
    add: AddOp
    scale: ScaleOp
    to_float32: ToFloat32Op
    topk_softmax: TopKSoftmaxOp
    rotary: RotaryOp
    cache_write: CacheWriteOp
    rotary_cache_write: RotaryCacheWriteOp
    paged_attention: PagedAttentionOp
    linear: LinearOp
    quant_linear: QuantLinearOp
    moe: MoEOp
    sample: SampleOp
    top_logprobs: TopLogprobsOp
    providers: Mapping[str, str] = field(default_factory=dict)
    """Which provider each op came from."""
    row_invariant: bool = False
    """True if every bound implementation is; then greedy output does not depend on batching."""
    step_graph: StepGraphFactory | None = None
    """Makes a graph that records steps of these ops; None if no provider can."""
    pairs_caches: bool = False
    """True if the ops that touch the cache take it in the order of :mod:`headrace_core.paired`, and
    are faster for it."""


_NOT_OPS = ("providers", "row_invariant", "step_graph", "pairs_caches")
OP_NAMES = tuple(f.name for f in fields(OpTable) if f.name not in _NOT_OPS)


@dataclass(frozen=True, slots=True)
class KernelNeed:
    """What the ops will run on."""

    device: str
    """``cpu`` or ``cuda``."""
    dtype: str
    """Of activations: ``float32``, ``float16`` or ``bfloat16``."""
    num_threads: int = 0
    """CPU threads, 0 = torch's setting, but no more than the process has cores."""
    cores: tuple[int, ...] = ()
    """Cores to bind these threads to, one each; the first is the calling thread's own affair."""


class KernelProvider(Protocol):
    """A set of op implementations; the object behind an entry point of ``headrace.kernels``."""

    @property
    def name(self) -> str: ...

    def refuse(self, need: KernelNeed) -> list[str]:
        """Reasons why nothing of this provider can serve; empty if it can. Must be cheap."""
        ...

    def priority(self, need: KernelNeed) -> int:
        """Higher wins. The reference has 0, native and Triton providers 100 on their device."""
        ...

    def operations(self, need: KernelNeed) -> Mapping[str, Any]:
        """Op name -> implementation, for those this provider has."""
        ...

    def row_invariant(self, need: KernelNeed) -> bool:
        """Whether all its implementations are; see the module's docstring."""
        ...


@runtime_checkable
class CapturesSteps(Protocol):
    """A kernel provider whose calls can be recorded (:mod:`headrace_core.graph`)."""

    def step_graph(self, operations: Mapping[str, Any]) -> StepGraph:
        """An empty graph for steps of these operations, the result of one call of
        :meth:`KernelProvider.operations`."""
        ...


@runtime_checkable
class PairsCaches(Protocol):
    """A kernel provider whose cache ops also take paired caches (:mod:`headrace_core.paired`)."""

    def pairs_caches(self, need: KernelNeed) -> bool:
        """Whether they do for this need, and gain by it."""
        ...


def bind_ops(need: KernelNeed, *, choose: Mapping[str, str] | None = None) -> OpTable:
    """Choose an implementation for every op from the installed providers.

    Args:
        need: device and dtype.
        choose: op name (or ``"*"``) -> provider name, for a user who insists; a provider that is
            insisted on and refuses, or lacks the op, is an error.

    Raises:
        ConfigError: a name in ``choose`` cannot be honoured; says why and what could serve.
        PluginError: an installed provider that was insisted on cannot be imported.
    """
    choose = dict(choose or {})
    unknown = sorted(set(choose) - set(OP_NAMES) - {"*"})
    if unknown:
        raise ConfigError(f"no op is named {unknown}; ops are {list(OP_NAMES)}", field="kernels")
    candidates = _willing_providers(need, insisted=set(choose.values()))
    table: dict[str, Any] = {}
    origin: dict[str, str] = {}
    for op in OP_NAMES:
        wanted = choose.get(op, choose.get("*"))
        for provider, operations in candidates:
            if op in operations and wanted in (None, provider.name):
                table[op], origin[op] = operations[op], provider.name
                break
        else:
            having = [provider.name for provider, operations in candidates if op in operations]
            raise ConfigError(
                f"op {op!r}: no provider {wanted!r}; could be {having}", field="kernels"
            )
    used = set(origin.values())
    invariant = all(p.row_invariant(need) for p, _ in candidates if p.name in used)
    logger.info("kernels for %s %s: %s", need.device, need.dtype, _summary(origin))
    graphs = [
        functools.partial(provider.step_graph, operations)
        for provider, operations in candidates
        if provider.name in used and isinstance(provider, CapturesSteps)
    ]
    return OpTable(
        **table,
        providers=origin,
        row_invariant=invariant,
        step_graph=graphs[0] if graphs else None,
        pairs_caches=_pair_caches([p for p, _ in candidates], origin, need),
    )


def _pair_caches(
    providers: Sequence[KernelProvider], origin: Mapping[str, str], need: KernelNeed
) -> bool:
    """Whether all ops that touch the cache come from one provider, and that pairs caches."""
    names = {origin[op] for op in CACHE_OPS}
    if len(names) != 1:
        return False
    provider = next(p for p in providers if p.name in names)
    return isinstance(provider, PairsCaches) and provider.pairs_caches(need)


def _willing_providers(
    need: KernelNeed, insisted: set[str]
) -> list[tuple[KernelProvider, Mapping[str, Any]]]:
    """Providers that can serve, best first, with their ops."""
    willing: list[KernelProvider] = []
    for name, plugin in plugins.installed("headrace.kernels").items():
        try:
            provider: KernelProvider = plugin.load()
        except PluginError:
            if name in insisted:
                raise
            logger.warning("kernel provider %r skipped: it cannot be imported", name, exc_info=True)
            continue
        reasons = provider.refuse(need)
        if not reasons:
            willing.append(provider)
        elif name in insisted:
            raise ConfigError(
                f"kernels {name!r} cannot serve: {'; '.join(reasons)}", field="kernels"
            )
        else:
            logger.info("kernels %r not used: %s", name, "; ".join(reasons))
    missing = insisted - set(plugins.installed("headrace.kernels"))
    if missing:
        plugins.load("headrace.kernels", sorted(missing)[0])
    willing.sort(key=lambda provider: (-provider.priority(need), provider.name))
    return [(provider, provider.operations(need)) for provider in willing]


def _summary(origin: Mapping[str, str]) -> str:
    by_provider: dict[str, list[str]] = {}
    for op, provider in origin.items():
        by_provider.setdefault(provider, []).append(op)
    if len(by_provider) == 1:
        return next(iter(by_provider))
    return "; ".join(f"{name}: {', '.join(ops)}" for name, ops in sorted(by_provider.items()))
