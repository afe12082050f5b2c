"""All engine settings as one flat list of keywords or flags: :class:`EngineArgs`."""

from __future__ import annotations

import argparse
import dataclasses
import functools
import typing
from collections.abc import Callable, Iterator, Mapping
from numbers import Integral, Real
from types import UnionType
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from headrace.arguments import Parser, default_of, flag_name, kind_of, options_of, takes_more
from headrace.environment import warn_of_unread
from headrace.suggestions import near_names
from headrace.unsupported_flags import unbuilt
from headrace_core.errors import ConfigError
from headrace_core.pooling import PoolerConfig
from headrace_engine.config import EngineConfig, KVEventsConfig, StructuredOutputsConfig
from headrace_engine.speculation.config import SpeculativeConfig

SECTIONS: Mapping[str, str] = {
    "model": "ModelConfig",
    "cache": "CacheConfig",
    "scheduler": "SchedulerConfig",
    "parallel": "ParallelConfig",
    "device": "DeviceConfig",
    "load": "LoadConfig",
    "attention": "AttentionConfig",
    "graph": "GraphConfig",
    "observability": "ObservabilityConfig",
    "sim": "SimConfig",
    "speech": "SpeechConfig",
    "multimodal": "MultiModalConfig",
    "lora": "LoRAConfig",
}
"""Field of :class:`EngineConfig` -> name of its class, which is also its ``--help`` group."""


JSON_SECTIONS: Mapping[str, tuple[str, type]] = {
    "structured_outputs_config": ("structured_outputs", StructuredOutputsConfig),
    "speculative_config": ("speculative", SpeculativeConfig),
    "kv_events_config": ("kv_events", KVEventsConfig),
}
"""Flag that holds a whole section as JSON -> field of :class:`EngineConfig` and its class."""


def _section_classes() -> Iterator[tuple[str, type]]:
    for option in dataclasses.fields(EngineConfig):
        if option.name in SECTIONS:
            config: Any = option.default_factory
            yield option.name, config


def _table() -> dict[str, tuple[str | None, dataclasses.Field[Any]]]:
    """Flat name -> (section, field)."""
    table: dict[str, tuple[str | None, dataclasses.Field[Any]]] = {}
    for section, config in _section_classes():
        for option in options_of(config):
            name = flag_name(option)
            assert name not in table, f"flag {name} is claimed twice"
            table[name] = (section, option)
    for option in options_of(EngineConfig):
        table[flag_name(option)] = (None, option)
    for name, (section, _) in JSON_SECTIONS.items():
        made: Any = dataclasses.field(default_factory=dict)
        made.name = section
        table[name] = (name, made)
    return table


ENGINE_OPTIONS = _table()


class EngineArgs:
    """Engine settings by their flags' names: ``EngineArgs(model="...", max_num_seqs=8)``.

    ``disable_log_stats=True`` is another way to write ``log_stats=False``.

    Raises:
        TypeError: an unknown keyword; names the nearest known ones. Or ``disable_log_stats`` is not a
            boolean, or contradicts ``log_stats``.
        ConfigError: an option of a feature that is not built; names the feature.
        ConfigError: from :meth:`create_engine_config`, a value is out of range.
    """

    def __init__(self, **settings: Any) -> None:
        disabled = settings.pop("disable_log_stats", None)
        if disabled is not None:
            settings["log_stats"] = _collects(disabled, settings.get("log_stats"))
        for name in settings:
            if name not in ENGINE_OPTIONS:
                if (refusal := unbuilt(name)) is not None:
                    raise ConfigError(refusal, field=name)
                near = near_names(name, ENGINE_OPTIONS)
                hint = f"; did you mean {' or '.join(near)}?" if near else ""
                raise TypeError(f"unknown engine argument {name!r}{hint}")
        self.settings = settings

    def __getattr__(self, name: str) -> Any:
        if name.startswith("_") or name not in ENGINE_OPTIONS:
            raise AttributeError(name)
        if name in self.settings:
            return self.settings[name]
        return default_of(ENGINE_OPTIONS[name][1])

    @property
    def disable_log_stats(self) -> bool:
        """The opposite of ``log_stats``."""
        return not self.log_stats

    def __eq__(self, other: object) -> bool:
        return isinstance(other, EngineArgs) and self.as_dict() == other.as_dict()

    def __repr__(self) -> str:
        return f"EngineArgs({', '.join(f'{k}={v!r}' for k, v in self.settings.items())})"

    def as_dict(self) -> dict[str, Any]:
        """Every setting by name, defaults included."""
        return {name: getattr(self, name) for name in ENGINE_OPTIONS}

    @staticmethod
    def add_cli_args(parser: Parser) -> Parser:
        """Add a flag for every engine setting, in groups named after the configuration classes."""
        for section, config in _section_classes():
            parser.add_config(config, SECTIONS[section])
        for flag, (_, config) in JSON_SECTIONS.items():
            parser.add_json_config(config, flag, config.__name__)
        parser.add_config(EngineConfig, "EngineConfig")
        return parser

    @classmethod
    def from_cli_args(cls, namespace: argparse.Namespace) -> EngineArgs:
        """Take the engine's flags out of a parsed command line."""
        given = {name: getattr(namespace, name) for name in ENGINE_OPTIONS}
        return cls(**{n: v for n, v in given.items() if v != default_of(ENGINE_OPTIONS[n][1])})

    def create_engine_config(self) -> EngineConfig:
        """The configuration objects; ``auto`` values are still to be resolved.

        Warns, once in a process, of environment variables that nobody reads.
        """
        warn_of_unread()
        parts: dict[str, dict[str, Any]] = {section: {} for section in SECTIONS}
        root: dict[str, Any] = {}
        for name, value in self.settings.items():
            if name in JSON_SECTIONS:
                field, config = JSON_SECTIONS[name]
                root[field] = _from_json(name, config, value)
                continue
            section, option = ENGINE_OPTIONS[name]
            hint = _hint(section, option.name)
            if value is None and kind_of(hint) is Mapping:
                continue
            if not takes_more(hint):
                _check_kind(name if section is None else f"{section}.{name}", kind_of(hint), value)
            if isinstance(value, list):
                value = tuple(value)
            (root if section is None else parts[section])[option.name] = value
        classes = dict(_section_classes())
        try:
            return EngineConfig(**{s: classes[s](**kw) for s, kw in parts.items()}, **root)
        except TypeError as error:
            raise ConfigError(f"engine arguments: {error}") from error


