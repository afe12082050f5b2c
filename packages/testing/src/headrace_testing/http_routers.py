"""Conformance suite of HTTP routers. Inherit, and say how yours is made::

    class TestMyRouter(RouterConformance):
        router = ROUTER

        def settings(self):
            return ServerSettings()

FastAPI must be installed; it is no dependency of core.
"""

from __future__ import annotations

from typing import Any

import pytest

from headrace_core.engine import EngineClient
from headrace_core.http_router import Router
from headrace_testing.fakes.engine import FakeEngine, fake_served_model


class RouterConformance:
    """Inherit as ``Test...``; set :attr:`router` and :meth:`settings`."""

    router: Router

    def settings(self) -> Any:
        """Settings of the server that the router is written for."""
        raise NotImplementedError

    def engine(self) -> EngineClient:
        """An engine whose model serves the router's tasks."""
        tasks = tuple(self.router.tasks) or ("generate",)
        return FakeEngine(model=fake_served_model(tasks=tasks))

    def routes(self) -> list[Any]:
        """The routes of a freshly built router."""
        return list(self.router.build(self.engine(), self.settings()).routes)

    def test_name_and_tasks(self) -> None:
        assert self.router.name
        assert self.router.name == self.router.name.strip().lower()
        assert not isinstance(self.router.tasks, str), "a sequence of names, not one name"
        assert all(isinstance(task, str) and task for task in self.router.tasks)

    def test_builds_a_fastapi_router(self) -> None:
        fastapi = pytest.importorskip("fastapi")
        assert isinstance(self.router.build(self.engine(), self.settings()), fastapi.APIRouter)

    def test_paths(self) -> None:
        found = [(r.path, method) for r in self.routes() for method in r.methods]
        assert found, "a router without routes"
        assert all(path.startswith("/") for path, _ in found)
        assert len(found) == len(set(found)), "a path and method is claimed twice"

    def test_building_asks_nothing_of_the_engine(self) -> None:
        """Start-up must not depend on, or change, a running engine."""
        engine = FakeEngine(model=fake_served_model(tasks=tuple(self.router.tasks)))
        engine.kill()
        self.router.build(engine, self.settings())
        assert engine.requests == []

    def test_two_applications_share_nothing(self) -> None:
        first = self.router.build(self.engine(), self.settings())
        second = self.router.build(self.engine(), self.settings())
        assert first is not second
        assert not {id(r) for r in first.routes} & {id(r) for r in second.routes}

    def test_openapi_document_can_be_made(self) -> None:
        fastapi = pytest.importorskip("fastapi")
        app = fastapi.FastAPI()
        app.include_router(self.router.build(self.engine(), self.settings()))
        shown = {r.path for r in self.routes() if r.include_in_schema}
        documented = {path.replace(":path}", "}") for path in shown}
        assert documented <= set(app.openapi()["paths"])

    def test_handlers_are_coroutines(self) -> None:
        """A plain function would run in a thread, where the engine may not be called."""
        import inspect

        for route in self.routes():
            assert inspect.iscoroutinefunction(route.endpoint), route.path
