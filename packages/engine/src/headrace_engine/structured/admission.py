"""Constraints on their way in: checked, compiled in a process that can be killed, remembered."""

from __future__ import annotations

import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from typing import NamedTuple

from headrace_core.errors import MissingDependency, PluginError, RequestError, UnsupportedFeature
from headrace_core.grammar import GrammarSpec, Vocabulary, refuse
from headrace_core.sampling.params import StructuredOutputsParams
from headrace_engine.config import StructuredOutputsConfig
from headrace_engine.structured.backend_loading import backend_class, backend_order
from headrace_engine.structured.compile_process import CompileProcesses
from headrace_engine.structured.source import ConstraintSource, source_of

logger = logging.getLogger(__name__)

MAX_VERDICTS = 4096
"""Compiled and refused constraints that are remembered, by digest: some 2 MB."""
_MESSAGE_BYTES = 512
"""Longest refusal that is remembered."""
BOUNDED = frozenset({"json_object"})
"""Kinds whose compilation is the same for every request without a pattern of its own for white space:
nothing about them can be made slow."""


class Admitted(NamedTuple):
    """A constraint that compiles."""

    grammar: GrammarSpec
    size_bytes: int


class _Verdict(NamedTuple):
    size_bytes: int
    error: RequestError | None


class _NotKnown(Exception):
    """A constraint has not been compiled yet."""


class Admission:
    """Finds the backend for each constraint and lets it compile. Thread-safe.

    Args:
        config: backend, limits.
        vocabulary: made when the first constraint comes.
    """

    def __init__(
        self, config: StructuredOutputsConfig, vocabulary: Callable[[], Vocabulary]
    ) -> None:
        self.config = config
        self._processes = CompileProcesses(
            vocabulary,
            count=config.compile_processes,
            seconds=config.compile_seconds,
            memory_bytes=config.compile_memory_bytes,
        )
        self._unusable: set[str] = set()
        """Backends whose library is there and cannot be imported."""
        self._lock = threading.Lock()
        self._verdicts: OrderedDict[bytes, _Verdict] = OrderedDict()
        self._under_way: dict[bytes, Future[_Verdict]] = {}

    def admit(self, params: StructuredOutputsParams) -> Admitted:
        """Check a constraint; compile it unless that is known to work. May take seconds.

        Raises:
            RequestError: malformed, too large, or no backend can serve it; names keyword and
                JSON pointer.
        """
        return self._find(params, self._verdict)

    def known(self, params: StructuredOutputsParams) -> Admitted | None:
        """The same as far as it is known without compiling; None: it must be compiled.

        Raises:
            RequestError: as :meth:`admit`.
        """
        try:
            return self._find(params, self._remembered)
        except _NotKnown:
            return None

    def _find(
        self, params: StructuredOutputsParams, verdict_of: Callable[[GrammarSpec], _Verdict]
    ) -> Admitted:
        source = source_of(params, self.config)
        fallback = not (self.config.disable_fallback or params.disable_fallback)
        errors: list[RequestError] = []
        reason: RequestError | None = None
        for name in backend_order(self.config, fallback=fallback):
            if name in self._unusable:
                continue
            try:
                return _admit(source, name, params, verdict_of)
            except RequestError as error:
                if not (errors or isinstance(error, UnsupportedFeature)):
                    raise  # malformed: no other backend would take it
                if name == "guidance" and not isinstance(error, UnsupportedFeature):
                    reason = error
                errors.append(error)
            except (MissingDependency, PluginError) as error:
                if name == self.config.backend:
                    raise
                self._unusable.add(name)
                logger.warning("grammar backend %s cannot be used: %s", name, error)
        # What guidance calls malformed is refused in its words, whichever backend was asked first.
        raise reason or _summary(source, errors)

    def close(self) -> None:
        """End the processes."""
        self._processes.close()

    def _remembered(self, spec: GrammarSpec) -> _Verdict:
        with self._lock:
            known = self._verdicts.get(spec.key)
        if known is None:
            raise _NotKnown
        return known

    def _verdict(self, spec: GrammarSpec) -> _Verdict:
        """The remembered verdict, or a new one; equal constraints at once compile once."""
        key = spec.key
        with self._lock:
            known = self._verdicts.get(key)
            if known is not None:
                self._verdicts.move_to_end(key)
                return known
            under_way = self._under_way.get(key)
            mine = under_way is None
            if under_way is None:
                under_way = self._under_way[key] = Future()
        if not mine:
            return under_way.result()
        try:
            verdict = self._try(spec)
        except BaseException as error:
            under_way.set_exception(error)
            raise
        else:
            under_way.set_result(verdict)
            self._remember(key, verdict)
            return verdict
        finally:
            with self._lock:
                del self._under_way[key]

    def _try(self, spec: GrammarSpec) -> _Verdict:
        try:
            return _Verdict(self._processes.compile(spec), None)
        except RequestError as error:
            logger.debug("a constraint of kind %s was refused by %s", spec.kind, spec.backend)
            return _Verdict(0, error)

    def _remember(self, key: bytes, verdict: _Verdict) -> None:
        if verdict.error is not None and len(str(verdict.error)) > _MESSAGE_BYTES:
            return
        with self._lock:
            self._verdicts[key] = verdict
            while len(self._verdicts) > MAX_VERDICTS:
                self._verdicts.popitem(last=False)


def _admit(
    source: ConstraintSource,
    name: str,
    params: StructuredOutputsParams,
    verdict_of: Callable[[GrammarSpec], _Verdict],
) -> Admitted:
    spec = source.spec(name)
    reasons = [*backend_class(name).refuse(spec), *_option_refusals(params, name)]
    if reasons:
        raise refuse(spec, reasons)
    if spec.kind in BOUNDED and spec.whitespace_pattern is None:
        return Admitted(spec, 1 << 16)
    verdict = verdict_of(spec)
    if verdict.error is not None:
        # One object's traceback must not be shared between requests.
        raise type(verdict.error)(str(verdict.error), param=verdict.error.param)
    return Admitted(spec, verdict.size_bytes)


def _option_refusals(params: StructuredOutputsParams, name: str) -> list[str]:
    """Options that one request may use only with the backends that have them."""
    reasons = []
    if params.disable_any_whitespace and name not in ("guidance", "xgrammar"):
        reasons.append("disable_any_whitespace: only guidance and xgrammar can do it")
    if params.whitespace_pattern is not None and name not in ("guidance", "outlines"):
        reasons.append("whitespace_pattern: only guidance and outlines can do it")
    return reasons


def _summary(source: ConstraintSource, errors: Sequence[RequestError]) -> RequestError:
    """One error of all backends that were tried; the first one's is the one that is shown whole."""
    if not errors:
        return UnsupportedFeature(
            "structured_outputs: no grammar backend is installed; pip install llguidance",
            param="structured_outputs",
        )
    first = errors[0]
    if len(errors) == 1:
        return first
    others = len(errors) - 1
    return UnsupportedFeature(
        f"{first} (nor can the {others} other installed backend{'s' if others > 1 else ''})",
        param=first.param,
    )
