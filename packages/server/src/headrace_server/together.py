"""What the HTTP processes of one server answer for each other, and do together."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from headrace_server.siblings import Answers, Siblings, SiblingSilent
from headrace_server.state import ServerState, Serving

logger = logging.getLogger(__name__)


def answers_of(state: ServerState) -> Answers:
    """What this process tells its siblings, and does for them."""
    engine = state.engine

    async def load(_: Mapping[str, Any]) -> int:
        return state.load

    async def metrics(_: Mapping[str, Any]) -> list[Any]:
        return state.metrics.own_families()

    async def pause(words: Mapping[str, Any]) -> bool:
        await engine.pause_generation(
            wait_for_inflight_requests=bool(words["wait"]), clear_cache=False
        )
        return True

    async def resume(_: Mapping[str, Any]) -> bool:
        await engine.resume_generation()
        return True

    async def is_paused(_: Mapping[str, Any]) -> bool:
        return await engine.is_paused()

    return {
        "load": load, "metrics": metrics, "pause": pause, "resume": resume, "is_paused": is_paused,
    }  # fmt: skip


async def adopt_pause(state: ServerState, siblings: Siblings) -> None:
    """A process that starts while the server is paused is paused, too."""
    try:
        if any(await siblings.ask("is_paused")):
            await state.engine.pause_generation(clear_cache=False)
    except SiblingSilent:
        logger.warning("it is not known whether this server is paused; this process is not")


async def total_load(state: Serving) -> int:
    """Inference requests in flight, in all processes."""
    others: list[int] = []
    if state.siblings is not None:
        others = await state.siblings.ask("load")
    return state.load + sum(others)


async def pause(state: ServerState, *, wait: bool, clear_cache: bool) -> None:
    """Pause generation in all processes; returns once nothing runs any more.

    Raises:
        SiblingSilent: a process gave no answer; the others are paused.
    """
    engine = state.engine
    if state.siblings is not None:
        # All gates close at once; the cache is emptied once everybody has finished.
        await asyncio.gather(
            state.siblings.ask("pause", seconds=None, wait=wait),
            engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=False),
        )
    await engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=clear_cache)


async def resume(state: ServerState) -> None:
    """Resume generation in all processes.

    Raises:
        SiblingSilent: a process gave no answer; the others go on.
    """
    await state.engine.resume_generation()
    if state.siblings is not None:
        await state.siblings.ask("resume")
