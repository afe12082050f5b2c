"""Choosing the attention backends of a model's layers.

A choice is a loop over the installed backends; the error of a failed choice shows every candidate and
why it was passed over.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from headrace_core import plugins
from headrace_core.attention import AttentionNeed, BackendFacts
from headrace_core.errors import ConfigError, PluginError
from headrace_core.ops import OpTable

logger = logging.getLogger(__name__)


def choose_backend(
    need: AttentionNeed, *, wanted: str | None = None, preferred: Sequence[str] = ()
) -> type[BackendFacts]:
    """Pick a backend class: an :class:`~headrace_core.attention.EncoderBackend` for attention that
    caches nothing, else an :class:`~headrace_core.attention.AttentionBackend`.

    Args:
        need: what the model asks for.
        wanted: the user's choice; any refusal is an error, there is no silent fallback.
        preferred: the platform's order; installed backends that it omits come last, by name.

    Raises:
        ConfigError: nobody can serve; lists each candidate with its reasons.
    """
    if wanted is not None:
        backend: type[BackendFacts] = plugins.load("headrace.attention_backends", wanted)
        reasons = backend.refuse(need)
        if reasons:
            raise ConfigError(
                f"attention backend {wanted!r} cannot serve {need}: {'; '.join(reasons)}; "
                f"could be {_who_serves(need)}",
                field="attention.backend",
            )
        return backend
    names = plugins.installed("headrace.attention_backends")
    order = [name for name in preferred if name in names]
    order += [name for name in names if name not in order]
    refusals: list[str] = []
    for name in order:
        backend = plugins.load("headrace.attention_backends", name)
        reasons = backend.refuse(need)
        if not reasons:
            logger.info("attention backend: %s", name)
            return backend
        refusals.append(f"{name}: {', '.join(reasons)}")
    listing = "; ".join(refusals) or "none is installed (pip install headrace-attention)"
    raise ConfigError(
        f"no attention backend can serve {need}. {listing}", field="attention.backend"
    )


class BackendChooser:
    """Chooses the backends of one model's layers; what is chosen once is one object.

    A user's choice holds for every layer whose type of attention the backend serves at all; others,
    such as an encoder's beside a cached decoder's, get what they would without it.

    Args:
        ops: what backends are made with.
        wanted, preferred: see :func:`choose_backend`.
    """

    def __init__(
        self, ops: OpTable, *, wanted: str | None = None, preferred: Sequence[str] = ()
    ) -> None:
        self._ops = ops
        self._wanted = wanted
        self._preferred = preferred
        self._chosen: dict[AttentionNeed, BackendFacts] = {}
        self._made: dict[type[BackendFacts], BackendFacts] = {}
        self._passed_over: list[AttentionNeed] = []

    def __call__(self, need: AttentionNeed) -> BackendFacts:
        """The backend for layers with this need.

        Raises:
            ConfigError: nobody can serve it, or not the one that the user has chosen.
        """
        if need not in self._chosen:
            backend = self._choose(need)
            self._chosen[need] = self._made.setdefault(backend, backend(self._ops))
        return self._chosen[need]

    def check_used(self) -> None:
        """To be called when all layers have been asked for.

        Raises:
            ConfigError: none of them is served by the one that the user has chosen.
        """
        if self._passed_over and len(self._passed_over) == len(self._chosen):
            choose_backend(self._passed_over[0], wanted=self._wanted)

    def _choose(self, need: AttentionNeed) -> type[BackendFacts]:
        if self._wanted is not None:
            wanted: type[BackendFacts] = plugins.load("headrace.attention_backends", self._wanted)
            if need.attention_type not in wanted.supported_attention_types:
                logger.info(
                    "attention backend %s: not for attention of type %s, which it does not serve",
                    self._wanted, need.attention_type,
                )  # fmt: skip
                self._passed_over.append(need)
                return choose_backend(need, preferred=self._preferred)
        return choose_backend(need, wanted=self._wanted, preferred=self._preferred)


def _who_serves(need: AttentionNeed) -> list[str]:
    """Names of installed backends that serve the need; one that cannot be imported serves nothing."""
    willing = []
    for name, plugin in plugins.installed("headrace.attention_backends").items():
        try:
            backend: type[BackendFacts] = plugin.load()
        except PluginError:
            continue
        if not backend.refuse(need):
            willing.append(name)
    return willing
