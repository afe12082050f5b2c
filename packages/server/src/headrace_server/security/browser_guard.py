"""Guard that keeps web pages away by a request's Host and Origin.

A page that somebody looks at can send requests to a server on that person's machine: across origins,
or under a name that is resolved anew (DNS rebinding). Neither carries a Host or Origin of ours.
"""

from __future__ import annotations

from collections.abc import Iterable

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_server.errors.mapping import ErrorAnswer, log_refused
from headrace_server.http.paths import OPEN_PATHS, route_path

_LOOPBACK = ("localhost", "127.0.0.1", "[::1]")
_WILDCARDS = ("", "0.0.0.0", "::")


class BrowserGate:
    """ASGI middleware: 403 for a Host or an Origin that is not ours. Health checks, which probes
    ask for by address, are let through.

    Args:
        check_hosts, check_origin: which of the two.
        host: the address listened on.
        hosts: further host names, without port.
        origins: web origins that may call (CORS); ``*``: all.
        by_name: False: listening on a Unix socket, where a Host means nothing.
    """

    def __init__(
        self,
        app: ASGIApp,
        *,
        check_hosts: bool,
        check_origin: bool,
        host: str,
        hosts: Iterable[str] = (),
        origins: Iterable[str] = (),
        by_name: bool = True,
    ) -> None:
        self._app = app
        self._check_hosts = check_hosts and by_name
        self._check_origin = check_origin
        own = () if host in _WILDCARDS else (f"[{host}]" if ":" in host else host,)
        self._hosts = frozenset(name.lower() for name in (*_LOOPBACK, *own, *hosts))
        self._origins = frozenset(origin.lower().rstrip("/") for origin in origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or route_path(scope) in OPEN_PATHS:
            await self._app(scope, receive, send)
            return
        host, origin = _only(scope, b"host"), _only(scope, b"origin")
        if self._check_hosts and _name_of(host or "") not in self._hosts:
            reply = ErrorAnswer(403, "this Host is not allowed; see --allowed-hosts")
            log_refused(reply, scope.get("headrace_request_id", ""))
            await reply.response()(scope, receive, send)
        elif self._check_origin and origin is not None and not self._is_ours(origin, host):
            reply = ErrorAnswer(403, "pages of this Origin are not allowed; see --allowed-origins")
            log_refused(reply, scope.get("headrace_request_id", ""))
            await reply.response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)

    def _is_ours(self, origin: str, host: str | None) -> bool:
        if "*" in self._origins or origin in self._origins:
            return True
        return bool(host) and origin in (f"http://{host}", f"https://{host}")


def _only(scope: Scope, name: bytes) -> str | None:
    """A header's value in lower case; None if it is absent; "" if there are two."""
    found = [value for key, value in scope["headers"] if key == name]
    if not found:
        return None
    return found[0].decode("latin-1").lower() if len(found) == 1 else ""


def _name_of(host: str) -> str:
    """``Host`` without its port."""
    if host.startswith("["):
        return host.partition("]")[0] + "]"
    return host.partition(":")[0]
