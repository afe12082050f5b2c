"""Where a batch's files are: local paths, or URLs through the one fetcher."""

from __future__ import annotations

import shutil
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from pathlib import Path
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from headrace_core.errors import ConfigError, MissingDependency

if TYPE_CHECKING:
    from headrace_multimodal.fetch import Fetcher

MAX_INPUT = 16 << 30
"""Bytes of a fetched batch file."""
TRANSFER_SECONDS = 6 * 3600.0


def is_url(name: str) -> bool:
    """True if a file's name is an http(s) URL."""
    return name.startswith(("http://", "https://"))


@asynccontextmanager
async def fetcher_for(url: str) -> AsyncIterator[Fetcher]:
    """A fetcher for a URL that the operator typed: its host may be private, others not.

    Raises:
        MissingDependency: headrace-multimodal, which has the fetcher, is absent.
    """
    try:
        from headrace_multimodal.fetch import Fetcher, FetchRules
    except ImportError as error:
        raise MissingDependency(
            error.name or "headrace-multimodal",
            needed_for="a batch file behind a URL",
            install="pip install 'headrace[all]'",
        ) from error
    try:
        host = urlsplit(url).hostname or ""
    except ValueError as error:
        raise ConfigError(f"{url!r:.200}: is not a URL: {error}") from error
    rules = FetchRules(
        private_hosts=frozenset({host}), max_bytes=MAX_INPUT, seconds=TRANSFER_SECONDS
    )
    async with Fetcher(rules) as fetcher:
        yield fetcher


async def download(url: str, path: Path) -> None:
    """Fetch the input.

    Raises:
        ConfigError: it could not be had; says why.
    """
    from headrace_multimodal.fetch import FetchError

    async with fetcher_for(url) as fetcher:
        try:
            await fetcher.save(url, path)
        except FetchError as error:
            raise ConfigError(f"input_file: {error}", field="input_file") from error


def keep(source: Path, path: Path) -> Path:
    """Read an input that can be read once, a pipe, into a file.

    Returns:
        The file.

    Raises:
        ConfigError: it could not be read.
    """
    try:
        with source.open("rb") as given, path.open("wb") as kept:
            shutil.copyfileobj(given, kept)
    except OSError as error:
        raise ConfigError(
            f"input_file = {str(source)!r}: could not be read: {error.strerror}", field="input_file"
        ) from error
    return path


async def upload(url: str, path: Path) -> None:
    """Send the output.

    Raises:
        ConfigError: it could not be sent; says why.
    """
    from headrace_multimodal.fetch import FetchError

    async with fetcher_for(url) as fetcher:
        try:
            await fetcher.put(url, path)
        except FetchError as error:
            raise ConfigError(f"output_file: {error}", field="output_file") from error
