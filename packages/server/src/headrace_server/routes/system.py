"""``/v1/system/startup`` and ``/v1/system/determinism``: how the server started, and what decides answers.

Not a plug-in: added by the application for every model.
"""

from __future__ import annotations

from typing import Any

from fastapi import APIRouter, Depends, Request
from pydantic import BaseModel

from headrace_core.errors import EngineDead, UnsupportedFeature
from headrace_server.http.routing import ERROR_RESPONSES
from headrace_server.observability.fingerprint import with_weights
from headrace_server.routes.named import check_named
from headrace_server.state import state_of


class PhasePart(BaseModel):
    """A part of a phase."""

    name: str
    seconds: float


class Phase(PhasePart):
    """A stretch of the start."""

    pieces: list[PhasePart]


class ProcessStart(BaseModel):
    """The start of one process."""

    seconds: float
    """From the process's beginning until requests were taken."""
    accounted: float
    """Share of them that phases cover, 0..1."""
    phases: list[Phase]


class Startup(ProcessStart):
    """Answer of ``GET /v1/system/startup``."""

    engine: ProcessStart | None = None
    """With several HTTP processes: the start of the engine that they share; the rest is the start of the
    process that answers."""


class Worker(BaseModel):
    """A worker, and what it computes with."""

    rank: int
    device: str | None = None
    dtype: str | None = None
    num_threads: int | None = None
    kernels: list[str] | None = None
    """Providers of the operations."""
    batch_invariant: bool | None = None
    """True if no result depends on what else is in the batch; None: not known."""
    torch: str | None = None


class Determinism(BaseModel):
    """Answer of ``GET /v1/system/determinism``."""

    system_fingerprint: str
    repeatable: bool
    """True if a greedy or seeded request has the same answer each time under this fingerprint, whatever
    runs beside it."""
    seed: int | None
    """The engine's, from which requests without a seed draw."""
    workers: list[Worker]
    facts: dict[str, Any]
    """The facts that the fingerprint is made of."""


def system_router() -> APIRouter:
    """The router."""
    router = APIRouter(
        prefix="/v1/system",
        tags=["system"],
        responses=ERROR_RESPONSES,
        dependencies=[Depends(check_named)],
    )

    @router.get("/startup")
    async def startup(request: Request) -> Startup:
        """Show how long each phase of the start took."""
        found = state_of(request).startup
        if found is None:
            raise UnsupportedFeature("the start of this server was not timed")
        return Startup.model_validate(found)

    @router.get("/determinism")
    async def determinism(request: Request) -> Determinism:
        """Show the facts that decide whether answers repeat."""
        state = state_of(request)
        if state.engine.dead_error is not None:
            raise EngineDead("the engine has stopped") from state.engine.dead_error
        reports = await state.engine.collective_rpc("report", timeout=10.0)
        workers = [Worker.model_validate(report) for report in reports]
        version = (await state.engine.stats()).weights_version
        name, facts = with_weights(state.fingerprint, [version])
        return Determinism(
            system_fingerprint=name,
            repeatable=bool(workers) and all(worker.batch_invariant for worker in workers),
            seed=state.engine.settings.get("model", {}).get("seed"),
            workers=workers,
            facts=dict(facts),
        )

    return router
