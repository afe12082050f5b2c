"""Resolvers: where a server looks for an adapter that a request names and nobody has loaded.

A package offers one under the entry-point group ``headrace.lora_resolvers``, or registers it from a
function of ``headrace.general_plugins`` (:class:`LoRAResolverRegistry`). They are asked in the order of
their names, and only where the operator allows that adapters come and go at run time.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping

from headrace_core import plugins
from headrace_core.errors import PluginError
from headrace_core.lora import LoRARequest

GROUP = "headrace.lora_resolvers"


class LoRAResolver(ABC):
    """Finds adapters by name."""

    @abstractmethod
    async def resolve_lora(self, base_model_name: str, lora_name: str) -> LoRARequest | None:
        """The adapter of a name, or None: the next resolver is asked.

        Name and path count; the server gives the adapter an id of its own.

        Args:
            base_model_name: first served name of the model.
            lora_name: as the client wrote it: trust nothing about it.

        Raises:
            RequestError: there is one and it cannot be used; the client gets the text.
        """


class LoRAResolverRegistry:
    """Where a function of ``headrace.general_plugins`` registers the resolvers of its package."""

    @staticmethod
    def register_resolver(resolver_name: str, resolver: LoRAResolver) -> None:
        """Have a resolver asked for unknown names.

        Raises:
            PluginError: it is no :class:`LoRAResolver`.
            PluginConflict: another package registered another one under that name.
        """
        if not isinstance(resolver, LoRAResolver):
            raise PluginError(
                f"LoRA resolver {resolver_name!r}: must be a LoRAResolver, not {type(resolver).__name__}"
            )

        def registered() -> LoRAResolver:
            return resolver

        # Errors and `headrace plugins` name the class.
        registered.__module__ = type(resolver).__module__
        registered.__qualname__ = type(resolver).__qualname__
        plugins.register(GROUP, resolver_name, registered)

    @staticmethod
    def get_supported_resolvers() -> set[str]:
        """Names of all that are installed or registered."""
        return set(plugins.installed(GROUP))

    @staticmethod
    def get_resolver(resolver_name: str) -> LoRAResolver:
        """A resolver by name.

        Raises:
            PluginNotFound, PluginLoadError: it cannot be had.
            PluginError: it is no resolver.
        """
        return _made(resolver_name, plugins.load(GROUP, resolver_name))


def resolvers() -> Mapping[str, LoRAResolver]:
    """All that are installed or registered, by name, in the order in which they are asked.

    Raises:
        PluginError: one cannot be loaded or made, or is no resolver.
    """
    registry = LoRAResolverRegistry
    return {
        name: registry.get_resolver(name) for name in sorted(registry.get_supported_resolvers())
    }


def _made(name: str, found: object) -> LoRAResolver:
    """A resolver, of itself, its class or a function without arguments."""
    made = found() if callable(found) and not isinstance(found, LoRAResolver) else found
    if not isinstance(made, LoRAResolver):
        raise PluginError(
            f"LoRA resolver {name!r}: must be a LoRAResolver, its class or a function that makes one, not "
            f"{type(made).__name__}"
        )
    return made
