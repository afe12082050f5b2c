"""Keys in an address are hidden in every line that holds it."""

from __future__ import annotations

import logging

import pytest

from headrace_server.observability.access_log import (
    ACCESS_LOGGER,
    ASGI_LOGGER,
    careful_access_log,
    without_keys,
)

pytestmark = pytest.mark.req("SEC-19")


@pytest.mark.parametrize(
    ("query", "shown"),
    [
        ("", ""),
        ("limit=3&after=b", "limit=3&after=b"),
        ("api_key=k", "api_key=***"),
        ("a=1&KEY=k&b=2", "a=1&KEY=***&b=2"),
        ("access_token=k;x=1", "access_token=***;x=1"),
        ("%61pi%5Fkey=k", "%61pi%5Fkey=***"),
        ("x-api-key=a=b", "x-api-key=***"),
        ("password=k&Authorization=Bearer%20k&sig=k", "password=***&Authorization=***&sig=***"),
        ("key", "key"),
        ("&&=x&", "&&=x&"),
    ],
)
def test_values_are_hidden_by_their_names(query: str, shown: str) -> None:
    assert without_keys(query) == shown


class Lines(logging.Handler):
    """Keeps the records of the loggers that it is added to."""

    def __init__(self) -> None:
        super().__init__()
        self.lines: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.lines.append(record.getMessage())


@pytest.fixture
def lines(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Lines of both loggers, wherever they were written before."""
    handler = Lines()
    for name in (ACCESS_LOGGER, ASGI_LOGGER):
        logger = logging.getLogger(name)
        monkeypatch.setattr(logger, "handlers", [handler])
        monkeypatch.setattr(logger, "propagate", False)
        monkeypatch.setattr(logger, "disabled", False)
        monkeypatch.setattr(logger, "level", 1)
        logger.manager._clear_cache()  # type: ignore[attr-defined]
    return handler.lines


def test_lines_of_requests(lines: list[str]) -> None:
    access, asgi = logging.getLogger(ACCESS_LOGGER), logging.getLogger(ASGI_LOGGER)
    line = '%s - "%s %s HTTP/%s" %d'
    with careful_access_log({"/health"}):
        for path in ("/health?key=k4nary", "/v1/models?key=k4nary&a=1", "/v1/models"):
            access.info(line, "127.0.0.1:9", "GET", path, "1.1", 200)
        scope = {"type": "http", "query_string": b"api_key=k4nary"}
        asgi.log(5, "%s started %s", "127.0.0.1:9", scope)
        asgi.log(5, "started %s", scope)
    assert scope["query_string"] == b"api_key=k4nary"
    assert "k4nary" not in "".join(lines)
    assert lines[:2] == [
        '127.0.0.1:9 - "GET /v1/models?key=***&a=1 HTTP/1.1" 200',
        '127.0.0.1:9 - "GET /v1/models HTTP/1.1" 200',
    ]
    assert len(lines) == 4
    assert not access.filters
    assert not asgi.filters
