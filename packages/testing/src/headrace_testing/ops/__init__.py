"""The tests that an implementation of core's ops inherits.

Subclass :class:`OpConformance`, say which provider, device and dtypes, and pytest does the rest::

    class TestMyKernels(OpConformance):
        device = "cpu"
        dtypes = ("float32", "bfloat16")

        @pytest.fixture
        def provider(self):
            return PROVIDER

Every op that the provider has is compared with :mod:`headrace_reference` computed in float64
from the same inputs. If the provider claims row invariance, that is tested bit for bit. Ops that it
lacks are skipped. An op of an outside package has a suite of its own: subclass
:class:`~headrace_testing.ops.suite.OpSuite` and compare as these do. What an op must not look at
(unowned cache slots, skipped tokens) is poisoned with NaN.
"""

from __future__ import annotations

from headrace_testing.ops.attention import AttentionConformance
from headrace_testing.ops.caches import CacheConformance
from headrace_testing.ops.inputs import bits_equal, call_wide, rand, wide
from headrace_testing.ops.last_keys import LastKeysConformance
from headrace_testing.ops.linear import LinearConformance
from headrace_testing.ops.mla import (
    MLACase,
    MLAConformance,
    mla_case,
)
from headrace_testing.ops.moe import MoEConformance
from headrace_testing.ops.optional.clamp import ClampConformance
from headrace_testing.ops.optional.gaussian_topk import GaussianTopKConformance
from headrace_testing.ops.optional.index_tokens import IndexCase, IndexTokensConformance, index_case
from headrace_testing.ops.optional.key_share import KeyShareConformance
from headrace_testing.ops.optional.low_rank import LowRankConformance
from headrace_testing.ops.optional.lse_correction import LSECorrectionConformance
from headrace_testing.ops.optional.match_rms import MatchRMSConformance
from headrace_testing.ops.optional.mix import MixConformance
from headrace_testing.ops.optional.round_k_quant import RoundKQuantConformance
from headrace_testing.ops.optional.xielu import XIELUConformance
from headrace_testing.ops.paged import PagedCase, paged_case
from headrace_testing.ops.partial_keys import PartialKeysConformance
from headrace_testing.ops.quantized import QuantizedConformance
from headrace_testing.ops.recurrent import RecurrentConformance
from headrace_testing.ops.routing import RoutingConformance
from headrace_testing.ops.row_scales import RowScaleConformance
from headrace_testing.ops.rowwise import RMSNormConformance, RowwiseConformance
from headrace_testing.ops.varlen import VarlenCase, VarlenConformance, varlen_case

__all__ = [
    "IndexCase",
    "MLACase",
    "OpConformance",
    "PagedCase",
    "RMSNormConformance",
    "VarlenCase",
    "bits_equal",
    "call_wide",
    "index_case",
    "mla_case",
    "paged_case",
    "rand",
    "varlen_case",
    "wide",
]


class OpConformance(
    RowwiseConformance,
    LinearConformance,
    QuantizedConformance,
    RoutingConformance,
    MoEConformance,
    CacheConformance,
    AttentionConformance,
    LastKeysConformance,
    PartialKeysConformance,
    VarlenConformance,
    MLAConformance,
    RowScaleConformance,
    RecurrentConformance,
    # Ops that few families need, a module each.
    ClampConformance,
    GaussianTopKConformance,
    IndexTokensConformance,
    KeyShareConformance,
    LowRankConformance,
    LSECorrectionConformance,
    MatchRMSConformance,
    MixConformance,
    RoundKQuantConformance,
    XIELUConformance,
):
    """The tests that every kernel provider must pass; see the module's docstring."""
