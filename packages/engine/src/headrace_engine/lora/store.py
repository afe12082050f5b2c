"""Adapters of the process in which the model runs: which are known, and which are in the host's memory."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

from headrace_core.errors import HeadraceError, RequestError, UnsupportedFeature
from headrace_core.lora import AdapterSlots, LoRARequest

logger = logging.getLogger(__name__)

READ_THREADS = 2
"""Adapters that are read at once, beside the steps."""


@dataclass(eq=False, slots=True)
class KnownAdapter:
    """One adapter, from its first reading until nobody needs it."""

    request: LoRARequest
    """The first that named it."""
    first_read: Future[KnownAdapter] = field(default_factory=Future)
    """Resolves to the adapter itself once it is checked; raises RequestError if it cannot be used."""
    digest: str = ""
    """A name of its content; "" until it is read."""
    changes_media: bool = False
    """It changes towers for media, or their projectors; False until it is read."""
    num_users: int = 0
    """Requests under way with it."""
    in_slot: bool = False
    """It is in a slot of the model, or is to be put there next: its content stays in memory."""
    content: Any = None
    """What :meth:`AdapterSlots.read` gave; None while the host's memory does not have it."""
    reading: Future[Any] | None = None
    """While its content is read, or has failed to be."""

    @property
    def lora_int_id(self) -> int:
        return self.request.lora_int_id


