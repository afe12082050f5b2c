"""Scheduler plug-ins that lack what a configuration asks for."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from importlib.metadata import EntryPoint
from typing import Any, cast

import pytest

from headrace_core import plugins
from headrace_core.errors import ConfigError
from headrace_core.executor import Executor
from headrace_engine.config import EngineConfig
from headrace_engine.core import EngineCore
from headrace_engine.scheduler.keywords import check_scheduler
from headrace_engine.scheduler.scheduler import Scheduler
from headrace_engine.startup import StartupTimeline

GROUP = "headrace.schedulers"
STAGES = {"steps_beside": "parallel.pipeline_parallel_size = 2"}


class Narrow:
    """Takes the contract's arguments."""

    def __init__(
        self, config: Any, kv: Any, *, max_model_len: int, async_scheduling: bool
    ) -> None: ...


class Forwarding(Scheduler):
    """Takes what the built-in one takes."""

    def __init__(self, *args: Any, **settings: Any) -> None:
        super().__init__(*args, **settings)


class Unstarted:
    """Stands for an executor, and is not to be started."""

    has_ended = False

    def start(self) -> None:
        raise AssertionError("workers were made")

    def shutdown(self) -> None:
        self.has_ended = True


@pytest.fixture
def config(monkeypatch: pytest.MonkeyPatch) -> Iterator[EngineConfig]:
    """Asks for ``narrow``; ``forwarding`` is installed, too."""
    entries = [
        EntryPoint(name.lower(), f"{__name__}:{name}", GROUP) for name in ("Narrow", "Forwarding")
    ]
    monkeypatch.setattr(plugins, "entry_points", lambda group: entries)
    plugins.forget()
    plain = EngineConfig()
    scheduler = dataclasses.replace(plain.scheduler, scheduler_cls="narrow", async_scheduling=True)
    yield dataclasses.replace(plain, scheduler=scheduler)
    monkeypatch.undo()
    plugins.forget()


def test_what_it_does_not_take_is_refused_by_name(config: EngineConfig) -> None:
    check_scheduler(config, {})
    with pytest.raises(ConfigError) as raised:
        check_scheduler(config, STAGES)
    assert raised.value.field == "scheduler.scheduler_cls"
    assert (
        "scheduler_cls = 'narrow': must be a scheduler whose constructor takes 'steps_beside'"
        in str(raised.value)
    )
    assert "for parallel.pipeline_parallel_size = 2" in str(raised.value)


def test_one_that_forwards_keywords_is_taken(config: EngineConfig) -> None:
    scheduler = dataclasses.replace(config.scheduler, scheduler_cls="forwarding")
    check_scheduler(dataclasses.replace(config, scheduler=scheduler), STAGES)


@pytest.mark.parametrize(
    ("changes", "keyword"),
    [
        ({"parallel": {"pipeline_parallel_size": 2}}, "steps_beside"),
        (
            {
                "speculative": {
                    "method": "ngram",
                    "num_speculative_tokens": 3,
                    "prompt_lookup_max": 3,
                }
            },
            "drafts",
        ),
    ],
)
def test_the_start_ends_before_workers_are_made(
    config: EngineConfig, changes: dict[str, dict[str, Any]], keyword: str
) -> None:
    parts = {
        name: dataclasses.replace(getattr(config, name), **fields)
        for name, fields in changes.items()
    }
    asked = dataclasses.replace(config, **parts)
    executor = Unstarted()
    with pytest.raises(ConfigError, match=f"takes '{keyword}'"):
        EngineCore.build(
            asked, max_model_len=128, executor=cast(Executor, executor), timeline=StartupTimeline()
        )
    assert executor.has_ended
