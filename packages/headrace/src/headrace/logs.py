"""Logging for the command line: one handler on the roots of headrace's packages.

Libraries only log; programs configure. ``HEADRACE_CONFIGURE_LOGGING=0`` leaves logging alone;
``HEADRACE_LOGGING_CONFIG_PATH`` names a JSON file in the form of :func:`logging.config.dictConfig`;
``HEADRACE_LOGGING_FORMAT`` is text or json (one object a line), ``HEADRACE_LOGGING_STREAM`` stderr or
stdout.
"""

from __future__ import annotations

import contextlib
import json
import logging
import logging.config
import os
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import TextIO, TypeVar

from headrace_core.errors import ConfigError
from headrace_engine.log_lines import JsonLines, LineFormatter, QueuedText, ThreadedHandler

Choice = TypeVar("Choice")

ROOTS = (
    "headrace", "headrace_core", "headrace_kernels", "headrace_attention", "headrace_quant",
    "headrace_models", "headrace_multimodal", "headrace_distributed", "headrace_engine",
    "headrace_server", "uvicorn",
)  # fmt: skip
LEVELS = ("DEBUG", "INFO", "WARNING", "ERROR", "CRITICAL")


RESOLUTION = ("headrace.assembly.resolution", "headrace_models.resolve", "headrace_models.runner")
"""Loggers of the resolution of ``auto``, which every process does for itself with the same result."""
LOADING = (
    *RESOLUTION, "headrace_core.ops.binding", "headrace_attention.selection", "headrace_kernels.cpu.provider",
    "headrace_models.loading.loader", "headrace_engine.startup", "headrace_engine.worker.serving",
    "headrace_engine.execution.capture", "headrace_server.routes.pooling",
)  # fmt: skip
"""Loggers of how one model is loaded, step by step."""


def configure(
    default_level: str = "INFO",
    *,
    log_format: str = "text",
    config_file: str | None = None,
    process: str = "",
) -> None:
    """Set headrace's logging up.

    Args:
        default_level: where the environment names none.
        log_format: ``text`` or ``json``; the environment's counts if this is ``text``.
        config_file: in place of ``HEADRACE_LOGGING_CONFIG_PATH``.
        process: which of several processes this is, for lines of text; JSON has its id.

    Raises:
        ConfigError: a variable's value cannot be used.
    """
    path = config_file or os.environ.get("HEADRACE_LOGGING_CONFIG_PATH")
    if os.environ.get("HEADRACE_CONFIGURE_LOGGING", "1") == "0":
        if path:
            raise ConfigError(
                "HEADRACE_LOGGING_CONFIG_PATH is set while HEADRACE_CONFIGURE_LOGGING=0"
            )
        return
    if path:
        _configure_from_file(Path(path))
        return
    level = os.environ.get("HEADRACE_LOGGING_LEVEL", default_level).upper()
    if level not in LEVELS:
        raise ConfigError(f"HEADRACE_LOGGING_LEVEL = {level!r}: must be one of {', '.join(LEVELS)}")
    stream = _choice("HEADRACE_LOGGING_STREAM", _STREAMS)()
    handler = ThreadedHandler(stream)
    if log_format == "text":
        log_format = _choice("HEADRACE_LOGGING_FORMAT", {"text": "text", "json": "json"})
    formatter = (
        JsonLines() if log_format == "json" else LineFormatter(_is_coloured(stream), process)
    )
    handler.setFormatter(formatter)
    for old in logging.getLogger(ROOTS[0]).handlers:
        if isinstance(old, ThreadedHandler):
            old.close()
    for name in ROOTS:
        root = logging.getLogger(name)
        root.handlers = [handler]
        root.propagate = False
        root.setLevel(level)
    _replace_last_resort(handler)


def _replace_last_resort(handler: logging.Handler) -> None:
    """Route warnings of other libraries through the same handler: logging's own
    last resort would have them wait for whoever reads the log."""
    root = logging.getLogger()
    for old in [h for h in root.handlers if isinstance(h, ThreadedHandler)]:
        root.removeHandler(old)
    if not root.handlers:
        root.addHandler(handler)


def queue_prints() -> None:
    """Have whatever else is written to standard output and error, by whomever, wait for no reader
    either: see :class:`headrace_engine.log_lines.QueuedText`. For processes that serve."""
    handlers = [h for h in logging.getLogger(ROOTS[0]).handlers if isinstance(h, ThreadedHandler)]
    for name in ("stdout", "stderr"):
        stream = getattr(sys, name)
        if stream is None or isinstance(stream, QueuedText):
            continue
        handler = next((h for h in handlers if h.stream is stream), None)
        setattr(sys, name, QueuedText(stream, handler or ThreadedHandler(stream)))


def leave_to_another(*names: str) -> None:
    """Have these loggers keep to warnings: another process says the same. At DEBUG all is shown."""
    if logging.getLogger(ROOTS[0]).isEnabledFor(logging.DEBUG):
        return
    for name in names:
        logging.getLogger(name).setLevel(logging.WARNING)


@contextlib.contextmanager
def keeping_to_warnings(*names: str) -> Iterator[None]:
    """Have these loggers keep to warnings within the block. At DEBUG all is shown."""
    loggers = [logging.getLogger(name) for name in names]
    before = [each.level for each in loggers]
    leave_to_another(*names)
    try:
        yield
    finally:
        for each, level in zip(loggers, before, strict=True):
            each.setLevel(level)


def flush() -> None:
    """Have everything written that was logged, before a process says its last words."""
    for handler in logging.getLogger(ROOTS[0]).handlers:
        with contextlib.suppress(ValueError):  # its stream was closed before it
            handler.flush()


_STREAMS: Mapping[str, Callable[[], TextIO]] = {
    "stderr": lambda: sys.stderr, "stdout": lambda: sys.stdout,
}  # fmt: skip


def _is_coloured(stream: TextIO) -> bool:
    """``HEADRACE_LOGGING_COLOR``: 1, 0, or auto: on a terminal, unless ``NO_COLOR`` is set."""
    wanted = _choice("HEADRACE_LOGGING_COLOR", {"auto": None, "1": True, "0": False})
    return stream.isatty() and not os.environ.get("NO_COLOR") if wanted is None else wanted


def _choice(variable: str, values: Mapping[str, Choice]) -> Choice:
    """Value of a variable; the first choice if it is not set."""
    given = os.environ.get(variable) or next(iter(values))
    if given not in values:
        raise ConfigError(f"{variable} = {given!r}: must be one of {', '.join(values)}")
    return values[given]


def _configure_from_file(path: Path) -> None:
    try:
        logging.config.dictConfig(json.loads(path.read_text(encoding="utf-8-sig")))
    except (OSError, ValueError) as error:
        raise ConfigError(f"logging configuration {str(path)!r}: {error}") from error
