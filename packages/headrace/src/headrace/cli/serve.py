"""``headrace serve``: bind, load, serve, drain."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
import os
from argparse import Namespace
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from headrace.arguments import Parser, flag_name, options_of
from headrace.engine_args import EngineArgs
from headrace.interrupts import ending_at_once
from headrace.logs import configure, queue_prints
from headrace_core.errors import ConfigError, MissingDependency
from headrace_engine.log_lines import log_block

if TYPE_CHECKING:
    from headrace.assembly import TemplateSettings
    from headrace_engine.config import EngineConfig, ObservabilityConfig
    from headrace_engine.startup import StartupTimeline
    from headrace_server.settings import ServerSettings

logger = logging.getLogger("headrace")


class ServeOptions(NamedTuple):
    """Result of parsing a command line."""

    settings: ServerSettings
    config: EngineConfig
    models_config: str | None = None
    """File with the entries of several models."""
    demo: str | None = None
    """``--demo``, which chose the model."""
    headless: bool = False
    """This host has ranks of an engine that another one serves."""

    @property
    def templates(self) -> TemplateSettings:
        """Settings for rendering chats.

        Raises:
            ConfigError: the template's file cannot be read.
        """
        from headrace.assembly import templates_of

        return templates_of(self.settings)

    def share_of_config(self) -> EngineConfig:
        """The configuration of one HTTP process of several: its part of the queue."""
        from headrace_engine.queue_limits import MAX_QUEUED_REQUESTS

        scheduler, share = self.config.scheduler, self.settings.share
        tokens = scheduler.max_queued_tokens
        return dataclasses.replace(
            self.config,
            scheduler=dataclasses.replace(
                scheduler,
                max_queued_requests=share(scheduler.max_queued_requests or MAX_QUEUED_REQUESTS),
                max_queued_tokens=None if tokens is None else share(tokens),
            ),
        )


def main(argv: Sequence[str]) -> int:
    with ending_at_once():
        prepared = prepare(argv)
    if prepared.headless:
        from headrace.assembly.hosts.nodes import serve_ranks

        return serve_ranks(prepared.config)
    if prepared.models_config is not None:
        from headrace.multi_model.serving import serve_several

        return serve_several(argv, prepared, Path(prepared.models_config))
    if prepared.settings.api_server_count > 1:
        from headrace.http_processes.supervisor import serve

        return serve(argv, prepared)
    return serve_alone(prepared)


def prepare(argv: Sequence[str], process: str = "") -> ServeOptions:
    """Read the command line, and set logging up accordingly.

    Args:
        process: which of several processes this is, for the log.

    Raises:
        ConfigError: a setting cannot be used.
    """
    args = make_parser().parse_args(argv)
    settings = settings_from(args, os.environ)
    configure(log_format=settings.log_format, config_file=settings.log_config_file, process=process)
    queue_prints()
    keep_metrics_in_memory()
    engine_args = complete(args, settings)
    config = engine_args.create_engine_config()
    check_traces(settings, config.observability)
    if engine_args.settings and not process:
        logger.info("non-default engine settings: %s", engine_args.settings)
    return ServeOptions(settings, config, args.models_config, args.demo, args.headless)


def keep_metrics_in_memory() -> None:
    """Take ``PROMETHEUS_MULTIPROC_DIR`` out of the environment, before its library is imported.

    With it the library keeps every counter in mapped files and dies of a full disk (SIGBUS). Several
    processes of headrace ask each other for their metrics instead.
    """
    if os.environ.pop("PROMETHEUS_MULTIPROC_DIR", None) is not None:
        logger.warning(
            "PROMETHEUS_MULTIPROC_DIR is ignored: /metrics adds up all processes of the server by "
            "itself"
        )


def complete(args: Namespace, settings: ServerSettings) -> EngineArgs:
    """The engine's arguments: those of the command line, and what the server's settings say of
    them.

    Raises:
        ConfigError: settings contradict each other, or the chat template cannot be used.
    """
    from headrace.assembly.templates import check_template

    args.structured_outputs_config = structured_outputs(settings, args.structured_outputs_config)
    if settings.disable_log_stats:
        args.log_stats = False
    if settings.hardened and args.max_audio_seconds is None:
        from headrace_server.security.profiles import MAX_AUDIO_SECONDS

        args.max_audio_seconds = MAX_AUDIO_SECONDS
    made = EngineArgs.from_cli_args(args)
    _check_control_tokens(made, settings)
    _check_adapters(made, settings)
    check_template(settings)
    return made


def _check_control_tokens(args: EngineArgs, settings: ServerSettings) -> None:
    """Users write no turns of others under the hardened profile; elsewhere the operator is warned.

    Raises:
        ConfigError: naming the setting.
    """
    name = "allow_control_tokens_in_messages"
    if not args.settings.get(name):
        return
    if settings.hardened:
        raise ConfigError(
            f"{name}: not with --hardened: users could write turns of other roles", field=name
        )
    logger.warning("%s: users can write turns of other roles", name)


def _check_adapters(args: EngineArgs, settings: ServerSettings) -> None:
    """Adapters need an engine that takes some; found out before anything is loaded.

    Raises:
        ConfigError: naming the setting.
    """
    if settings.lora_modules and not args.enable_lora:
        raise ConfigError(
            "lora_modules: must be set together with enable_lora (--enable-lora)",
            field="lora_modules",
        )


def serve_alone(prepared: ServeOptions) -> int:
    """Serve from this process; returns its exit status."""
    from headrace.assembly import connect, starting
    from headrace.assembly.inspection import start_block

    settings, config = prepared.settings, prepared.config
    with contextlib.ExitStack() as stack:
        with starting(whole_process=True) as timeline:
            try_server(settings, timeline)
            from headrace_server.app import create_app
            from headrace_server.run import bind, bind_admin, run

            # Bound before anything is loaded: a port in use fails now, not after a minute.
            listening = stack.enter_context(contextlib.closing(bind(settings)))
            admin = bind_admin(settings)
            if admin is not None:
                stack.enter_context(contextlib.closing(admin))
            engine = connect(config, prepared.templates, timeline)
            with timeline.phase("build routes"):
                app = create_app(engine, settings)
        paths = app.state.headrace.paths
        log_block(logger, "the model, as served here", start_block(engine.model, sorted(paths)))
        log_block(logger, "start-up took", timeline.describe(), timeline.summary())
        app.state.headrace.startup = timeline.facts()
        return run(app, listening, settings, admin)


def try_server(settings: ServerSettings, timeline: StartupTimeline) -> None:
    """Import the server, and try what its settings name, before an address is taken or anything is
    loaded.

    Raises:
        HeadraceError: see :func:`headrace_server.preflight.try_settings`.
    """
    with timeline.phase("import server"):
        from headrace_server.preflight import try_settings
    with timeline.phase("try settings"):
        try_settings(settings)


def structured_outputs(settings: ServerSettings, given: Mapping[str, Any]) -> dict[str, Any]:
    """The engine's settings of structured output: what was given, and what the server knows: how
    the model marks its reasoning, behind which constraints begin, and the hardened limits."""
    from headrace_server.security.profiles import STRUCTURED_OUTPUT_LIMITS

    known: dict[str, Any] = {}
    if settings.reasoning_parser:
        known["reasoning_parser"] = settings.reasoning_parser
        known["reasoning_parser_plugin"] = settings.reasoning_parser_plugin or ""
    if settings.hardened:
        known |= STRUCTURED_OUTPUT_LIMITS
    return {**known, **given}


def check_traces(settings: ServerSettings, observability: ObservabilityConfig) -> None:
    """Detailed traces need somewhere to go.

    Raises:
        ConfigError: they have nowhere.
    """
    wanted = observability.collect_detailed_traces
    if wanted and settings.otlp_traces_endpoint is None:
        raise ConfigError(
            f"collect_detailed_traces = {wanted!r}: must be set together with otlp_traces_endpoint",
            field="collect_detailed_traces",
        )


def make_parser(kind: type[Parser] = Parser) -> Parser:
    """The parser of ``headrace serve``."""
    parser = kind(
        prog="headrace serve",
        description="Serve a model over the OpenAI API. Without a model: the demo model.",
        epilog="Try: headrace serve, then\n  curl -s localhost:8000/v1/chat/completions -H "
        '\'Content-Type: application/json\' \\\n    -d \'{"messages": [{"role": "user", '
        '"content": "Hello"}]}\'',
    )
    parser.add_model()
    parser.add_argument(
        "--models-config", metavar="FILE",
        help="YAML or JSON list of models that are served together (docs: several models)",
    )  # fmt: skip
    parser.add_argument(
        "--headless", action="store_true",
        help="On a host with --node-rank above 0: run its ranks and serve nothing; flags of the HTTP server "
        "have no effect",
    )  # fmt: skip
    try:
        from headrace_server.settings import ServerSettings
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-server",
            needed_for="headrace serve",
            install="pip install 'headrace[all]'",
        ) from error
    parser.add_config(ServerSettings, "Frontend")
    return EngineArgs.add_cli_args(parser)


def settings_from(args: Namespace, environ: Mapping[str, str] | None = None) -> ServerSettings:
    """The server's settings from a parsed command line, and what the environment switches on."""
    from headrace_server.settings import ServerSettings, from_environment

    values: dict[str, Any] = {}
    for option in options_of(ServerSettings):
        value = getattr(args, flag_name(option))
        values[option.name] = tuple(value) if isinstance(value, list) else value
    return ServerSettings(**{**values, **from_environment(environ or {})})


__all__ = ["main", "make_parser", "settings_from"]
