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
import re
from collections.abc import Iterable, Mapping
from pathlib import Path

from starlette.types import ASGIApp, Receive, Scope, Send

from headrace_core.errors import ConfigError
from headrace_core.owner import OWNER
from headrace_server.paths import below_root, route_path
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HEADRACE_API_KEY"
_KEY_AND_NAME = r"(\S+)(?:\s+name=([\w.-]{1,64}))?"
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
    for number, key in enumerate(keys, 1):
        if re.fullmatch(_KEY_AND_NAME, key) is None:
            raise ConfigError(  # the line is not shown: it holds a key
                f"api_key_file = {path!r}: key {number} must be a word, or a word and name=NAME "
                "with a name of letters, digits, '.', '_' and '-'",
                field="api_key_file",
            )
    if not keys:
        raise ConfigError(f"api_key_file = {path!r}: holds no key", field="api_key_file")
    return keys


class KeyGate:
    """ASGI middleware: 401 unless the request is open or carries one of the keys.

    Args:
        keys: accepted keys, ``KEY`` or ``KEY name=NAME``; only their digests are kept. The name is
            the request's owner (:mod:`headrace_core.owner`); keys without one have ``key-1``, ...
        scope: ``all`` or ``v1``, see :class:`ServerSettings`.
        open_paths: paths that need no key (scope ``all``).
    """

    def __init__(
        self, app: ASGIApp, keys: Iterable[str], scope: str, open_paths: Iterable[str]
    ) -> None:
        self._app = app
        self._owners = [_digest_and_owner(key, i) for i, key in enumerate(keys, 1)]
        self._narrow = scope == "v1"
        self._open = frozenset(open_paths)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan" or not self._needs_key(scope):
            await self._app(scope, receive, send)
            return
        owner = self._owner(scope)
        if owner is None:
            await _refuse(scope, send)
            return
        token = OWNER.set(owner)
        try:
            await self._app(scope, receive, send)
        finally:
            OWNER.reset(token)

    def _needs_key(self, scope: Scope) -> bool:
        path = route_path(scope)
        raw = scope.get("raw_path", b"").decode("latin-1") or scope["path"]
        raw = below_root(raw, scope.get("root_path", ""))
        if self._narrow:
            if scope.get("method") == "OPTIONS":
                return False
            return path.startswith("/v1") or raw.startswith("/v1")
        return not (path in self._open and raw == path)

    def _owner(self, scope: Scope) -> str | None:
        """Whose key the request carries; None if it carries none that is accepted."""
        given = [value for name, value in scope["headers"] if name == b"authorization"]
        kind, _, key = (given[0] if len(given) == 1 else b"").partition(b" ")
        digest = _digest(key.strip() if kind.lower() == b"bearer" else b"")
        found = None
        for accepted, owner in self._owners:  # all of them, whichever matches: constant time
            if hmac.compare_digest(accepted, digest):
                found = owner
        return found


def _digest_and_owner(text: str, number: int) -> tuple[bytes, str]:
    match = re.fullmatch(_KEY_AND_NAME, text)
    if match is None:  # from the command line or the environment: taken as it is
        return _digest(text.encode()), f"key-{number}"
    return _digest(match[1].encode()), match[2] or f"key-{number}"


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
