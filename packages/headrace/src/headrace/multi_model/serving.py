"""``headrace serve --models-config FILE``: several models behind one port."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Sequence
from pathlib import Path

from headrace.assembly import choose_platform, starting
from headrace.assembly.inspection import start_block
from headrace.cli.serve import ServeOptions, try_server
from headrace.interrupts import ending_at_once
from headrace.logs import LOADING, keeping_to_warnings
from headrace.multi_model.budget import Budget, check_shares
from headrace.multi_model.entries import read_file
from headrace.multi_model.loader import EngineLoader
from headrace_core.errors import ConfigError
from headrace_engine.log_lines import log_block

logger = logging.getLogger("headrace")


def serve_several(argv: Sequence[str], prepared: ServeOptions, file: Path) -> int:
    """Serve the models of a file from this process; returns its exit status.

    Args:
        argv: the command line.
        prepared: what came of it: the server's settings, and defaults for all models.

    Raises:
        ConfigError: an entry cannot be used, or a setting goes with one model only.
        HeadraceError: a model could not be loaded; names it.
    """
    settings, config = prepared.settings, prepared.config
    _check_alone(prepared)
    with contextlib.ExitStack() as stack:
        with starting(whole_process=True) as timeline:
            try_server(settings, timeline)
            from headrace_server.multi_model.front import create_front
            from headrace_server.run import bind, bind_admin, run

            listening = stack.enter_context(contextlib.closing(bind(settings)))
            admin = bind_admin(settings)
            if admin is not None:
                stack.enter_context(contextlib.closing(admin))
        available = choose_platform(config.device.device).available_memory()
        total = min(available, config.cache.max_memory_bytes or available)
        loader = EngineLoader(argv, Budget(total, config.cache.gpu_memory_utilization))
        entries = [loader.read(entry) for entry in read_file(file)]
        check_shares([e.name for e in entries], [e.share for e in entries])
        # The log names each model's budget, memory and settings, and fits on a screen.
        with keeping_to_warnings(*LOADING):
            with ending_at_once():
                loaded = loader.load_all(entries)
            app = create_front(loaded, settings, loader)
        for one in loaded:
            model = one.engine.model
            log_block(logger, f"{model.name}, as served here", start_block(model, []))
        return run(app, listening, settings, admin)


def _check_alone(prepared: ServeOptions) -> None:
    """Refuse what a server of several models does not have.

    Raises:
        ConfigError: naming the setting.
    """
    settings, model = prepared.settings, prepared.config.model
    if settings.api_server_count > 1:
        raise ConfigError(
            f"api_server_count = {settings.api_server_count}: must be 1 with models_config; several "
            "HTTP processes share one engine",
            field="api_server_count",
        )
    chosen = {"model": model.model, "served_model_name": model.served_model_name}
    for field, value in ({"demo": prepared.demo} if prepared.demo else chosen).items():
        if value:
            raise ConfigError(
                f"{field} = {value!r}: cannot be combined with models_config, whose entries name their "
                f"models",
                field=field,
            )
