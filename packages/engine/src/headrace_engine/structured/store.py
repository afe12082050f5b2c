"""Compiled grammars of the process in which logits are masked."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from typing import NamedTuple

from headrace_core.grammar import Constraint, Grammar, GrammarBackend, Vocabulary
from headrace_engine.structured.backend_loading import Backends
from headrace_engine.structured.budget import MATCHING_SECONDS

logger = logging.getLogger(__name__)

COMPILE_THREADS = 2
"""Grammars that are compiled at once, beside the steps."""
UNKNOWN_SIZE = 1 << 20
"""Assumed bytes of a grammar whose size nobody has measured."""


class Compiled(NamedTuple):
    """A grammar, and who made it."""

    grammar: Grammar
    backend: GrammarBackend


class _StoredGrammar(NamedTuple):
    future: Future[Compiled]
    size_bytes: int


class GrammarStore:
    """Compiles grammars in threads of its own and keeps them, least recently used first out.

    What comes here has compiled before, in a process with limits: time and memory are known to be
    bounded. Thread-safe.

    Args:
        vocabulary: made when the first grammar is compiled, in one of the threads.
        cache_bytes: most memory for grammars that are kept; what requests hold lives on anyway.
        matching_seconds: processor time that matching one request's constraint may take.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        cache_bytes: int,
        matching_seconds: float = MATCHING_SECONDS,
    ) -> None:
        self.matching_seconds = matching_seconds
        self._make_vocabulary = vocabulary
        self._cache_bytes = cache_bytes
        self._lock = threading.Lock()
        self._backends: Backends | None = None
        self._kept: OrderedDict[bytes, _StoredGrammar] = OrderedDict()
        self._bytes = 0
        self._pool: ThreadPoolExecutor | None = None

    def request(self, constraint: Constraint) -> Future[Compiled]:
        """The compiled grammar of a constraint, now or soon."""
        key = constraint.grammar.key
        with self._lock:
            kept = self._kept.get(key)
            if kept is not None and (_failed(kept.future) or _worn(kept.future)):
                # It may have been the moment's fault, or that of a request which has used it up.
                self._bytes -= self._kept.pop(key).size_bytes
            elif kept is not None:
                self._kept.move_to_end(key)
                return kept.future
            if self._pool is None:
                self._pool = ThreadPoolExecutor(COMPILE_THREADS, "headrace-grammar")
            future = self._pool.submit(self._compile, constraint)
            size = constraint.size_bytes or UNKNOWN_SIZE
            self._kept[key] = _StoredGrammar(future, size)
            self._bytes += size
            self._evict(key)
            return future

    def failed(self, constraint: Constraint) -> bool:
        """True if the constraint's grammar was compiled last without success."""
        with self._lock:
            kept = self._kept.get(constraint.grammar.key)
        return kept is not None and _failed(kept.future)

    def prepare(self, backend: str) -> None:
        """Make a backend ready before the first constraint comes; takes seconds.

        Raises:
            MissingDependency, PluginError: it cannot be used.
        """
        self._ready().get(backend)

    @property
    def vocabulary(self) -> Vocabulary:
        """The vocabulary; made now if nothing has been compiled yet."""
        return self._ready().vocabulary

    @property
    def size_bytes(self) -> int:
        """About what the kept grammars take."""
        return self._bytes

    def close(self) -> None:
        """Forget everything; what compiles is not waited for."""
        with self._lock:
            pool, self._pool = self._pool, None
            self._kept.clear()
            self._bytes = 0
        if pool is not None:
            pool.shutdown(wait=False, cancel_futures=True)

    def _evict(self, newest: bytes) -> None:
        while self._bytes > self._cache_bytes and len(self._kept) > 1:
            key, kept = next(iter(self._kept.items()))
            if key == newest:
                return
            del self._kept[key]
            self._bytes -= kept.size_bytes

    def _ready(self) -> Backends:
        with self._lock:
            if self._backends is None:
                self._backends = Backends(self._make_vocabulary())
            return self._backends

    def _compile(self, constraint: Constraint) -> Compiled:
        backend = self._ready().get(constraint.grammar.backend)
        return Compiled(backend.compile(constraint.grammar), backend)


def _failed(future: Future[Compiled]) -> bool:
    return future.done() and (future.cancelled() or future.exception() is not None)


def _worn(future: Future[Compiled]) -> bool:
    """True if the grammar is there and cannot be used again."""
    if not future.done():
        return False
    grammar, backend = future.result(0)
    return backend.is_worn(grammar)