class AdapterStore:
    """Reads adapters in threads of its own, each once for all requests that want it, and keeps what it
    read, least recently used first out. Thread-safe.

    What has gone out of memory is still known, and read again when a slot is to have it. So the memory is
    bounded whatever waits: by ``num_kept`` adapters, and one that is read for a slot.

    Args:
        num_kept: adapters in memory, those in slots included. Those that were removed while requests need
            them come on top.
    """

    def __init__(self, num_kept: int) -> None:
        self._num_kept = num_kept
        self._slots: AdapterSlots | None = None
        self._lock = threading.RLock()
        self._known: dict[int, KnownAdapter] = {}
        self._removed: dict[int, KnownAdapter] = {}
        """Removed ones that requests under way still need."""
        self._kept: OrderedDict[int, KnownAdapter] = OrderedDict()
        """Known ones whose content is in memory, least recently used first."""
        self._pool: ThreadPoolExecutor | None = None

    def bind(self, slots: AdapterSlots | None) -> None:
        """Read for this model from now on (None: for none). What was read for another one is dropped."""
        with self._lock:
            self._slots = slots
            for adapter in (*self._known.values(), *self._removed.values()):
                adapter.content = None
                if adapter.first_read.done():
                    adapter.reading = None
            self._kept.clear()

    def add(self, request: LoRARequest, *, under_way: bool = False) -> KnownAdapter:
        """Make an adapter known: read now, unless it is known already.

        Args:
            under_way: the request for it came before: it may have been removed since.

        Raises:
            RequestError: its id is that of an adapter with another path.
        """
        with self._lock:
            adapter = self._known.get(request.lora_int_id)
            if adapter is None and under_way:
                adapter = self._removed.get(request.lora_int_id)
            if adapter is not None:
                _check_same(adapter.request, request)
                return adapter
            adapter = self._known[request.lora_int_id] = KnownAdapter(request)
            self._read(adapter)
            return adapter

    def find(self, lora_int_id: int) -> KnownAdapter | None:
        """The adapter that requests of this id are computed with; None: there is none."""
        with self._lock:
            return self._known.get(lora_int_id) or self._removed.get(lora_int_id)

    def remove(self, lora_int_id: int) -> Future[bool]:
        """Take no further requests with an adapter. The files of one that requests under way need may be
        deleted when the result is there; False: the id is unknown."""
        done: Future[bool] = Future()
        with self._lock:
            adapter = self._known.pop(lora_int_id, None)
            self._kept.pop(lora_int_id, None)
            if adapter is None:
                done.set_result(False)
                return done
            if adapter.num_users:
                self._removed.setdefault(lora_int_id, adapter)
            else:
                adapter.content = (
                    None  # now: its future refers to it, so that it goes when Python collects
                )
            if adapter.num_users and adapter.content is None:
                reading = adapter.reading or self._read(adapter)
                reading.add_done_callback(lambda _: done.set_result(True))
            else:
                done.set_result(True)
        return done

    def known(self) -> Sequence[LoRARequest]:
        """Adapters that are known and were not removed, by id."""
        with self._lock:
            return [a.request for _, a in sorted(self._known.items()) if a.first_read.done()]

    def ready(self, adapter: KnownAdapter) -> bool:
        """True if an adapter's content is in memory; else it is being read from now on.

        Raises:
            RequestError: it cannot be read any more; says why.
        """
        with self._lock:
            if adapter.content is not None:
                self._used(adapter)
                return True
            if adapter.reading is None:
                self._read(adapter)
            elif (error := failure_of(adapter.reading)) is not None:
                adapter.reading = None  # whoever comes next tries again
                raise error
            return adapter.content is not None

    def content(self, lora_int_id: int) -> Any:
        """What was read of an adapter that is to be put into a slot: of a removed one, too, while it is
        read again for those who came late. What is read under one id is the same.

        Raises:
            LookupError: it is not in memory.
        """
        with self._lock:
            for adapter in (self._known.get(lora_int_id), self._removed.get(lora_int_id)):
                if adapter is not None and adapter.content is not None:
                    return adapter.content
            raise LookupError(f"adapter {lora_int_id} is not in memory")

    def enter(self, adapter: KnownAdapter) -> None:
        """A request is under way with an adapter."""
        with self._lock:
            adapter.num_users += 1
            if adapter.content is not None:
                self._used(adapter)

    def leave(self, adapter: KnownAdapter) -> None:
        """It has ended."""
        with self._lock:
            adapter.num_users -= 1
            if not adapter.num_users and self._removed.get(adapter.lora_int_id) is adapter:
                del self._removed[adapter.lora_int_id]
                adapter.content = None

    def hold(self, adapter: KnownAdapter) -> None:
        """Keep an adapter's content in memory, once it is there: it is in a slot, or to be put there."""
        with self._lock:
            adapter.in_slot = True

    def let_go(self, adapter: KnownAdapter) -> None:
        """It is in no slot any more."""
        with self._lock:
            adapter.in_slot = False
            self._evict()

    def close(self) -> None:
        """Forget everything; what is being read is not waited for."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._known.clear()
            self._removed.clear()
            self._kept.clear()
            self._slots = None
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _used(self, adapter: KnownAdapter) -> None:
        if adapter.lora_int_id in self._kept:
            self._kept.move_to_end(adapter.lora_int_id)

    def _read(self, adapter: KnownAdapter) -> Future[Any]:
        if self._pool is None:
            self._pool = ThreadPoolExecutor(READ_THREADS, "headrace-adapter")
        slots = self._slots
        adapter.reading = reading = self._pool.submit(_content, slots, adapter.request)
        reading.add_done_callback(lambda done: self._take(adapter, slots, done))
        return reading

    def _take(self, adapter: KnownAdapter, slots: AdapterSlots | None, done: Future[Any]) -> None:
        """A reading has ended."""
        with self._lock:
            if self._pool is not None and slots is not self._slots:  # there is another model
                self._read(adapter)
                return
            error = _stopped() if done.cancelled() else done.exception()
            error = error or self._changed(adapter, done.result(0))
            kept = adapter
            if error is None:
                adapter.reading, kept = None, self._same(adapter)
                self._fill(kept, done.result(0))
            elif adapter.first_read.done():
                adapter.reading = Future()
                adapter.reading.set_exception(error)
            elif self._known.get(adapter.lora_int_id) is adapter:
                del self._known[adapter.lora_int_id]
        if adapter.first_read.done():
            return
        if error is None:
            adapter.first_read.set_result(kept)
        else:
            adapter.first_read.set_exception(error)

    def _same(self, adapter: KnownAdapter) -> KnownAdapter:
        """The adapter itself; or the one of the same id and content that was removed: it is known again."""
        before = self._removed.get(adapter.lora_int_id)
        if before is None or self._known.get(adapter.lora_int_id) is not adapter:
            return adapter
        self._known[adapter.lora_int_id] = self._removed.pop(adapter.lora_int_id)
        return before

    def _fill(self, adapter: KnownAdapter, content: Any) -> None:
        adapter.content, adapter.digest = content, content.digest
        adapter.changes_media = content.changes_media
        if self._known.get(adapter.lora_int_id) is adapter:
            self._kept[adapter.lora_int_id] = adapter
            self._evict()

    def _changed(self, adapter: KnownAdapter, content: Any) -> RequestError | None:
        """The error of an adapter whose content is not what requests under its id are computed with."""
        before = adapter.digest
        removed = self._removed.get(adapter.lora_int_id)
        if removed is not None and removed is not adapter:
            before = removed.digest
        if before in ("", content.digest):
            return None
        return RequestError(
            f"lora_int_id = {adapter.lora_int_id}: the files in {adapter.request.lora_path!r} are not those "
            "that requests under way with this id are computed with; must be another id (over HTTP: load it "
            "again with load_inplace)",
            param="lora_request",
        )

    def _evict(self) -> None:
        idle = [i for i, adapter in self._kept.items() if not adapter.in_slot]
        for lora_int_id in idle[: max(0, len(self._kept) - self._num_kept)]:
            self._kept.pop(lora_int_id).content = None


def no_adapters() -> UnsupportedFeature:
    """The refusal of an adapter by an engine that takes none."""
    return UnsupportedFeature(
        "lora_request: must be left out: the engine takes no adapters; start it with enable_lora=True "
        "(--enable-lora)",
        param="lora_request",
    )


def failure_of(read: Future[Any]) -> BaseException | None:
    """The error of a reading that has failed."""
    if not read.done() or read.cancelled():
        return None
    return read.exception()


def _stopped() -> RequestError:
    return RequestError("lora_request: the engine is shut down", param="lora_request")


def _check_same(known: LoRARequest, wanted: LoRARequest) -> None:
    if known.lora_path != wanted.lora_path:
        raise RequestError(
            f"lora_int_id = {wanted.lora_int_id}: must be another one for {wanted.lora_path!r}: it is "
            f"that of {known.lora_name!r}, with the path {known.lora_path!r}",
            param="lora_request",
        )


def _content(slots: AdapterSlots | None, request: LoRARequest) -> Any:
    """Read an adapter.

    Raises:
        RequestError: it cannot be used; says why.
    """
    if slots is None:
        raise RequestError("lora_request: the engine sleeps, or is shut down", param="lora_request")
    try:
        return slots.read(request.lora_path)
    except (HeadraceError, OSError) as error:
        raise RequestError(
            f"adapter {request.lora_name!r}: {error}", param="lora_request"
        ) from error
    except Exception as error:
        logger.exception("adapter %r cannot be read", request.lora_name)
        raise RequestError(
            f"adapter {request.lora_name!r}: {type(error).__name__}: {error}", param="lora_request"
        ) from error
