"""GLM-4.7-Flash: DeepSeek V3's structure; the config names the kind of each layer's MLP."""

from __future__ import annotations

from headrace_core.errors import UnsupportedModel
from headrace_models.families.deepseek_v3 import DeepseekV3ForCausalLM

KINDS = ("dense", "sparse")


class Glm4MoeLiteForCausalLM(DeepseekV3ForCausalLM):
    """GLM-4.7-Flash."""

    def is_dense(self, index: int) -> bool:
        """Old configs count the dense layers; where neither is said, there is one."""
        kinds = self.context.config.get("mlp_layer_types")
        if kinds is None:
            return index < self.settings.integer("first_k_dense_replace", 1, minimum=0)
        count = self.num_layers()
        if not isinstance(kinds, list) or len(kinds) != count or any(k not in KINDS for k in kinds):
            raise UnsupportedModel(
                f"config.json: mlp_layer_types = {str(kinds)[:200]}: must be {count} entries out of "
                f"{', '.join(KINDS)}"
            )
        return bool(kinds[index] == "dense")
