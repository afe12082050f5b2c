"""Names that a plug-in imports which finds adapters for the server."""

from headrace_server.lora.resolvers import LoRAResolver, LoRAResolverRegistry

__all__ = ["LoRAResolver", "LoRAResolverRegistry"]
