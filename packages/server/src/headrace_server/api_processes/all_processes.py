"""Requests that take all HTTP processes of one server: its load, its metrics, a pause."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from headrace_server.api_processes.peers import Answers, Peers, PeerSilent
from headrace_server.state import ServerState, Serving

logger = logging.getLogger(__name__)


def answers_of(state: ServerState) -> Answers:
    """Questions of the peers, and what answers them here."""
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

    async def forget_adapter(words: Mapping[str, Any]) -> bool:
        if state.adapters is not None:
            state.adapters.forget(int(words["number"]))
        return True

    return {
        "forget_adapter": forget_adapter,
        "load": load, "metrics": metrics, "pause": pause, "resume": resume, "is_paused": is_paused,
    }  # fmt: skip


async def adopt_pause(state: ServerState, peers: Peers) -> None:
    """A process that starts while the server is paused is paused, too."""
    try:
        if any(await peers.ask("is_paused")):
            await state.engine.pause_generation(clear_cache=False)
    except PeerSilent:
        logger.warning("it is not known whether this server is paused; this process is not")


async def total_load(state: Serving) -> int:
    """Inference requests in flight, in all processes."""
    others: list[int] = []
    if state.peers is not None:
        others = await state.peers.ask("load")
    return state.load + sum(others)


async def pause(state: ServerState, *, wait: bool, clear_cache: bool) -> None:
    """Pause generation in all processes; returns once nothing runs any more.

    Raises:
        PeerSilent: a process gave no answer; the others are paused.
    """
    engine = state.engine
    if state.peers is not None:
        # All gates close at once; the cache is emptied once everybody has finished.
        await asyncio.gather(
            state.peers.ask("pause", seconds=None, wait=wait),
            engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=False),
        )
    await engine.pause_generation(wait_for_inflight_requests=wait, clear_cache=clear_cache)


async def resume(state: ServerState) -> None:
    """Resume generation in all processes.

    Raises:
        PeerSilent: a process gave no answer; the others go on.
    """
    await state.engine.resume_generation()
    if state.peers is not None:
        await state.peers.ask("resume")
