"""The gate before routing: who needs a key, and whether the key is right.

The gate lists what is open, not what is closed: a new route is protected without doing anything.
It sits before the router and looks at the same path (``root_path`` removed) both decoded and raw,
so that no other spelling of an open path opens a closed one.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.errors import ConfigError
from headrace_server.paths import below_root, route_path
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HEADRACE_API_KEY"
_UNAUTHORIZED = b'{"error":"Unauthorized"}'


def load_keys(settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """All keys of the settings, the key file and the environment; empty = no gate.

    Raises:
        ConfigError: the key file cannot be read or holds no key.
    """
    keys = list(settings.api_key)
    if environ.get(KEY_VARIABLE):
        keys.append(environ[KEY_VARIABLE])
    if settings.api_key_file is not None:
        keys += _read_key_file(settings.api_key_file)
    return tuple(keys)


def _read_key_file(path: str) -> list[str]:
    try:
        lines = Path(path).read_text(encoding="utf-8").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"api_key_file = {path!r}: could not be read ({type(error).__name__})",
            field="api_key_file",
        ) from error
    keys = [line.strip() for line in lines if line.strip() and not line.startswith("#")]
    if not keys:
        raise ConfigError(f"api_key_file = {path!r}: holds no key", field="api_key_file")
    return keys


class KeyGate:
    """ASGI middleware: 401 unless the request is open or carries one of the keys.

    Args:
        keys: accepted keys; only their digests are kept.
        scope: ``all`` or ``v1``, see :class:`ServerSettings`.
        open_paths: paths that need no key (scope ``all``).
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], scope: str, open_paths: Iterable[str]
    ) -> None:
        self._app = app
        self._digests = [_digest(key.encode()) for key in keys]
        self._narrow = scope == "v1"
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        closed = scope["type"] != "lifespan" and self._needs_key(scope)
        if closed and not self._has_key(scope):
            await _refuse(scope, send)
            return
        # Whose request it is, for what is kept per key; the key itself goes no further.
        if closed:
            scope["headrace_key_digest"] = _digest(_given_key(scope)).hex()
        await self._app(scope, receive, send)

    def _needs_key(self, scope: Scope) -> bool:
        path = route_path(scope)
        raw = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        raw = below_root(raw, scope.get("root_path", ""))
        if self._narrow:
            if scope.get("method") == "OPTIONS":
                return False
            return path.startswith("/v1") or raw.startswith("/v1")
        return not (path in self._open and raw == path)

    def _has_key(self, scope: Scope) -> bool:
        digest = _digest(_given_key(scope))
        found = False
        for accepted in self._digests:  # all of them, whichever matches: constant time
            found |= hmac.compare_digest(accepted, digest)
        return found


def _given_key(scope: Scope) -> bytes:
    """The key of ``Authorization: Bearer``; without that header, of ``x-api-key`` (Anthropic's)."""
    given = [value for name, value in scope["headers"] if name == b"authorization"]
    if not given:
        given = [value for name, value in scope["headers"] if name == b"x-api-key"]
        return given[0].strip() if len(given) == 1 else b""
    kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
    return key.strip() if kind.lower() == b"bearer" else b""


def _digest(key: bytes) -> bytes:
    return hashlib.sha256(key).digest()


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
