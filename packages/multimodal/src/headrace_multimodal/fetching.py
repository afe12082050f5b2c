"""Media behind the URLs of requests: :class:`MediaFetcher`."""

from __future__ import annotations

import asyncio
import threading
from collections.abc import Mapping
from pathlib import Path
from urllib.parse import unquote, urlsplit

from headrace_core.errors import RequestError
from headrace_multimodal.fetch import Fetcher, FetchError, FetchRules
from headrace_multimodal.reading import current

SECONDS: Mapping[str, float] = {"image": 5.0, "audio": 10.0, "video": 30.0}
"""Seconds of one transfer, by modality."""
AT_ONCE = 16
"""Transfers under way together."""


class MediaFetcher:
    """Fetches files in the background, for threads that wait. Thread-safe.

    Args:
        rules: where it may go; ``seconds`` is by modality.
        seconds: by modality.
        max_bytes: by modality; the rules' own for others.
        folder: ``file:`` URLs may name what is in it; None: none.
    """

    def __init__(
        self,
        rules: FetchRules,
        *,
        seconds: Mapping[str, float] = SECONDS,
        max_bytes: Mapping[str, int] | None = None,
        folder: Path | None = None,
    ) -> None:
        self._rules, self._seconds = rules, {**SECONDS, **seconds}
        self._max_bytes = dict(max_bytes or {})
        self._folder = None if folder is None else folder.resolve()
        self._lock = threading.Lock()
        self._loop: asyncio.AbstractEventLoop | None = None
        self._gate = asyncio.Semaphore(AT_ONCE)
        self.num_under_way = 0
        """Transfers that run, or wait for their turn."""

    def __call__(self, url: str, modality: str, where: str) -> bytes:
        """The bytes behind a URL.

        Raises:
            RequestError: the rules forbid it, or it failed; says which.
            CancelledError: nobody waits for it any more.
        """
        most = self._max_bytes.get(modality, self._rules.max_bytes)
        if url[:5].lower() == "file:":
            return self._local(url, where, most)
        seconds = self._seconds[modality]
        rules = self._rules.lasting(seconds, max_bytes=most)
        task = asyncio.run_coroutine_threadsafe(self._read(url, rules), self._started())
        current().abandoned.add_done_callback(lambda _: task.cancel())
        try:
            return task.result(2 * seconds + 60.0)
        except FetchError as error:
            raise RequestError(f"{where}: {error}", param=where) from None
        except TimeoutError:
            task.cancel()
            raise RequestError(f"{where}: too many files are fetched", param=where) from None

    async def _read(self, url: str, rules: FetchRules) -> bytes:
        self.num_under_way += 1
        try:
            async with self._gate, Fetcher(rules) as fetcher:
                return await fetcher.read(url)
        finally:
            self.num_under_way -= 1

    def _local(self, url: str, where: str, most: int) -> bytes:
        if self._folder is None:
            raise RequestError(
                f"{where}: file: URLs are refused; the server must be started with "
                "--allowed-local-media-path",
                param=where,
            )
        try:
            data = _read_below(self._folder, url, most)
        except (OSError, ValueError):
            data = None
        if data is None:
            raise RequestError(
                f"{where}: must be a file below the allowed folder, of at most {most} bytes",
                param=where,
            )
        return data

    def _started(self) -> asyncio.AbstractEventLoop:
        with self._lock:
            if self._loop is None:
                self._loop = asyncio.new_event_loop()
                thread = threading.Thread(
                    target=self._loop.run_forever, name="headrace-fetch", daemon=True
                )
                thread.start()
            return self._loop

    def close(self) -> None:
        """End the transfers. Idempotent."""
        with self._lock:
            if self._loop is not None:
                self._loop.call_soon_threadsafe(self._loop.stop)
                self._loop = None


def _read_below(folder: Path, url: str, most: int) -> bytes | None:
    """A file's bytes; None: it is not below the folder, no file, or too large."""
    parts = urlsplit(url)
    path = Path(unquote(parts.path)).resolve()
    if parts.netloc not in ("", "localhost") or not path.is_relative_to(folder):
        return None
    return path.read_bytes() if path.is_file() and path.stat().st_size <= most else None
