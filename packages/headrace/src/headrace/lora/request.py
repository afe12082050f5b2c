"""A request's name for an adapter, under the name that users import."""

from headrace_core.lora import LoRARequest

__all__ = ["LoRARequest"]
