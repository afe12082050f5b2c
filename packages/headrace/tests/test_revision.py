"""Revisions that a local checkpoint does not have."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from pathlib import Path

import pytest

from headrace import demo
from headrace.assembly import front_end, starting
from headrace.assembly.front import shared_core
from headrace.assembly.inspection import inspect_model
from headrace.engine_args import EngineArgs


class _Messages(logging.Handler):
    def __init__(self) -> None:
        super().__init__()
        self.told: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.told.append(record.getMessage())


@pytest.fixture
def warned() -> Iterator[list[str]]:
    """Messages of headrace's loggers, whatever an earlier test has done to their handlers."""
    logger, messages = logging.getLogger("headrace"), _Messages()
    logger.addHandler(messages)
    yield messages.told
    logger.removeHandler(messages)


@pytest.mark.parametrize("several", [False, True])
def test_a_revision_of_a_local_folder_is_told_once(
    several: bool, tmp_path: Path, warned: list[str]
) -> None:
    folder = demo.path()
    for model in (str(folder), None):
        for revision, times in (("v2", 1), (None, 0)):
            warned.clear()
            config = EngineArgs(model=model, revision=revision).create_engine_config()
            with starting() as timeline:
                if several:
                    shared_core(config, timeline, tmp_path)
                else:
                    front_end(config, None, timeline)
            told = [message for message in warned if "revision" in message]
            assert len(told) == times
            for message in told:
                assert message == (
                    f"revision = 'v2': has no effect: {folder} is local; a revision needs a hub name"
                )


def test_an_inspected_folder_has_no_revision_either(warned: list[str]) -> None:
    inspect_model(EngineArgs(model=str(demo.path()), revision="v2").create_engine_config())
    assert [message[:16] for message in warned] == ["revision = 'v2':"]
