"""``GET /docs``: the API as a page, from files of this package."""

from __future__ import annotations

from collections.abc import Awaitable, Callable
from importlib.resources import files
from pathlib import Path

from fastapi import APIRouter
from starlette.responses import FileResponse, HTMLResponse, RedirectResponse, Response

PATH = "/docs"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; "
    "connect-src 'self'; frame-ancestors 'none'; base-uri 'none'; form-action 'none'"
)
"""Content-Security-Policy of the page. Swagger UI's style sheet holds its images as ``data:``."""
FILES = {
    "swagger-ui.css": "text/css",
    "swagger-ui-bundle.js": "text/javascript",
    "start.js": "text/javascript",
}
"""Files that the page loads -> media type."""
_HEADERS = {
    "Content-Security-Policy": POLICY, "X-Content-Type-Options": "nosniff",
    "Referrer-Policy": "no-referrer",
}  # fmt: skip
_PAGE = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>headrace</title>
<link rel="icon" href="data:,">
<link rel="stylesheet" href="docs/swagger-ui.css">
</head>
<body>
<div id="swagger-ui"></div>
<noscript>This page needs JavaScript; the same is in <a href="openapi.json">openapi.json</a>.</noscript>
<script src="docs/swagger-ui-bundle.js"></script>
<script src="docs/start.js"></script>
</body>
</html>
"""
"""Its references are relative, so that it works behind any path prefix."""


def docs_router() -> APIRouter:
    """The router of the page and its files. With keys, they need one as other routes do."""
    router = APIRouter()
    folder = Path(str(files("headrace_server") / "swagger_ui"))

    @router.get(PATH, include_in_schema=False)
    async def page() -> Response:
        return HTMLResponse(_PAGE, headers=_HEADERS)

    @router.get(PATH + "/", include_in_schema=False)
    async def without_slash() -> Response:
        # Relative, as are the page's references: it holds behind a proxy's prefix, too.
        return RedirectResponse(".." + PATH)

    for name, media_type in FILES.items():
        router.add_api_route(
            f"{PATH}/{name}", _sender(folder / name, media_type), include_in_schema=False
        )
    return router


def _sender(path: Path, media_type: str) -> Callable[[], Awaitable[Response]]:
    async def send() -> Response:
        return FileResponse(path, media_type=media_type, headers=_HEADERS)

    return send
