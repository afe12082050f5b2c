"""Plug-in look-up: one entry-point group per role, the entry's name is what a user types.

Rules, the same for built-ins and foreign packages:

- Nothing is imported until a name is asked for (:func:`load`), so an installed but unused plug-in
  costs nothing and cannot break a start.
- Two distributions that claim one name are an error that names both; which one wins is never a
  matter of install order.
- A plug-in that was asked for and fails to import is an error with its cause.

Names can also be registered by code (:func:`register`), for this process only: by the functions of
``headrace.general_plugins``, which every process runs before it looks for a model
(:func:`run_general`), or by a script that makes an engine in its own process.

The groups are listed in :data:`GROUPS`; asking for another group is a programming error.
"""

from __future__ import annotations

import difflib
import functools
import inspect
import logging
import os
import threading
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from importlib.metadata import EntryPoint
from importlib.metadata import entry_points as all_entry_points
from typing import Any

from headrace_core.errors import PluginConflict, PluginError, PluginLoadError, PluginNotFound

logger = logging.getLogger(__name__)

GENERAL = "headrace.general_plugins"
CHOICE = "HEADRACE_PLUGINS"
"""Environment variable: names of the general plug-ins that are run, with commas; unset: all."""

GROUPS: Mapping[str, str] = {
    "headrace.models": "architecture name of a checkpoint's config.json -> model class",
    "headrace.attention_backends": "attention backends",
    "headrace.kernels": "op implementations (kernel providers)",
    "headrace.quantization": "quantization methods",
    "headrace.weight_encoders": "quantized formats that headrace quantize writes",
    "headrace.weight_formats": "checkpoint formats",
    "headrace.communicators": "collective communication",
    "headrace.executors": "how workers are run",
    "headrace.kv_connectors": "KV-cache transfer",
    "headrace.eplb_policies": "places of experts by their load",
    "headrace.ec_connectors": "transfer of media's vectors between engines",
    "headrace.multimodal_processors": "media processing per model family",
    "headrace.grammar_backends": "structured output",
    "headrace.tokenizers": "tokenizer implementations",
    "headrace.logits_processors": "users' logits processors",
    "headrace.io_processors": "requests' data -> prompts, pooled results -> answers",
    "headrace.tool_parsers": "tool-call formats",
    "headrace.reasoning_parsers": "reasoning formats",
    "headrace.routers": "HTTP routers",
    "headrace.lora_resolvers": "where adapters are looked for that a request names",
    "headrace.schedulers": "scheduling policies (classes)",
    "headrace.draft_proposers": "guesses of next tokens for speculative decoding",
    "headrace.platforms": "devices",
    "headrace.memory_pools": "device type -> memory that sleeps",
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
    held: Any = field(default=None, repr=False)
    """The object itself, if it was registered as such."""

    def load(self) -> Any:
        """Import and return the object.

        Raises:
            PluginLoadError: with the original exception as its cause.
        """
        if self.held is not None:
            return self.held
        try:
            return EntryPoint(self.name, self.target, self.group).load()
        except Exception as error:
            raise PluginLoadError(
                f"plug-in {self.name!r} of group {self.group!r} ({self.target}, from "
                f"{self.distribution}) could not be imported: {type(error).__name__}: {error}"
            ) from error


class _Process:
    """Plug-ins that code has registered in this process, and general plug-ins that were run."""

    def __init__(self) -> None:
        self.lock = threading.RLock()
        self.registered: dict[str, dict[str, Plugin]] = {}
        self.running = ""
        """Distribution of the general plug-in that is being run."""
        self.ran: tuple[Plugin, ...] | None = None


_process = _Process()


def register(group: str, name: str, target: Any) -> None:
    """Register an object under a name, before any of an entry point.

    Args:
        target: the object, or ``"module:attribute"``, which is imported when it is asked for.

    Raises:
        KeyError: the group is not in :data:`GROUPS`.
        PluginConflict: another plug-in registered another object under that name.
    """
    known = _by_entry_points(group).get(name)
    held = None if isinstance(target, str) else target
    path = target if held is None else f"{held.__module__}:{held.__qualname__}"
    with _process.lock:
        origin = _process.running or f"module {path.partition(':')[0]}"
        names = _process.registered.setdefault(group, {})
        other = names.get(name)
        if other is not None and (other.target, other.distribution) != (path, origin):
            raise _claimed_twice(group, name, other, Plugin(group, name, path, origin))
        if known is not None and other is None:
            logger.warning(
                "%s: %r of %s (%s) replaces that of %s (%s)",
                group, name, origin, path, known.distribution, known.target,
            )  # fmt: skip
        names[name] = Plugin(group, name, path, origin, held)


def run_general() -> tuple[Plugin, ...]:
    """Run the functions of ``headrace.general_plugins``, once in a process; returns their plug-ins.

    ``HEADRACE_PLUGINS`` names those that are run; unset, all of them are.

    Raises:
        PluginNotFound: it names one that is not installed.
        PluginLoadError: one cannot be imported, or raised; with the exception as cause.
        PluginConflict: two registered one name.
    """
    with _process.lock:
        if _process.ran is None:
            wanted = _wanted(installed(GENERAL))
            for plugin in wanted:
                _run(plugin)
            _process.ran = wanted
        return _process.ran


def _wanted(general: Mapping[str, Plugin]) -> tuple[Plugin, ...]:
    choice = os.environ.get(CHOICE)
    if choice is None:
        return tuple(general.values())
    names = [name.strip() for name in choice.split(",") if name.strip()]
    for name in names:
        if name not in general:
            raise PluginNotFound(
                f"{CHOICE} = {choice!r}: no general plug-in {name!r} is installed; installed: "
                f"{', '.join(general) or 'none'}"
            )
    return tuple(general[name] for name in dict.fromkeys(names))


def _run(plugin: Plugin) -> None:
    function = plugin.load()
    _process.running = plugin.distribution
    try:
        function()
    except PluginConflict:
        raise
    except Exception as error:
        raise PluginLoadError(
            f"general plug-in {plugin.name!r} ({plugin.target}, from {plugin.distribution}) failed: "
            f"{type(error).__name__}: {error}"
        ) from error
    finally:
        _process.running = ""


def installed(group: str) -> Mapping[str, Plugin]:
    """All plug-ins of a group by name, nothing imported.

    Raises:
        KeyError: the group is not in :data:`GROUPS`.
        PluginConflict: one name is claimed twice.
    """
    known, registered = _by_entry_points(group), _process.registered.get(group)
    return dict(sorted({**known, **registered}.items())) if registered else known


@functools.cache
def _by_entry_points(group: str) -> Mapping[str, Plugin]:
    if group not in GROUPS:
        raise KeyError(f"{group!r} is not a plug-in group; groups are {sorted(GROUPS)}")
    return _index(group, entry_points(group=group))


def entry_points(group: str) -> Iterable[EntryPoint]:
    """Those of a group. What is installed is looked through once in a process, not once for each group."""
    found: Iterable[EntryPoint] = _entries().select(group=group)
    return found


@functools.cache
def _entries() -> Any:
    """SelectableGroups before Python 3.12, EntryPoints since."""
    return all_entry_points()


def _index(group: str, entries: Iterable[EntryPoint]) -> Mapping[str, Plugin]:
    found: dict[str, Plugin] = {}
    origins: dict[int, str] = {}
    entries = tuple(entries)
    for entry in entries:
        dist = entry.dist
        if dist is None:
            origin = "an unknown distribution"
        elif id(dist) in origins:
            origin = origins[id(dist)]
        else:  # a distribution reads and parses its file each time that its name or version is asked for
            origin = origins[id(dist)] = f"{dist.name} {dist.version}"
        plugin = Plugin(group, entry.name, entry.value, origin)
        other = found.get(entry.name)
        if other is not None and (other.target, other.distribution) != (plugin.target, origin):
            raise _claimed_twice(group, entry.name, other, plugin)
        found[entry.name] = plugin
    return dict(sorted(found.items()))


def _claimed_twice(group: str, name: str, first: Plugin, second: Plugin) -> PluginConflict:
    return PluginConflict(
        f"plug-in name {name!r} of group {group!r} is registered twice: by {first.distribution} "
        f"({first.target}) and by {second.distribution} ({second.target}). Uninstall one of them."
    )


def find(group: str, name: str) -> Plugin:
    """The plug-in that a user asked for by name, not imported.

    Raises:
        PluginNotFound: names the nearest and all installed names.
        PluginConflict: see :func:`installed`.
    """
    plugins = installed(group)
    if name in plugins:
        return plugins[name]
    lower = {known.lower(): known for known in plugins}
    near = [lower[found] for found in difflib.get_close_matches(name.lower(), lower, n=5)]
    hint = f" Did you mean {', '.join(map(repr, near))}?" if near else ""
    names = ", ".join(plugins) or "none"
    raise PluginNotFound(
        f"no plug-in {name!r} in group {group!r} ({GROUPS[group]}).{hint} Installed: {names}"
    )


def load(group: str, name: str) -> Any:
    """:func:`find` the plug-in, and import it.

    Raises:
        PluginNotFound, PluginConflict: see :func:`find`.
        PluginLoadError: see :meth:`Plugin.load`.
    """
    return find(group, name).load()


def forget() -> None:
    """Drop the cached listings and what was registered, for tests that install plug-ins while running."""
    _entries.cache_clear()
    _by_entry_points.cache_clear()
    with _process.lock:
        _process.registered.clear()
        _process.ran = None


MODELS = "headrace.models"
_OTHERS = "vllm_config"
"""A parameter of constructors that were written for another engine."""


class ModelRegistry:
    """Where a function of ``headrace.general_plugins`` registers the models of its package."""

    @staticmethod
    def register_model(architecture: str, model_class: type[Any] | str) -> None:
        """Serve an architecture with a class; see :func:`headrace_core.plugins.register`.

        A name that headrace has itself is taken over, with a warning.

        Args:
            architecture: as ``config.json`` names it.
            model_class: a class, or ``"module:Class"``: imported only if a checkpoint needs it, so that
                the plug-in costs other models nothing and initialises no device.

        Raises:
            PluginError: neither a class nor such a text; or a class with another constructor.
            PluginConflict: another package registered the name.
        """
        if isinstance(model_class, str):
            module, _, name = model_class.partition(":")
            if not module or not name:
                raise PluginError(
                    f"model class {model_class!r} of {architecture!r}: must be a class or 'module:Class'"
                )
        else:
            check_constructor(model_class)
        register(MODELS, architecture, model_class)


def check_constructor(model_class: object) -> None:
    """True if a model can be made of a class as the loader makes it: ``(context, prefix="")``.

    Raises:
        PluginError: it is no class, or takes something else; says what.
    """
    name = getattr(model_class, "__qualname__", repr(model_class))
    if not isinstance(model_class, type):
        raise PluginError(f"model class {name}: must be a class, not {type(model_class).__name__}")
    takes = "what is unknown"
    try:
        signature = inspect.signature(model_class)
        takes = str(signature)
        signature.bind(None)
        signature.bind(None, prefix="")
    except (TypeError, ValueError) as error:  # a ValueError: it is written in C
        where = ". docs/extending/from-vllm.md says where to find its contents now"
        hint = where if _OTHERS in takes else ""
        raise PluginError(
            f"model class {model_class.__module__}:{name} takes {takes}: its constructor must take "
            '(context, prefix=""), a headrace_core.model.BuildContext and the beginning of its '
            f"checkpoints' names ({error}){hint}"
        ) from error
