"""Low-rank adapters (LoRA), under the name that users import."""

from headrace_core.lora import LoRARequest

__all__ = ["LoRARequest"]
