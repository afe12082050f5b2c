"""What a configuration asks a scheduler for beyond the contract. A plug-in that cannot do it is refused by
name, before weights are read."""

from __future__ import annotations

import inspect
from collections.abc import Mapping

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_engine.config import EngineConfig

FIELD = "scheduler.scheduler_cls"


def check_scheduler(config: EngineConfig, asked: Mapping[str, str]) -> None:
    """Import the scheduler class, and see that its constructor takes what it will be given.

    Args:
        asked: keyword -> the setting that asks for it, as messages name it.

    Raises:
        PluginError: it cannot be imported.
        ConfigError: it does not take a keyword.
    """
    name = config.scheduler.scheduler_cls
    chosen = plugins.load("headrace.schedulers", name)
    try:
        parameters = inspect.signature(chosen).parameters
    except (TypeError, ValueError):  # written in C
        return
    if any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values()):
        return
    for keyword, setting in asked.items():
        if keyword not in parameters:
            raise ConfigError(
                f"{FIELD} = {name!r}: must be a scheduler whose constructor takes {keyword!r}, for "
                f"{setting}; this one takes {', '.join(parameters)}. Leave one of the two settings out",
                field=FIELD,
            )
