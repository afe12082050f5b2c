"""Solar Open: mixtures of experts in every layer, routed as DeepSeek V3's. Upstage 2025."""

from __future__ import annotations

from typing import ClassVar

from headrace_models.families.glm4_moe import Glm4MoeForCausalLM


class SolarOpenForCausalLM(Glm4MoeForCausalLM):
    """Solar-Open-100B."""

    default_theta: ClassVar[float] = 1e6
    default_partial_rotary: ClassVar[float] = 1.0

    def head_dim(self) -> int:
        return self.settings.head_dim(default=128)

    def is_dense(self, index: int) -> bool:
        return False
