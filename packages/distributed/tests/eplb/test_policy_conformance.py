"""The default policy and the suite of policies."""

from __future__ import annotations

from headrace_distributed.eplb.policy import DefaultPolicy
from headrace_testing.engine.eplb_policies import EPLBPolicyConformance


class TestDefault(EPLBPolicyConformance):
    def policy(self) -> type[DefaultPolicy]:
        return DefaultPolicy
