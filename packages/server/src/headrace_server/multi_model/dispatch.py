"""From a request to the application of the model that it names."""

from __future__ import annotations

from collections.abc import Callable

from fastapi import FastAPI
from starlette.routing import Match
from starlette.types import Receive, Scope, Send

from headrace_core.context import MODEL
from headrace_core.errors import RequestError, UnknownModel
from headrace_server.errors.mapping import report
from headrace_server.multi_model.models import Models, OneModel
from headrace_server.multi_model.naming import NamedModel, read_name

Part = Callable[[OneModel], FastAPI | None]
"""The application of a model that answers: its own, or that of the admin port."""


class Dispatcher:
    """ASGI application: passes each request on to the model that it names.

    A request that no model could answer, whatever it names (an unknown path, a body that is no
    JSON), goes to one that refuses it as it would alone. With one model served, it gets everything.
    """

    def __init__(self, models: Models, part: Part) -> None:
        self._models = models
        self._part = part

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        named = NamedModel(None, receive)
        try:
            model = self._only_one(scope)
            if model is None:
                named = await read_name(scope, receive)
                model = self._chosen(scope, named)
        except RequestError as error:
            await report(error, scope.get("headrace_request_id", "")).response()(
                scope, named.receive, send
            )
            return
        app = self._part(model)
        assert app is not None, "a model without this part was chosen"
        scope.pop("router", None)  # the one around this; the application's own comes now
        token = MODEL.set(model.name)
        try:
            with model.answering():
                await app(scope, named.receive, send)
        finally:
            MODEL.reset(token)

    def _only_one(self, scope: Scope) -> OneModel | None:
        """The model to take a request without a look at what it names."""
        models = [model for model in self._models if self._part(model) is not None]
        if not models:
            raise UnknownModel("no model is served at present", param="model")
        if len(models) == 1:
            return models[0]
        serving = self._serving(scope)
        if not serving:
            return next((m for m in models if self._match(m, scope) is Match.PARTIAL), models[0])
        return serving[0] if len(serving) == 1 and not _has_body(scope) else None

    def _chosen(self, scope: Scope, named: NamedModel) -> OneModel:
        if isinstance(named.name, str):
            return self._models.find(named.name)
        if named.name is None and named.readable and _may_name(scope):
            served = ", ".join(map(repr, self._models.names))
            raise RequestError(
                f"model: must be given, as several are served: {served}"
                + ("" if _has_body(scope) else "; without a body, as ?model=NAME"),
                param="model",
            )
        return self._serving(scope)[0]

    def _serving(self, scope: Scope) -> list[OneModel]:
        """The models that have the path and the method."""
        return [model for model in self._models if self._match(model, scope) is Match.FULL]

    def _match(self, model: OneModel, scope: Scope) -> Match:
        app = self._part(model)
        routes = app.routes if app is not None else ()
        return max((route.matches(scope)[0] for route in routes), key=_HOW_WELL, default=Match.NONE)


_HOW_WELL = [Match.NONE, Match.PARTIAL, Match.FULL].index


def _has_body(scope: Scope) -> bool:
    return any(name == b"content-type" for name, _ in scope["headers"])


def _may_name(scope: Scope) -> bool:
    """True if the request has a form in which a model could have been named."""
    kind = next((value for name, value in scope["headers"] if name == b"content-type"), b"")
    kind = kind.partition(b";")[0].strip().lower()
    return kind in (b"", b"application/json", b"multipart/form-data")
