"""The operations that models and attention are written in: names, shapes and how one is chosen.

Letters: T rows (tokens of a step), H hidden size, N output features, K input features, I
intermediate size, V vocabulary, Hq query heads, Hk key-value heads, D head size, R rotary
dimensions, B requests, S block size, E experts, k experts per token.

Each op is a callable protocol. Those that most families need are in the modules of this package (their names
are importable from here) and fields of the :class:`OpTable`; one that few families need is a module of
:mod:`headrace_core.ops.optional`, found by name (:meth:`OpTable.optional`); an outside package may have ops
of its own (:class:`OptionalOp`, :class:`BringsOps`). The plain-torch definition of an op, the oracle that
every other implementation is tested against, is the function of the same name in
:mod:`headrace_reference`, its shape-only version (``fake_...``) beside it; the tests that an
implementation inherits are in :mod:`headrace_testing.ops`.

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
    MLAAttentionOp,
    MLACacheWriteOp,
    PagedAttentionOp,
    RotaryCacheWriteOp,
    RotaryOp,
    VarlenAttentionOp,
    check_kv_prefix,
    check_mask,
)
from headrace_core.ops.binding import (
    BringsOps,
    CapturesSteps,
    KernelNeed,
    KernelProvider,
    PacksVNNI,
    bind_ops,
    check_op_names,
    known_op_names,
)
from headrace_core.ops.linear import (
    QUANT_ACTIVATIONS,
    QUANT_BITS,
    ExpertLinearOp,
    HeadLinearOp,
    LinearOp,
    MoEOp,
    PackedLinear,
    QuantizedWeight,
    QuantLinearOp,
    Rounding,
)
from headrace_core.ops.optional import OPTIONAL_OP_NAMES
from headrace_core.ops.recurrent import (
    CausalConvOp,
    DeltaRuleOp,
    GatedRMSNormOp,
    SelectiveScanOp,
    StateSpaceScanOp,
)
from headrace_core.ops.registry import OptionalOp
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
    CopyRowsOp,
    EmbeddingOp,
    GateOp,
    LayerNormOp,
    RMSNormOp,
    RouteExpertsOp,
    ScaleOp,
    ToFloat32Op,
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
    "OPTIONAL_OP_NAMES",
    "OP_NAMES",
    "QUANT_ACTIVATIONS",
    "QUANT_BITS",
    "SCORINGS",
    "ActivationAndMulOp",
    "ActivationOp",
    "AddLayerNormOp",
    "AddOp",
    "AddRMSNormOp",
    "BringsOps",
    "CacheWriteOp",
    "CapturesSteps",
    "CausalConvOp",
    "CopyRowsOp",
    "DeltaRuleOp",
    "EmbeddingOp",
    "ExpertLinearOp",
    "GateOp",
    "GatedRMSNormOp",
    "HeadLinearOp",
    "HeadNorm",
    "KernelNeed",
    "KernelProvider",
    "LayerNormOp",
    "LinearOp",
    "MLAAttentionOp",
    "MLACacheWriteOp",
    "MoEOp",
    "OpTable",
    "OptionalOp",
    "PackedLinear",
    "PacksVNNI",
    "PagedAttentionOp",
    "QuantLinearOp",
    "QuantizedWeight",
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
    "bind_ops",
    "check_kv_prefix",
    "check_mask",
    "check_op_names",
    "known_op_names",
]
