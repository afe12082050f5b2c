"""Compiling in processes that can be killed, and that have limits of their own.

What a client can make slow or large compiles here first; only what does so within the limits is
compiled again where it is used. Parent's half: :class:`CompileProcesses`; child's half:
:func:`main`.
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import resource
import threading
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import asdict
from typing import Any

from headrace_core.errors import HeadraceError, PluginError, RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarSpec, Vocabulary, malformed
from headrace_core.reliability.sandbox_process import (
    ProcessEnded,
    SandboxProcess,
    TookTooLong,
    serve_json,
)
from headrace_engine.structured.backend_loading import Backends

MODULE = "headrace_engine.structured.compile_process"
LOAD_SECONDS = 60.0
"""Wall-clock limit of importing a backend's library and reading the vocabulary."""
_CPU_GRACE = 5
"""Seconds of processor time beyond the limit, for a child whose parent was killed."""


class CompileProcesses:
    """Child processes that compile, started when needed. Thread-safe.

    Args:
        vocabulary: made when the first process starts.
        count: most processes; more callers wait.
        seconds: of processor time that one compilation may take.
        memory_bytes: most memory that one compilation may add to its process.
    """

    def __init__(
        self,
        vocabulary: Callable[[], Vocabulary],
        *,
        count: int,
        seconds: float,
        memory_bytes: int,
    ) -> None:
        self._vocabulary = vocabulary
        self._seconds = seconds
        self._memory_bytes = memory_bytes
        self._free: queue.LifoQueue[_Child] = queue.LifoQueue()
        self._children = [_Child() for _ in range(count)]
        for child in self._children:
            self._free.put(child)
        self._lock = threading.Lock()
        self._words: str | None = None
        self._closed = False

    def compile(self, spec: GrammarSpec) -> int:
        """Compile a constraint and throw the result away. Waits for a free process.

        Returns:
            About how many bytes the compiled grammar takes.

        Raises:
            RequestError: it is malformed, or takes too long or too much memory.
            HeadraceError: the backend cannot be used at all.
        """
        child = self._free.get()
        try:
            answer = self._ask(child, spec)
        except TookTooLong:
            raise malformed(
                spec.kind, f"backend {spec.backend} did not compile it within {self._seconds:g} s"
            ) from None
        except ProcessEnded:
            raise malformed(
                spec.kind, f"backend {spec.backend} needed more than {self._memory_bytes >> 20} MiB "
                "of memory to compile it, or gave up",
            ) from None  # fmt: skip
        finally:
            if self._closed:
                child.process.kill()
            self._free.put(child)
        if "error" in answer:
            raise _as_error(answer)
        return int(answer["size_bytes"])

    def close(self) -> None:
        """End the processes, also those that compile."""
        self._closed = True
        free: list[_Child] = []
        with contextlib.suppress(queue.Empty):
            while True:
                free.append(self._free.get_nowait())
        for child in self._children:
            if child in free:
                child.process.kill()
                self._free.put(child)
            else:
                child.process.interrupt()

    def prepare(self, backend: str) -> None:
        """Let one process load a backend, which takes longer than most compilations.

        Raises:
            HeadraceError: it cannot be used.
        """
        child = self._free.get()
        try:
            answer = self._load(child, backend)
        except (TookTooLong, ProcessEnded) as error:
            raise HeadraceError(f"grammar backend {backend}: loading it {error}") from None
        finally:
            self._free.put(child)
        if "error" in answer:
            raise _as_error(answer)

    def _load(self, child: _Child, backend: str) -> dict[str, Any]:
        if not child.process.running:
            child.loaded.clear()
        if not child.loaded:
            child.process.ask_json(self._vocabulary_line(), LOAD_SECONDS)
        if backend in child.loaded:
            return {}
        answer = child.process.ask_json(_line({"op": "load", "backend": backend}), LOAD_SECONDS)
        if "error" not in answer:
            child.loaded.add(backend)
        return answer

    def _ask(self, child: _Child, spec: GrammarSpec) -> dict[str, Any]:
        answer = self._load(child, spec.backend)
        if "error" in answer:
            return answer
        job = {
            "op": "compile",
            "spec": asdict(spec),
            "seconds": self._seconds,
            "memory_bytes": self._memory_bytes,
        }
        return child.process.ask_json(_line(job), self._seconds)

    def _vocabulary_line(self) -> bytes:
        with self._lock:
            if self._words is None:
                vocabulary = self._vocabulary()
                self._words = json.dumps(
                    {
                        "op": "vocabulary",
                        "tokens": [token.decode("latin-1") for token in vocabulary.tokens],
                        "special_token_ids": sorted(vocabulary.special_token_ids),
                    }
                )
            return self._words.encode()


