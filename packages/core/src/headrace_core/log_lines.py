"""Log lines as JSON: one object a line, for whatever collects logs.

Here, and not with the command line, because processes of the engine's own write such lines too.
"""

from __future__ import annotations

import datetime
import json
import logging

EXTRA = ("request_id",)
"""Attributes of a record that become fields of their own, where they are set."""


class JsonLines(logging.Formatter):
    """``{"time": RFC 3339 in UTC, "level", "logger", "line", "message"}``, and ``request_id``,
    ``error`` (a stack) where there is one. Line breaks within stay within the line."""

    def format(self, record: logging.LogRecord) -> str:
        when = datetime.datetime.fromtimestamp(record.created, datetime.UTC)
        fields = {
            "time": when.isoformat(timespec="milliseconds").replace("+00:00", "Z"),
            "level": record.levelname,
            "logger": record.name,
            "line": record.lineno,
            "process": record.process,
            "message": record.getMessage(),
        }
        fields |= {name: getattr(record, name) for name in EXTRA if hasattr(record, name)}
        if record.exc_info:
            fields["error"] = self.formatException(record.exc_info)
        return json.dumps(fields, ensure_ascii=False, default=str)


def writes_json(name: str) -> bool:
    """Whether lines of this logger come out as JSON now."""
    logger: logging.Logger | None = logging.getLogger(name)
    while logger is not None:
        if logger.handlers:
            return any(isinstance(handler.formatter, JsonLines) for handler in logger.handlers)
        logger = logger.parent if logger.propagate else None
    return False
