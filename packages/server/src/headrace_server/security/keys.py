"""Keys: several, named, from settings, environment and a file that is read again when it changes.

A line of the file is a key, or a name and a key::

    # comment
    sk-4xKq...
    team-a  sk-9fJz...

Only digests are kept. Names show in nothing that a client sees; they are what per-key rules
(cached prefixes, shares of the machine: ``scheduler.fair_weights``) go by.
"""

from __future__ import annotations

import hashlib
import hmac
import logging
import os
import re
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from headrace_core.errors import ConfigError
from headrace_server.security import profiles
from headrace_server.settings import ServerSettings

logger = logging.getLogger(__name__)

KEY_VARIABLE = "HEADRACE_API_KEY"
ADMIN_KEY_VARIABLE = "HEADRACE_ADMIN_API_KEY"
LOOK_EVERY = 1.0
"""Least seconds between looks whether a key file has changed."""
_NAME = re.compile(r"[A-Za-z0-9_.@-]{1,64}")


@dataclass(frozen=True, slots=True)
class Key:
    """One accepted key."""

    name: str
    digest: bytes
    """SHA-256."""


def digest(key: bytes) -> bytes:
    """Digest of a key, which is kept and compared."""
    return hashlib.sha256(key).digest()


class KeyRing:
    """All keys that open one set of routes.

    Args:
        fixed: keys that never change.
        file: further ones; checked for change when a key is looked up, at most every
            :data:`LOOK_EVERY` seconds. A file that has become unreadable keeps the old ones.
        read: parses the file.
        clock: monotonic seconds.
    """

    def __init__(
        self,
        fixed: Sequence[Key],
        file: str | None = None,
        read: Callable[[str], list[Key]] = lambda path: [],
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._fixed = list(fixed)
        self._file = file
        self._read = read
        self._clock = clock
        self._stamp = _stamp(file)
        self._looked = clock()
        self._keys = self._fixed + (read(file) if file is not None else [])

    def __len__(self) -> int:
        return len(self._keys)

    @property
    def keys(self) -> Sequence[Key]:
        """The keys that are accepted now."""
        self._refresh()
        return self._keys

    def find(self, key: bytes) -> Key | None:
        """The accepted key that this is, in a time that does not depend on which."""
        given, found = digest(key), None
        for accepted in self.keys:  # all of them, whichever matches
            if hmac.compare_digest(accepted.digest, given):
                found = accepted
        return found

    def _refresh(self) -> None:
        if self._file is None or self._clock() - self._looked < LOOK_EVERY:
            return
        self._looked = self._clock()
        stamp = _stamp(self._file)
        if stamp == self._stamp:
            return
        self._stamp = stamp
        try:
            self._keys = self._fixed + self._read(self._file)
        except ConfigError as error:
            logger.error(
                "the key file changed but cannot be used; the server keeps the old keys: %s", error
            )
        else:
            logger.info("keys read again: %d accepted", len(self._keys))


def public_keys(settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> KeyRing:
    """Keys of the public routes.

    Raises:
        ConfigError: a key file cannot be read or holds no key; or a key is too short (hardened).
    """
    return _ring(settings, settings.api_key, settings.api_key_file, KEY_VARIABLE, "api_key",
                 environ)  # fmt: skip


def admin_keys(settings: ServerSettings, environ: Mapping[str, str] = os.environ) -> KeyRing:
    """Keys of the control routes; empty: those of the public ones count.

    Raises: as :func:`public_keys`.
    """
    return _ring(settings, settings.admin_api_key, settings.admin_api_key_file,
                 ADMIN_KEY_VARIABLE, "admin_api_key", environ)  # fmt: skip


def _ring(
    settings: ServerSettings,
    given: Iterable[str],
    file: str | None,
    variable: str,
    option: str,
    environ: Mapping[str, str],
) -> KeyRing:
    fixed = []
    for index, key in enumerate(given):
        profiles.check_key(settings, key, option)
        fixed.append(Key(f"{option}-{index}", digest(key.encode())))
    if environ.get(variable):
        profiles.check_key(settings, environ[variable], variable)
        fixed.append(Key("environment", digest(environ[variable].encode())))

    def read(path: str) -> list[Key]:
        return read_key_file(path, f"{option}_file", settings)

    return KeyRing(fixed, file, read)


def read_key_file(path: str, option: str, settings: ServerSettings) -> list[Key]:
    """The keys of a file.

    Raises:
        ConfigError: it cannot be read, holds no key, or a line is wrong. No key is shown.
    """
    try:
        lines = Path(path).read_text(encoding="utf-8-sig").splitlines()
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(
            f"{option} = {path!r}: could not be read ({type(error).__name__})", field=option
        ) from error
    keys: list[Key] = []
    for number, line in enumerate(lines, 1):
        words = line.split()
        if not words or words[0].startswith("#"):
            continue
        try:
            key, text = _key_of(words)
        except ValueError as error:
            raise ConfigError(
                f"{option} = {path!r}, line {number}: {error}", field=option
            ) from None
        profiles.check_key(settings, text, option)
        if any(other.name == key.name for other in keys):
            raise ConfigError(
                f"{option} = {path!r}, line {number}: the name {key.name!r} is used twice",
                field=option,
            )
        keys.append(key)
    if not keys:
        raise ConfigError(f"{option} = {path!r}: holds no key", field=option)
    return keys


def _key_of(words: Sequence[str]) -> tuple[Key, str]:
    if len(words) > 2:
        raise ValueError("must be a key, or a name and a key")
    name, text = words if len(words) == 2 else (_own_name(words[0]), words[0])
    if not _NAME.fullmatch(name):
        raise ValueError("a name has up to 64 letters, digits, '_', '.', '@' and '-'")
    return Key(name, digest(text.encode())), text


def _own_name(key: str) -> str:
    """Name of a key without one: the same in every file, so that what is kept for its owner stays."""
    return f"key-{digest(key.encode()).hex()[:16]}"


def _stamp(file: str | None) -> tuple[int, int, int] | None:
    """Stamp that changes when a file is written or replaced; None: it is not there."""
    try:
        found = os.stat(file or "")
    except OSError:
        return None
    return found.st_mtime_ns, found.st_size, found.st_ino