class _Child:
    """A process and what it has been told."""

    def __init__(self) -> None:
        self.process = SandboxProcess(MODULE)
        self.loaded: set[str] = set()
        """Names of backends; with the first, the vocabulary."""


def _line(job: Mapping[str, Any]) -> bytes:
    return json.dumps(job).encode()


def _as_error(answer: Mapping[str, Any]) -> HeadraceError:
    kinds: Mapping[str, type[RequestError]] = {
        "RequestError": RequestError,
        "UnsupportedFeature": UnsupportedFeature,
    }
    kind = kinds.get(answer["kind"])
    if kind is None:
        return PluginError(answer["error"])  # a library that is absent, or broken
    return kind(answer["error"], param=answer.get("param"))


class _Compiler:
    """The child: what it has been told, and what it answers."""

    def __init__(self) -> None:
        self._backends = Backends(Vocabulary([]))

    def answer(self, job: Mapping[str, Any]) -> dict[str, Any]:
        """One job's answer."""
        try:
            return self._do(job)
        except RequestError as error:
            return {"error": str(error), "param": error.param, "kind": type(error).__name__}
        except HeadraceError as error:
            return {"error": str(error), "kind": "HeadraceError"}

    def _do(self, job: Mapping[str, Any]) -> dict[str, Any]:
        if job["op"] == "vocabulary":
            tokens = [token.encode("latin-1") for token in job["tokens"]]
            special = frozenset(job["special_token_ids"])
            self._backends = Backends(Vocabulary(tokens, special))
            return {}
        if job["op"] == "load":
            self._backends.get(job["backend"])
            return {}
        spec = GrammarSpec(**job["spec"])
        with limited(job["seconds"], job["memory_bytes"]) as used:
            try:
                with quiet():
                    self._backends.get(spec.backend).compile(spec)
            except (MemoryError, RecursionError):
                raise malformed(spec.kind, "nested too deep, or too large, to compile") from None
            size = used()
        return {"size_bytes": max(size, 4 * len(spec.source), 1 << 16)}


@contextmanager
def quiet() -> Iterator[None]:
    """Let libraries write nothing to standard error, as some do before they end the process."""
    kept, nothing = os.dup(2), os.open(os.devnull, os.O_WRONLY)
    os.dup2(nothing, 2)
    try:
        yield
    finally:
        os.dup2(kept, 2)
        os.close(kept)
        os.close(nothing)


@contextmanager
def limited(seconds: float, memory_bytes: int) -> Iterator[Callable[[], int]]:
    """Let this process take only so much more processor time and memory.

    Yields:
        A function that tells how many bytes were added to the memory in use.
    """
    used = resource.getrusage(resource.RUSAGE_SELF)
    spent = int(used.ru_utime + used.ru_stime)
    before, resident = _memory()
    hard_cpu = resource.getrlimit(resource.RLIMIT_CPU)[1]
    hard_memory = resource.getrlimit(resource.RLIMIT_AS)[1]
    resource.setrlimit(resource.RLIMIT_CPU, (spent + int(seconds) + _CPU_GRACE, hard_cpu))
    if before:
        resource.setrlimit(resource.RLIMIT_AS, (before + memory_bytes, hard_memory))
    try:
        yield lambda: max(0, _memory()[1] - resident)
    finally:
        resource.setrlimit(resource.RLIMIT_AS, (hard_memory, hard_memory))
        resource.setrlimit(resource.RLIMIT_CPU, (hard_cpu, hard_cpu))


def _memory() -> tuple[int, int]:
    """Address space and resident memory of this process in bytes; zeros where the system does not
    tell."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            pages = file.read().split()
    except OSError:
        return 0, 0
    page = os.sysconf("SC_PAGE_SIZE")
    return int(pages[0]) * page, int(pages[1]) * page


def main() -> None:
    """The child: answer until the input ends."""
    serve_json(_Compiler().answer)


if __name__ == "__main__":
    main()