def _collects(disabled: object, log_stats: object) -> bool:
    """The ``log_stats`` that ``disable_log_stats`` means.

    Raises:
        TypeError: it is not a boolean, or contradicts the ``log_stats`` that is given besides.
    """
    if not isinstance(disabled, bool):
        raise TypeError(f"disable_log_stats = {disabled!r:.100}: must be True or False")
    if log_stats is not None and log_stats is disabled:
        raise TypeError(
            f"disable_log_stats = {disabled} contradicts log_stats = {log_stats}; give one of them"
        )
    return not disabled


@functools.cache
def _hint(section: str | None, name: str) -> Any:
    config: Any = EngineConfig if section is None else dict(_section_classes())[section]
    return typing.get_type_hints(config)[name]


_ACCEPTED: Mapping[Any, tuple[str, Callable[[Any], bool]]] = {
    bool: ("True or False", lambda value: isinstance(value, int) and value in (0, 1)),
    int: ("a whole number", lambda value: isinstance(value, Integral) and _is_number(value)),
    float: ("a number", lambda value: isinstance(value, Real) and _is_number(value)),
    str: ("text", lambda value: not isinstance(value, Real | Mapping | list | tuple)),
    Mapping: ("a mapping", lambda value: isinstance(value, Mapping | PoolerConfig)),
}
"""Kind of an option -> what it may be, in words and as a test. Text has further forms: paths, classes."""


def _is_number(value: Any) -> bool:
    return not isinstance(value, bool)


def _check_kind(name: str, kind: Any, value: Any) -> None:
    accepted = _ACCEPTED.get(kind)
    if accepted is None or value is None:  # the configuration's own affair
        return
    words, fits = accepted
    if not fits(value):
        raise ConfigError(f"{name} = {value!r:.200}: must be {words}", field=name)


def _from_json(flag: str, config: type, value: Any) -> Any:
    """A section from a JSON object (or the section itself).

    Raises:
        ConfigError: a key is unknown, or a value has another type than its field.
    """
    if isinstance(value, config):
        return value
    if not isinstance(value, Mapping):
        raise ConfigError(f"{flag} = {value!r}: must be an object or a {config.__name__}",
                          field=flag)  # fmt: skip
    known = [option.name for option in options_of(config)]
    hints = get_type_hints(config)
    for key, given in value.items():
        if key not in known:
            near = near_names(key, known, 2)
            hint = f"; did you mean {' or '.join(near)}?" if near else f"; keys are {known}"
            raise ConfigError(f"{flag}.{key}: no such key{hint}", field=f"{flag}.{key}")
        kinds = _types_of(hints[key])
        if not isinstance(given, kinds) or (isinstance(given, bool) and bool not in kinds):
            names = " or ".join("null" if k is type(None) else k.__name__ for k in kinds)
            raise ConfigError(
                f"{flag}.{key} = {given!r}: must be of type {names}", field=f"{flag}.{key}"
            )
    return config(**value)


def _types_of(hint: Any) -> tuple[type, ...]:
    """Classes of the values that a field's annotation lets through; a whole number is a float, too."""
    origin = get_origin(hint)
    if origin is Literal:
        return tuple({type(value) for value in get_args(hint)})
    parts = get_args(hint) if origin in (Union, UnionType) else (hint,)
    kinds = [get_origin(part) or part for part in parts]
    return tuple(dict.fromkeys([*kinds, *([int] if float in kinds else [])]))


AsyncEngineArgs = EngineArgs
"""The same: nothing is different for a streaming engine."""
