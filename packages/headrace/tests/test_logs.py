"""What log lines look like, and what sets them up."""

from __future__ import annotations

import io
import json
import logging
import subprocess
import sys
import threading

import pytest

from headrace import logs
from headrace.cli import main
from headrace_core.errors import AddressError, ConfigError
from headrace_engine.log_lines import JsonLines, ThreadedHandler, writes_json


@pytest.fixture(autouse=True)
def _as_before(monkeypatch):
    """Loggers are the process's: put them back."""
    for name in ("CONFIGURE_LOGGING", "LOGGING_FORMAT", "LOGGING_STREAM", "LOGGING_CONFIG_PATH"):
        monkeypatch.delenv(f"HEADRACE_{name}", raising=False)
    found = [logging.getLogger(name) for name in logs.ROOTS]
    before = [(logger.handlers, logger.propagate, logger.level) for logger in found]
    yield
    for logger, (handlers, propagate, level) in zip(found, before, strict=True):
        logger.handlers, logger.propagate = handlers, propagate
        logger.setLevel(level)


def shown(capsys):
    """What has come out, once all of it has."""
    logs.flush()
    return capsys.readouterr()


def test_json_lines(capsys):
    logs.configure(log_format="json")
    logger = logging.getLogger("headrace_engine.somewhere")
    logger.info("two\nlines of %s", "Grüße", extra={"request_id": "r1"})
    try:
        raise ValueError("what went wrong")
    except ValueError:
        logger.exception("failed")
    first, second = [json.loads(line) for line in shown(capsys).err.splitlines()]
    assert first["message"] == "two\nlines of Grüße"
    assert first["request_id"] == "r1"
    assert (first["level"], first["logger"]) == ("INFO", "headrace_engine.somewhere")
    assert first["time"].endswith("Z")
    assert "ValueError: what went wrong" in second["error"]
    assert "request_id" not in second
    assert writes_json("headrace_engine.clients.process")


def test_the_environment_chooses(monkeypatch, capsys):
    monkeypatch.setenv("HEADRACE_LOGGING_FORMAT", "json")
    monkeypatch.setenv("HEADRACE_LOGGING_STREAM", "stdout")
    logs.configure()
    logging.getLogger("headrace").info("here")
    assert json.loads(shown(capsys).out)["message"] == "here"
    monkeypatch.setenv("HEADRACE_LOGGING_STREAM", "file")
    with pytest.raises(ConfigError, match="HEADRACE_LOGGING_STREAM"):
        logs.configure()


def test_text_is_the_default(capsys):
    logs.configure()
    logging.getLogger("headrace").warning("here")
    assert shown(capsys).err.startswith("WARNING ")
    assert not writes_json("headrace")


def test_other_libraries_warn_the_same_way(monkeypatch, capsys):
    root = logging.getLogger()
    monkeypatch.setattr(root, "handlers", [])
    logs.configure(log_format="json")
    logs.configure(log_format="json")
    logging.getLogger("opentelemetry.sdk").warning("here")
    logging.getLogger("opentelemetry.sdk").info("not here")
    (line,) = shown(capsys).err.splitlines()
    assert json.loads(line)["message"] == "here"


def test_colours(monkeypatch, capsys):
    for wanted, is_shown in (("1", True), ("0", False), ("auto", False)):
        monkeypatch.setenv("HEADRACE_LOGGING_COLOR", wanted)
        logs.configure()
        logging.getLogger("headrace").warning("two\nlines")
        text = shown(capsys).err
        assert text.count("\x1b[33mWARNING\x1b[0m") == (2 if is_shown else 0)


def test_a_configuration_file(tmp_path, capsys):
    file = tmp_path / "logging.json"
    config = {
        "version": 1, "disable_existing_loggers": False,
        "formatters": {"j": {"()": "headrace_engine.log_lines.JsonLines"}},
        "handlers": {"h": {"class": "logging.StreamHandler", "formatter": "j"}},
        "loggers": {"headrace": {"handlers": ["h"], "level": "INFO", "propagate": False}},
    }  # fmt: skip
    file.write_text(json.dumps(config))
    logs.configure(config_file=str(file))
    logging.getLogger("headrace").info("here")
    assert json.loads(shown(capsys).err)["message"] == "here"
    file.write_text("{")
    with pytest.raises(ConfigError, match="logging configuration"):
        logs.configure(config_file=str(file))


def test_what_json_cannot_hold_is_shown_as_text():
    record = logging.LogRecord("n", logging.INFO, __file__, 1, "x", (), None)
    record.request_id = {1, 2}
    assert json.loads(JsonLines().format(record))["request_id"] == "{1, 2}"


@pytest.mark.req("REL-11")
def test_exit_statuses(monkeypatch, capsys):
    assert main.status_of(AddressError("taken")) == 8
    assert main.status_of(ConfigError("wrong")) == 2

    class Broken:
        @staticmethod
        def main(words):
            raise KeyError("a bug")

    monkeypatch.setitem(sys.modules, "headrace.cli.plugins", Broken)
    assert main.run("plugins", []) == 70
    last = shown(capsys).err.splitlines()[-1]
    assert last.startswith("headrace plugins: HR-")
    assert "a bug" in last


class _Stalled(io.StringIO):
    """A log that nobody reads for a while."""

    def __init__(self):
        super().__init__()
        self.read = threading.Event()

    def write(self, text):
        assert self.read.wait(600)
        return super().write(text)


@pytest.mark.req("REL-19")
@pytest.mark.timeout(60)
def test_a_log_that_nobody_reads_stops_nobody():
    stream = _Stalled()
    handler = ThreadedHandler(stream, max_waiting=10)
    handler.setFormatter(logging.Formatter("%(message)s"))
    for index in range(1000):
        handler.handle(logging.LogRecord("n", logging.INFO, "", 0, "line %d", (index,), None))
    assert not stream.read.is_set(), "they wait for the reader"
    assert 985 <= handler.num_dropped <= 991
    stream.read.set()
    handler.handle(logging.LogRecord("n", logging.INFO, "", 0, "last", (), None))
    handler.close()
    lines = stream.getvalue().splitlines()
    assert "line 0" in lines
    told = [int(line.split()[0]) for line in lines if "were dropped: nobody read the log" in line]
    assert sum(told) == handler.num_dropped
    assert len(lines) <= 13


@pytest.mark.req("REL-14")
def test_a_full_disk_stops_nobody():
    class Full(io.StringIO):
        def write(self, text):
            raise OSError(28, "No space left on device")

    handler = ThreadedHandler(Full())
    for _ in range(5):
        handler.handle(logging.LogRecord("n", logging.INFO, "", 0, "x", (), None))
    handler.close()
    assert handler.num_dropped == 5


@pytest.mark.req("REL-19")
def test_a_process_ends_though_its_log_hangs():
    """The pipe is full and nobody reads: no lock is held that Python wants before it ends."""
    code = (
        "import logging, sys\n"
        "from headrace_engine.log_lines import ThreadedHandler\n"
        "logger = logging.getLogger('x')\n"
        "logger.addHandler(ThreadedHandler(sys.stderr))\n"
        "for _ in range(3000):\n    logger.warning('x' * 100)\n"
    )
    process = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.PIPE)
    try:
        assert process.wait(120) == 0
    finally:
        process.kill()
        process.stderr.close()
