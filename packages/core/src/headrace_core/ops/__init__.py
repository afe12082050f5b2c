"""The operations that models and attention are written in: names, shapes and how one is chosen.

Letters: T rows (tokens of a step), H hidden size, N output features, K input features, I
intermediate size, V vocabulary, Hq query heads, Hk key-value heads, D head size, R rotary
dimensions, B requests, S block size, E experts, k experts per token.

Each op is a callable protocol of a module of this package (all names are importable from here); its
plain-torch definition, the oracle that every other implementation is tested against, is the function
of the same name in :mod:`headrace_core.reference`; shape-only versions are in
:mod:`headrace_core.reference.fakes`; the tests that an implementation inherits are in
:mod:`headrace_core.testing.ops`.

Implementations come from *kernel providers* (entry-point group ``headrace.kernels``).
:func:`bind_ops` asks every installed provider once, at assembly, and freezes the best one per op
into an :class:`OpTable`; nothing is looked up per call.

Arithmetic common to all ops: accumulation and statistics in float32; the result has the input's
dtype unless said otherwise. An implementation is *row-invariant* if a row's result does not
depend, bit for bit, on the number, order or content of other rows.
"""

from headrace_core.ops.attention import (
    CACHE_OPS,
    ONE_BYTE_CACHES,
    CacheWriteOp,
    HeadNorm,
    IndexTokensOp,
    LatentAttentionOp,
    LatentCacheWriteOp,
    PagedAttentionOp,
    RotaryCacheWriteOp,
    RotaryOp,
    VarlenAttentionOp,
    check_mask,
    check_prefix,
)
from headrace_core.ops.binding import (
    CapturesSteps,
    KernelNeed,
    KernelProvider,
    PairsCaches,
    bind_ops,
)
from headrace_core.ops.linear import (
    QUANT_ACTIVATIONS,
    ExpertLinearOp,
    HeadLinearOp,
    LinearOp,
    MoEOp,
    PackedLinear,
    QuantizedWeight,
    QuantLinearOp,
    Rounding,
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
    ACTIVATIONS,
    CLAMPED_SWIGLU_ALPHA,
    CLAMPED_SWIGLU_LIMIT,
    GATED_ACTIVATIONS,
    OPENINGS,
    SCORINGS,
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
from headrace_core.ops.sampling import SampleOp, TopLogprobs, TopLogprobsOp
from headrace_core.ops.table import OP_NAMES, OpTable

__all__ = [
    "ACTIVATIONS",
    "CACHE_OPS",
    "CLAMPED_SWIGLU_ALPHA",
    "CLAMPED_SWIGLU_LIMIT",
    "GATED_ACTIVATIONS",
    "ONE_BYTE_CACHES",
    "OPENINGS",
    "OP_NAMES",
    "QUANT_ACTIVATIONS",
    "SCORINGS",
    "ActivationAndMulOp",
    "ActivationOp",
    "AddLayerNormOp",
    "AddOp",
    "AddRMSNormOp",
    "CacheWriteOp",
    "CapturesSteps",
    "CausalConvOp",
    "ClampOp",
    "CopyRowsOp",
    "DeltaRuleOp",
    "EmbeddingOp",
    "ExpertLinearOp",
    "GateOp",
    "GatedRMSNormOp",
    "GaussianTopKOp",
    "HeadLinearOp",
    "HeadNorm",
    "IndexTokensOp",
    "KernelNeed",
    "KernelProvider",
    "LatentAttentionOp",
    "LatentCacheWriteOp",
    "LayerNormOp",
    "LinearOp",
    "MLSTMOp",
    "MatchRMSOp",
    "MixOp",
    "MoEOp",
    "OpTable",
    "PackedLinear",
    "PagedAttentionOp",
    "PairsCaches",
    "QuantLinearOp",
    "QuantizedWeight",
    "RGLRUOp",
    "RMSNormOp",
    "RotaryCacheWriteOp",
    "RotaryOp",
    "Rounding",
    "RouteExpertsOp",
    "SampleOp",
    "ScaleOp",
    "SelectiveScanOp",
    "StateSpaceScanOp",
    "ToFloat32Op",
    "TopLogprobs",
    "TopLogprobsOp",
    "VarlenAttentionOp",
    "WKVOp",
    "XIELUOp",
    "bind_ops",
    "check_mask",
    "check_prefix",
]
