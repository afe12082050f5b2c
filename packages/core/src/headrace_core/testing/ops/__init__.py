"""The tests that an implementation of core's ops inherits.

Subclass :class:`OpConformance`, say which provider, device and dtypes, and pytest does the rest::

    class TestMyKernels(OpConformance):
        device = "cpu"
        dtypes = ("float32", "bfloat16")

        @pytest.fixture
        def provider(self):
            return PROVIDER

Every op that the provider has is compared with :mod:`headrace_core.reference` computed in float64
from the same inputs. If the provider claims row invariance, that is tested bit for bit. Ops that it
lacks are skipped. What an op must not look at (unowned cache slots, skipped tokens) is poisoned
with NaN.
"""

from __future__ import annotations

from headrace_core.testing.ops.attention import AttentionConformance
from headrace_core.testing.ops.caches import CacheConformance
from headrace_core.testing.ops.inputs import bits_equal, call_wide, rand, wide
from headrace_core.testing.ops.latent import (
    IndexCase,
    LatentCase,
    LatentConformance,
    index_case,
    latent_case,
)
from headrace_core.testing.ops.linear import LinearConformance
from headrace_core.testing.ops.moe import MoEConformance
from headrace_core.testing.ops.paged import PagedCase, paged_case
from headrace_core.testing.ops.quantized import QuantizedConformance
from headrace_core.testing.ops.recurrent import RecurrentConformance
from headrace_core.testing.ops.routing import RoutingConformance
from headrace_core.testing.ops.rowwise import RowwiseConformance
from headrace_core.testing.ops.varlen import VarlenCase, VarlenConformance, varlen_case

__all__ = [
    "IndexCase",
    "LatentCase",
    "OpConformance",
    "PagedCase",
    "VarlenCase",
    "bits_equal",
    "call_wide",
    "index_case",
    "latent_case",
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
    VarlenConformance,
    LatentConformance,
    RecurrentConformance,
):
    """What every kernel provider must pass; see the module's docstring."""
