"""Families with mixtures of experts in further places, or with attention of their own kind, each on a
tiny config in which its own features matter."""

from __future__ import annotations

from typing import ClassVar

import pytest
from test_moe_families import TINY_MOE, MoEConformance

pytestmark = pytest.mark.spec("MODEL-TEXTGEN-MOE")


class TestJetMoe(MoEConformance):
    """Six heads for each token: three experts, and two key-value heads."""

    stem = "JetMoe"
    own: ClassVar = {"kv_channels": 20, "num_local_experts": 5, "num_experts_per_tok": 3,
                     "rms_norm_eps": 0.03}  # fmt: skip


class TestAfmoe(MoEConformance):
    stem = "Afmoe"
    own: ClassVar = {
        **TINY_MOE, "num_experts": 8, "num_shared_experts": 2, "num_dense_layers": 1, "head_dim": 20,
        "route_scale": 1.7, "sliding_window": 9, "global_attn_every_n_layers": 2,
        "mup_enabled": True, "attention_bias": True,
    }  # fmt: skip
