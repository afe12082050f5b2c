"""All ops in one table: :class:`OpTable`."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, fields
from typing import TYPE_CHECKING

from headrace_core.ops.attention import (
    CacheWriteOp,
    IndexTokensOp,
    LatentAttentionOp,
    LatentCacheWriteOp,
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
    MLSTMOp,
    RGLRUOp,
    SelectiveScanOp,
    StateSpaceScanOp,
    WKVOp,
)
from headrace_core.ops.rowwise import (
    ActivationAndMulOp,
    ActivationOp,
    AddLayerNormOp,
    AddOp,
    AddRMSNormOp,
    ClampOp,
    CopyRowsOp,
    EmbeddingOp,
    GateOp,
    GaussianTopKOp,
    LayerNormOp,
    MatchRMSOp,
    MixOp,
    RMSNormOp,
    RouteExpertsOp,
    ScaleOp,
    ToFloat32Op,
    XIELUOp,
)
from headrace_core.ops.sampling import SampleOp, TopLogprobsOp

if TYPE_CHECKING:
    from headrace_core.graph import StepGraphFactory


@dataclass(frozen=True, slots=True)
class OpTable:
    """One implementation per op, chosen once. Passed to whoever computes."""

    embedding: EmbeddingOp
    rms_norm: RMSNormOp
    add_rms_norm: AddRMSNormOp
    layer_norm: LayerNormOp
    add_layer_norm: AddLayerNormOp
    activation: ActivationOp
    activation_and_mul: ActivationAndMulOp
    xielu: XIELUOp
    add: AddOp
    scale: ScaleOp
    gate: GateOp
    clamp: ClampOp
    copy_rows: CopyRowsOp
    mix: MixOp
    match_rms: MatchRMSOp
    gaussian_topk: GaussianTopKOp
    to_float32: ToFloat32Op
    route_experts: RouteExpertsOp
    rotary: RotaryOp
    cache_write: CacheWriteOp
    rotary_cache_write: RotaryCacheWriteOp
    paged_attention: PagedAttentionOp
    varlen_attention: VarlenAttentionOp
    latent_cache_write: LatentCacheWriteOp
    latent_attention: LatentAttentionOp
    index_tokens: IndexTokensOp
    causal_conv: CausalConvOp
    selective_scan: SelectiveScanOp
    state_space_scan: StateSpaceScanOp
    delta_rule: DeltaRuleOp
    rg_lru: RGLRUOp
    wkv: WKVOp
    mlstm: MLSTMOp
    gated_rms_norm: GatedRMSNormOp
    linear: LinearOp
    quant_linear: QuantLinearOp
    head_linear: HeadLinearOp
    moe: MoEOp
    expert_linear: ExpertLinearOp
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
