"""GLM-4.7-Flash: DeepSeek V3's structure; the config names the kind of each layer's MLP."""

from __future__ import annotations

from typing import ClassVar

from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM
from headrace_models.families.moe_shape import is_dense_by_list


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    default_eps: ClassVar[float] = 1e-5

    def is_dense(self, index: int) -> bool:
        """Old configs count the dense layers; where neither is said, there is one."""
        first = self.settings.integer("first_k_dense_replace", 1, minimum=0)
        return is_dense_by_list(self.settings, index, first)
