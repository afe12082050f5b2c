"""A real server's log: one form in all processes, and a start that fits a screen."""

from __future__ import annotations

import re

import pytest
from servers import serving
from several import models_file

from headrace_testing.waiting import wait_until

LINE = re.compile(
    r"(DEBUG|INFO|WARNING) \d\d-\d\d \d\d:\d\d:\d\d (?:\((?P<process>[a-z0-9 ]+)\) )?"
    r"\[[A-Za-z_.0-9]+:\d+\] ."
)
LARGEST_START = 25
"""Lines of a start at the default level."""


def start_of(log: list[str]) -> list[str]:
    """The lines before the first request."""
    return [line.rstrip("\n") for line in log if "[uvicorn.access:" not in line]


def log_of_start(*words: str, environment: dict[str, str] | None = None) -> list[str]:
    with serving(*words, environment=environment) as server:
        wait_until(lambda: any("[uvicorn.access:" in line for line in server.log))
        return start_of(list(server.log))


@pytest.fixture(scope="module")
def alone():
    return log_of_start()


@pytest.fixture(scope="module")
def with_engine_process():
    return log_of_start("--engine-process")


@pytest.fixture(scope="module")
def with_http_processes():
    return log_of_start("--api-server-count", "2")


@pytest.fixture(scope="module")
def with_several_models(tmp_path_factory):
    file = models_file(tmp_path_factory.mktemp("models"), "chat", "small", "large", "rank", "ears")
    return log_of_start("--models-config", str(file))


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("kind", ["alone", "with_engine_process", "with_http_processes"])
def test_a_start_fits_a_screen_and_ends_with_the_address(request, kind):
    log = request.getfixturevalue(kind)
    assert len(log) <= LARGEST_START, "\n".join(log)
    assert re.search(r"serving at http://127\.0\.0\.1:\d+$", log[-1])
    text = "\n".join(log)
    for once in ("room for", "start-up took", "as served here", "dtype: auto", "serving at"):
        assert text.replace("start-up of the engine", "start-up").count(once) == 1, (
            f"{once}\n{text}"
        )


def test_a_start_of_several_models_fits_a_screen_and_ends_with_the_address(with_several_models):
    log = with_several_models
    assert len(log) <= LARGEST_START, "\n".join(log)
    assert re.search(r"serving at http://127\.0\.0\.1:\d+$", log[-1])
    text = "\n".join(log)
    assert text.count("serving at") == 1
    for name in ("chat", "small", "large", "rank", "ears"):
        assert text.count(f"] {name}, as served here") == 1, text
        assert len(re.findall(rf"\({name}\) .*memory plan", text)) == 1, text


def test_all_processes_write_lines_of_one_form(
    alone, with_engine_process, with_http_processes, with_several_models
):
    for log in (alone, with_engine_process, with_http_processes, with_several_models):
        assert [line for line in log if not LINE.match(line)] == []
    processes = {LINE.match(line)["process"] for line in with_http_processes}
    assert processes == {None, "engine", "http 0"}
    processes = {LINE.match(line)["process"] for line in with_engine_process}
    assert processes == {None, "engine"}
    assert {LINE.match(line)["process"] for line in alone} == {None}


def test_the_whole_of_it_is_there_at_debug():
    log = log_of_start("--engine-process", environment={"HEADRACE_LOGGING_LEVEL": "DEBUG"})
    assert [line for line in log if not LINE.match(line)] == []
    text = "\n".join(log)
    for whole in (r"\]   activations +\S", r"\] import torch +\S+ s", r"\] architecture +\w",
                  r"start: import torch \.\.\.", r"\(engine\) .*dtype: auto", r"/v1/models",
                  r"router speech left out", r"Application startup complete"):  # fmt: skip
        assert re.search(whole, text), f"{whole}\n{text}"
