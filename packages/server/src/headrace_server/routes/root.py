"""``GET /``: what this server is, for a browser or a program."""

from __future__ import annotations

import html
from collections.abc import Callable, Sequence
from typing import Any

from fastapi import APIRouter, Request
from starlette.responses import HTMLResponse, JSONResponse, Response

from headrace_server.observability.fingerprint import installed_version
from headrace_server.state import Serving

POLICY = "default-src 'none'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
"""Content-Security-Policy of the page, which loads nothing."""


def root_router(state: Serving, names: Callable[[], Sequence[str]], has_docs: bool) -> APIRouter:
    """The router of ``GET /``. With keys, it needs one.

    Args:
        names: of the models that are served now.
        has_docs: whether the server describes its API.
    """
    links = {"models": "/v1/models", "health": "/health"}
    if has_docs:
        links |= {"docs": "/docs", "openapi": "/openapi.json"}
    router = APIRouter()

    @router.get("/", include_in_schema=False)
    async def show(request: Request) -> Response:
        root = request.scope.get("root_path", "")
        facts = {
            "name": "headrace",
            "version": installed_version(),
            "models": list(names()),
            "links": {name: root + path for name, path in links.items()},
            "paths": sorted(path for path in state.paths if path != "/"),
        }
        headers = {"Vary": "Accept"}
        if "text/html" not in request.headers.get("accept", ""):
            return JSONResponse(facts, headers=headers)
        return HTMLResponse(_page(facts), headers={**headers, "Content-Security-Policy": POLICY})

    return router


def _page(facts: dict[str, Any]) -> str:
    models = ", ".join(html.escape(name) for name in facts["models"]) or "none"
    links = "".join(
        f'<li><a href="{html.escape(path)}">{html.escape(path)}</a></li>'
        for path in facts["links"].values()
    )
    paths = "".join(f"<li><code>{html.escape(path)}</code></li>" for path in facts["paths"])
    return (
        '<!doctype html><html lang="en"><head><meta charset="utf-8"><title>headrace</title></head>'
        f"<body><h1>headrace {html.escape(facts['version'])}</h1><p>Models: {models}</p>"
        f"<ul>{links}</ul><h2>Paths</h2><ul>{paths}</ul></body></html>"
    )
