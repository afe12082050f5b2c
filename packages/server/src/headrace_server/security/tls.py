"""Certificates that are replaced on disk while the server runs (``--enable-ssl-refresh``)."""

from __future__ import annotations

import asyncio
import logging
import os
import ssl
from collections.abc import Callable

from headrace_core.errors import ConfigError
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

LOOK_EVERY = 2.0
"""Seconds between looks at the files."""


def check_certificates(settings: ServerSettings) -> None:
    """Read the files of TLS as a server would.

    Raises:
        ConfigError: one cannot be read, holds nothing of its kind, or key and certificate are no
            pair; names the setting and the file.
    """
    chain, key, authorities = settings.ssl_certfile, settings.ssl_keyfile, settings.ssl_ca_certs
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    for name, file in (
        ("ssl_certfile", chain), ("ssl_keyfile", key), ("ssl_ca_certs", authorities),
    ):  # fmt: skip
        if file is not None:
            _check_readable(name, file)
    try:
        name, file = ("ssl_certfile", chain) if key is None else ("ssl_keyfile", key)
        if chain is not None:
            context.load_cert_chain(chain, key, password=_no_passphrase)
        name, file = "ssl_ca_certs", authorities
        if authorities is not None:
            context.load_verify_locations(authorities)
    except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
        raise ConfigError(
            f"{name} = {file!r}: must be a PEM file that holds {_HELD[name]}: {_reason(error)}",
            field=name,
        ) from error


_HELD = {
    "ssl_certfile": "a certificate and, without ssl_keyfile, its private key",
    "ssl_keyfile": "the private key of ssl_certfile's certificate, without a passphrase",
    "ssl_ca_certs": "certificates",
}


def _check_readable(name: str, file: str) -> None:
    try:
        with open(file, "rb"):
            pass
    except OSError as error:
        raise ConfigError(
            f"{name} = {file!r}: could not be read: {error.strerror}", field=name
        ) from error


def _no_passphrase() -> str:
    raise ValueError("it has a passphrase, which the server cannot enter")


def _reason(error: Exception) -> str:
    return getattr(error, "reason", None) or str(error)


class CertificateRefresher:
    """Loads certificate files into a live context when they change; connections that come then see
    them. Files that cannot be used change nothing, and are logged.

    One task watches certificate chain and key, another one the CA file. Certificates are added to
    those that clients' certificates must chain to; taking one away needs a restart.

    Args:
        context: of the running server.
        settings: name the files.
    """

    def __init__(self, context: ssl.SSLContext, settings: ServerSettings) -> None:
        self._context = context
        self._settings = settings
        self._tasks: list[asyncio.Task[None]] = []

    def start(self) -> None:
        """Begin to watch, in the running event loop."""
        chain, key, ca = (
            self._settings.ssl_certfile, self._settings.ssl_keyfile, self._settings.ssl_ca_certs,
        )  # fmt: skip
        if chain is not None:
            files = [chain] if key is None else [chain, key]
            self._watch(files, lambda context: context.load_cert_chain(files[0], key))
        if ca is not None:
            self._watch([ca], lambda context: context.load_verify_locations(ca))

    def stop(self) -> None:
        """End both tasks."""
        for task in self._tasks:
            task.cancel()
        self._tasks.clear()

    def _watch(self, files: list[str], load: Callable[[ssl.SSLContext], None]) -> None:
        self._tasks.append(asyncio.create_task(self._follow(files, load)))

    async def _follow(self, files: list[str], load: Callable[[ssl.SSLContext], None]) -> None:
        known = _stamps(files)
        while True:
            await asyncio.sleep(LOOK_EVERY)
            found = _stamps(files)
            if found == known:
                continue
            known = found
            try:
                # On trial first: a key that does not fit must not leave half of it in the live one.
                load(ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER))
                load(self._context)
            except (OSError, ValueError) as error:  # ssl.SSLError is an OSError
                logger.error(
                    "%s changed but cannot be used; the server keeps the previous version: %s",
                    " and ".join(files), error,
                )  # fmt: skip
            else:
                logger.info("loaded again: %s", " and ".join(files))


def _stamps(files: list[str]) -> list[tuple[int, int, int] | None]:
    stamps: list[tuple[int, int, int] | None] = []
    for file in files:
        try:
            found = os.stat(file)
            stamps.append((found.st_mtime_ns, found.st_size, found.st_ino))
        except OSError:
            stamps.append(None)
    return stamps
