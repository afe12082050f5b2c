"""Several engines that share one model's experts (``-dp N -ep``): what that asks of the other settings."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace_core.errors import ConfigError

if TYPE_CHECKING:
    from headrace_core.model import ModelInfo
    from headrace_engine.config import EngineConfig

FIELD = "parallel.data_parallel_size"


def check_shared_experts(config: EngineConfig, info: ModelInfo) -> None:
    """Refuse what engines with experts in common have not been combined with.

    Raises:
        ConfigError: naming the setting.
    """
    if not config.parallel.shares_experts:
        return
    speculative = config.speculative
    for field, value, why in (
        ("lora.enable_lora", config.lora.enable_lora, "adapters beside shared experts were not tried"),
        ("speculative.method", speculative.method, "guesses beside shared experts were not tried"),
        ("speculative.model", speculative.model, "a draft model's passes would be an engine's own"),
        ("model.runner", info.runner if info.runner != "generate" else None,
         "passes that pool are an engine's own"),
    ):  # fmt: skip
        if value:
            raise ConfigError(
                f"{field} = {value!r:.200}: must be left out with enable_expert_parallel and {FIELD} = "
                f"{config.parallel.data_parallel_size}: {why}; without enable_expert_parallel engines are "
                "independent",
                field=field,
            )
