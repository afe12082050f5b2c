"""The gate before routing: who needs a key, and whether the key is right.

The gate lists what is open, not what is closed: a new route is protected without doing anything.
It sits before the router and looks at the same path (``root_path`` removed) both decoded and raw,
so that no other spelling of an open path opens a closed one.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.context import OWNER
from headrace_server.http.paths import raw_route_path, route_path
from headrace_server.security.keys import KeyRing

_UNAUTHORIZED = b'{"error":"Unauthorized"}'

KEY_IN_SCOPE = "headrace_key"
"""Where the gate leaves the :class:`~headrace_server.security.keys.Key` that a request carried. A request
that comes with one did not come over a socket: it is the operator's own, made in this process."""


class KeyGate:
    """ASGI middleware: 401 unless the request is open or carries one of the keys.

    Args:
        keys: accepted on public routes.
        scope: ``all`` or ``v1``, see :class:`ServerSettings`.
        open_paths: paths that need no key (scope ``all``).
        control_paths: these need one of ``control_keys``, whatever the scope.
        control_keys: None or empty: ``keys``.
        closed_paths: these need a key, whatever the scope.
    """

    def __init__(
        self,
        app: ASGIApp,
        keys: KeyRing,
        scope: str,
        open_paths: Iterable[str],
        control_paths: Iterable[str] = (),
        control_keys: KeyRing | None = None,
        closed_paths: Iterable[str] = (),
    ) -> None:
        self._app = app
        self._keys = keys
        self._narrow = scope == "v1"
        self._open = frozenset(open_paths)
        self._control = frozenset(control_paths)
        self._closed = frozenset(closed_paths)
        self._control_keys = control_keys if control_keys else keys

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        ring = self._control_keys if self._is_control(scope) else self._keys
        key = scope.get(KEY_IN_SCOPE) or (ring.find(_given(scope)) if ring else None)
        if key is None and self._needs_key(scope):
            await _refuse(scope, send)
            return
        scope[KEY_IN_SCOPE] = key
        token = OWNER.set(key.name if key is not None else "")
        try:
            await self._app(scope, receive, send)
        finally:
            OWNER.reset(token)

    def _is_control(self, scope: Scope) -> bool:
        return route_path(scope) in self._control or raw_route_path(scope) in self._control

    def _needs_key(self, scope: Scope) -> bool:
        if self._is_control(scope):
            return bool(self._control_keys)
        if not self._keys:
            return False
        path, raw = route_path(scope), raw_route_path(scope)
        if self._narrow:
            if scope.get("method") == "OPTIONS":
                return False
            closed = path in self._closed or raw in self._closed
            return closed or path.startswith("/v1") or raw.startswith("/v1")
        return not (path in self._open and raw == path)


def _given(scope: Scope) -> bytes:
    """The key of ``Authorization: Bearer``; without that header, of ``x-api-key`` (Anthropic's).
    b"" for none, and for two."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return bytes(given[0].strip()) if len(given) == 1 else b""
    kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
    return bytes(key.strip()) if kind.lower() == b"bearer" else b""


async def _refuse(scope: Scope, send: Send) -> None:
    if scope["type"] == "websocket":
        await send({"type": "websocket.close", "code": 1008})
        return
    headers = [
        (b"content-type", b"application/json"),
        (b"content-length", str(len(_UNAUTHORIZED)).encode()),
        (b"www-authenticate", b"Bearer"),
    ]
    await send({"type": "http.response.start", "status": 401, "headers": headers})
    await send({"type": "http.response.body", "body": _UNAUTHORIZED})
