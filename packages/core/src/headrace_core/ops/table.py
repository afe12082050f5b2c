"""The ops that a process has, in one table: :class:`OpTable`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING, Any

from headrace_core.errors import ConfigError
from headrace_core.ops.attention import (
    CacheWriteOp,
    MLAAttentionOp,
    MLACacheWriteOp,
    PagedAttentionOp,
    RotaryCacheWriteOp,
    RotaryOp,
    VarlenAttentionOp,
)
from headrace_core.ops.linear import (
    ExpertLinearOp,
    HeadLinearOp,
    LinearOp,
    MoEOp,
    QuantLinearOp,
)
from headrace_core.ops.recurrent import (
    CausalConvOp,
    DeltaRuleOp,
    GatedRMSNormOp,
    SelectiveScanOp,
    StateSpaceScanOp,
)
from headrace_core.ops.registry import OptionalOp, Signature
from headrace_core.ops.rowwise import (
    ActivationAndMulOp,
    ActivationOp,
    AddLayerNormOp,
    AddOp,
    AddRMSNormOp,
    CopyRowsOp,
    EmbeddingOp,
    GateOp,
    LayerNormOp,
    RMSNormOp,
    RouteExpertsOp,
    ScaleOp,
    ToFloat32Op,
)
from headrace_core.ops.sampling import SampleOp, TopLogprobsOp

if TYPE_CHECKING:
    from headrace_core.graph import StepGraphFactory


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation per op, chosen once. Passed to whoever computes.

    The ops that most families need are fields; :meth:`optional` finds the others.
    """

    embedding: EmbeddingOp
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    layer_norm: LayerNormOp
    add_layer_norm: AddLayerNormOp
    activation: ActivationOp
    activation_and_mul: ActivationAndMulOp
    add: AddOp
    scale: ScaleOp
    gate: GateOp
    copy_rows: CopyRowsOp
    to_float32: ToFloat32Op
    route_experts: RouteExpertsOp
    rotary: RotaryOp
    cache_write: CacheWriteOp
    rotary_cache_write: RotaryCacheWriteOp
    paged_attention: PagedAttentionOp
    varlen_attention: VarlenAttentionOp
    mla_cache_write: MLACacheWriteOp
    mla_attention: MLAAttentionOp
    causal_conv: CausalConvOp
    selective_scan: SelectiveScanOp
    state_space_scan: StateSpaceScanOp
    delta_rule: DeltaRuleOp
    gated_rms_norm: GatedRMSNormOp
    linear: LinearOp
    quant_linear: QuantLinearOp
    head_linear: HeadLinearOp
    moe: MoEOp
    expert_linear: ExpertLinearOp
    sample: SampleOp
    top_logprobs: TopLogprobsOp
    others: Mapping[str, Any] = field(default_factory=dict)
    """Op name -> implementation, for the ops that have no field."""
    providers: Mapping[str, str] = field(default_factory=dict)
    """Name of the provider of each op."""
    row_invariant: bool = False
    """True if every bound implementation is; then greedy output does not depend on batching."""
    step_graph: StepGraphFactory | None = None
    """Makes a graph that records steps of these ops; None if no provider can."""
    vnni_packed: bool = False
    """True if the ops that touch the cache take it in the order of :mod:`headrace_core.ops.vnni`, and
    are faster for it."""

    def optional(self, op: OptionalOp[Signature]) -> Signature:
        """The implementation of an op that few families need; to be asked for once, as a layer is built.

        Raises:
            ConfigError: no installed kernel provider has it.
        """
        try:
            found: Signature = self.others[op.name]
        except KeyError:
            raise ConfigError(
                f"op {op.name!r}: no installed kernel provider has it; install the provider that "
                f"implements it (for headrace's own ops, plain torch: pip install headrace-reference)",
                field="kernels",
            ) from None
        return found


_NOT_OPS = ("others", "providers", "row_invariant", "step_graph", "vnni_packed")

OP_NAMES = tuple(f.name for f in fields(OpTable) if f.name not in _NOT_OPS)
"""Ops that are fields of the table."""
