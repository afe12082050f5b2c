"""Plug-in look-up: one entry-point group per role, the entry's name is what a user types.

Rules, the same for built-ins and foreign packages:

- Nothing is imported until a name is asked for (:func:`load`), so an installed but unused plug-in
  costs nothing and cannot break a start.
- Two distributions that claim one name are an error that names both; which one wins is never a
  matter of install order.
- A plug-in that was asked for and fails to import is an error with its cause.

The groups are listed in :data:`GROUPS`; asking for another group is a programming error.
"""

from __future__ import annotations

import difflib
import functools
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from importlib.metadata import EntryPoint, entry_points
from typing import Any

from headrace_core.errors import PluginConflict, PluginLoadError, PluginNotFound

GROUPS: Mapping[str, str] = {
    "headrace.models": "architecture name of a checkpoint's config.json -> model class",
    "headrace.attention_backends": "attention backends",
    "headrace.kernels": "op implementations (kernel providers)",
    "headrace.quantization": "quantization methods",
    "headrace.weight_formats": "checkpoint formats",
    "headrace.communicators": "collective communication",
    "headrace.executors": "how workers are run",
    "headrace.kv_connectors": "KV-cache transfer",
    "headrace.multimodal_processors": "media processing per model family",
    "headrace.grammar_backends": "structured output",
    "headrace.tokenizers": "tokenizer implementations",
    "headrace.logits_processors": "users' logits processors",
    "headrace.io_processors": "requests' data -> prompts, pooled results -> answers",
    "headrace.tool_parsers": "tool-call formats",
    "headrace.reasoning_parsers": "reasoning formats",
    "headrace.routers": "HTTP routers",
    "headrace.schedulers": "scheduling policies (classes)",
    "headrace.platforms": "devices",
    "headrace.general_plugins": "functions that every headrace process runs once at start",
}


@dataclass(frozen=True, slots=True)
class Plugin:
    """One installed, not yet imported plug-in."""

    group: str
    name: str
    target: str
    """``module:attribute`` of the object."""
    distribution: str
    """Name and version of the distribution that offers it."""

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            PluginLoadError: with the original exception as its cause.
        """
        try:
            return EntryPoint(self.name, self.target, self.group).load()
        except Exception as error:
            raise PluginLoadError(
                f"plug-in {self.name!r} of group {self.group!r} ({self.target}, from "
                f"{self.distribution}) could not be imported: {type(error).__name__}: {error}"
            ) from error


@functools.cache
def installed(group: str) -> Mapping[str, Plugin]:
    """All plug-ins of a group by name, nothing imported.

    Raises:
        KeyError: the group is not in :data:`GROUPS`.
        PluginConflict: one name is claimed twice.
    """
    if group not in GROUPS:
        raise KeyError(f"{group!r} is no plug-in group; groups are {sorted(GROUPS)}")
    return _index(group, entry_points(group=group))


def _index(group: str, entries: Iterable[EntryPoint]) -> Mapping[str, Plugin]:
    found: dict[str, Plugin] = {}
    for entry in entries:
        dist = entry.dist
        origin = f"{dist.name} {dist.version}" if dist is not None else "an unknown distribution"
        plugin = Plugin(group, entry.name, entry.value, origin)
        other = found.get(entry.name)
        if other is not None and (other.target, other.distribution) != (plugin.target, origin):
            raise PluginConflict(
                f"plug-in name {entry.name!r} of group {group!r} is claimed twice: by "
                f"{other.distribution} ({other.target}) and by {origin} ({plugin.target}). "
                "Uninstall one of them."
            )
        found[entry.name] = plugin
    return dict(sorted(found.items()))


def load(group: str, name: str) -> Any:
    """Import the plug-in that a user asked for by name.

    Raises:
        PluginNotFound: names the nearest and all installed names.
        PluginConflict, PluginLoadError: see :func:`installed` and :meth:`Plugin.load`.
    """
    plugins = installed(group)
    try:
        return plugins[name].load()
    except KeyError:
        near = difflib.get_close_matches(name, plugins, n=5)
        hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
        names = ", ".join(plugins) or "none"
        raise PluginNotFound(
            f"no plug-in {name!r} in group {group!r} ({GROUPS[group]}).{hint} Installed: {names}"
        ) from None


def forget() -> None:
    """Drop the cached listings, for tests that install plug-ins while running."""
    installed.cache_clear()
