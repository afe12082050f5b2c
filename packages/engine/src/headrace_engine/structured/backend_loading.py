"""Grammar backends by name: which are there, which can serve, and their objects."""

from __future__ import annotations

import importlib.util
import threading
from collections.abc import Iterator, Sequence

from headrace_core import plugins
from headrace_core.errors import MissingDependency
from headrace_core.grammar import BACKENDS, GrammarBackend, Vocabulary
from headrace_engine.config import StructuredOutputsConfig

GROUP = "headrace.grammar_backends"


def backend_class(name: str) -> type[GrammarBackend]:
    """The class of a backend.

    Raises:
        PluginError: there is none, or it cannot be imported.
    """
    found: type[GrammarBackend] = plugins.load(GROUP, name)
    return found


def is_installed(backend: type[GrammarBackend]) -> bool:
    """True if the library that a backend needs is there; does not import it."""
    return not backend.library or importlib.util.find_spec(backend.library) is not None


def backend_order(config: StructuredOutputsConfig, *, fallback: bool) -> Iterator[str]:
    """Names of the backends to try, in order; those that are not installed are left out, except
    for the one that was asked for."""
    wanted = config.backend
    if wanted != "auto":
        yield wanted
    found: Sequence[str] = [name for name in BACKENDS if name in plugins.installed(GROUP)]
    for name in found:
        if name != wanted and (fallback or wanted == "auto") and is_installed(backend_class(name)):
            yield name
            if not fallback:
                return


def check_backend(config: StructuredOutputsConfig) -> None:
    """Refuse to start with a backend that cannot be used.

    Raises:
        MissingDependency: its library is not installed.
        PluginError: there is no such backend.
    """
    if config.backend == "auto":
        return
    backend = backend_class(config.backend)
    if not is_installed(backend):
        raise MissingDependency(
            backend.library,
            needed_for=f"structured_outputs.backend = {config.backend!r}",
            install=backend.install,
        )


class Backends:
    """Backends' objects for one vocabulary, made when first asked for. Thread-safe."""

    def __init__(self, vocabulary: Vocabulary) -> None:
        self.vocabulary = vocabulary
        self._lock = threading.Lock()
        self._made: dict[str, GrammarBackend] = {}

    def get(self, name: str) -> GrammarBackend:
        """The object; making it may take seconds.

        Raises:
            MissingDependency, PluginError: it cannot be made.
        """
        with self._lock:
            if name not in self._made:
                self._made[name] = backend_class(name)(self.vocabulary)
            return self._made[name]
