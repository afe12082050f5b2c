"""Entries: which models one server serves, each with a name and settings of its own.

An entry has ``name``, ``model`` and any flag of ``headrace serve`` that is about one model. Other flags on
the command line apply to every entry that does not override them.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, NamedTuple, NoReturn

from headrace.arguments import Parser, argv_of
from headrace.cli.serve import ServeOptions, complete, make_parser, settings_from
from headrace.engine_args import ENGINE_OPTIONS
from headrace.suggestions import near_names
from headrace.unsupported_flags import unbuilt
from headrace_core.errors import ConfigError
from headrace_engine.config import EngineConfig

SERVER_SETTINGS = (
    "chat_template", "chat_template_content_format", "default_chat_template_kwargs",
    "enable_auto_tool_choice", "exclude_tools_when_tool_choice_none", "reasoning_parser",
    "reasoning_parser_plugin", "response_role", "return_tokens_as_token_ids", "tool_call_parser",
    "tool_parser_plugin", "trust_request_chat_template",
)  # fmt: skip
"""Settings of the server that an entry may have: those about how one model is talked to."""
WHOLE_PROCESS = ("num_threads", "cpu_bind")
"""Settings of the threads that all engines of one process share."""
_KNOWN = ("name", *ENGINE_OPTIONS, *SERVER_SETTINGS)


class ModelEntry(NamedTuple):
    """A model that is to be served."""

    name: str
    prepared: ServeOptions
    share: float | None = None
    """Share of the budget that the model reserves; None: none."""
    own_bytes: int | None = None
    """The same in bytes."""

    @property
    def config(self) -> EngineConfig:
        return self.prepared.config


def read_file(path: Path) -> list[dict[str, Any]]:
    """The entries of a YAML or JSON file, as they stand there.

    Raises:
        ConfigError: it cannot be read, or is no list of entries with different names.
    """
    import yaml

    what = f"models_config = {str(path)!r}"
    try:
        text = path.read_text(encoding="utf-8-sig")
        content = json.loads(text) if path.suffix == ".json" else yaml.safe_load(text)
    except (OSError, ValueError, yaml.YAMLError, RecursionError) as error:
        raise ConfigError(f"{what}: cannot be read: {error}", field="models_config") from error
    if not isinstance(content, list) or not content:
        raise ConfigError(f"{what}: must hold a list of entries", field="models_config")
    for entry in content:
        name_of(entry)
    names = [entry["name"] for entry in content]
    for name in names:
        if names.count(name) > 1:
            raise ConfigError(f"{what}: the name {name!r} is used twice", field="models_config")
    return content


def name_of(entry: Any) -> str:
    """An entry's name.

    Raises:
        ConfigError: it has none, no model, or something else that no entry has.
    """
    if not isinstance(entry, Mapping):
        raise ConfigError(f"entry {entry!r}: must be an object with name and model", field="name")
    for field in ("name", "model"):
        value = entry.get(field)
        if not isinstance(value, str) or not value:
            raise ConfigError(f"{field} = {value!r}: each entry must have one, a text", field=field)
    name: str = entry["name"]
    for key, value in entry.items():
        _check(name, key, value)
    return name


def _check(name: str, key: Any, value: Any) -> None:
    flag = str(key).replace("-", "_")
    if flag not in _KNOWN:
        if (refusal := unbuilt(flag)) is not None:
            raise ConfigError(f"model {name!r}: {refusal}", field=flag)
        near = near_names(flag, _KNOWN)
        hint = f"; did you mean {' or '.join(near)}?" if near else "; it is not about one model"
        raise ConfigError(f"model {name!r}: {key}: no setting of an entry{hint}", field=flag)
    if isinstance(value, list) and any(str(item).startswith("-") for item in value):
        raise ConfigError(f"model {name!r}: {key} = {value!r}: items may not begin with '-'",
                          field=flag)  # fmt: skip


def read_entry(entry: Mapping[str, Any], argv: Sequence[str]) -> ModelEntry:
    """An entry as settings.

    Args:
        argv: the server's command line.

    Raises:
        ConfigError: naming the entry and the setting that is wrong.
    """
    name = name_of(entry)
    own = {key.replace("-", "_"): value for key, value in entry.items()}
    del own["name"]
    names = own.pop("served_model_name", [])
    try:
        args = make_parser(_Raising).parse_args([*argv, *argv_of(own)])
        others = [names] if isinstance(names, str) else names
        args.served_model_name = [name, *(other for other in others if other != name)]
        settings = settings_from(args, os.environ)
        config = complete(args, settings).create_engine_config()
        _refuse_adapters(settings.lora_modules, config.lora.enable_lora)
        if not config.engine_process:
            for setting in WHOLE_PROCESS:
                if setting in own:
                    raise ConfigError(
                        f"{setting}: all models of one process share its threads; set it on the "
                        "command line, or give this model engine_process",
                        field=setting,
                    )
    except ConfigError as error:
        raise ConfigError(f"model {name!r}: {error}", field=error.field) from error
    cache, prepared = config.cache, ServeOptions(settings, config)
    if "max_memory_bytes" in own:
        return ModelEntry(name, prepared, own_bytes=cache.max_memory_bytes)
    has_share = "gpu_memory_utilization" in own
    return ModelEntry(name, prepared, share=cache.gpu_memory_utilization if has_share else None)


def _refuse_adapters(modules: Sequence[str], enabled: bool) -> None:
    """Adapters have names of their own, which the choice of a model by its name does not know.

    Raises:
        ConfigError: naming the setting.
    """
    for field, value in (("lora_modules", modules), ("enable_lora", enabled)):
        if value:
            raise ConfigError(
                f"{field} = {value!r}: cannot be combined with models_config: adapters are served beside "
                "one model",
                field=field,
            )


class _Raising(Parser):
    """Says what is wrong to whoever asks, and goes on."""

    def error(self, message: str) -> NoReturn:
        raise ConfigError(message)
