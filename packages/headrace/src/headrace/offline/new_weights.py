"""New weights on their way from a caller to an engine."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from headrace.offline.arguments import WAKING_TIMEOUT
from headrace_core.errors import RequestError

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_engine.engine import Engine
    from headrace_engine.offline import OfflineEngine

    Weights = Mapping[str, Tensor] | Iterable[tuple[str, Tensor]] | Mapping[str, Any]
else:
    Weights = Any

MODES = ("keep", "wait", "abort")


@contextmanager
def as_update(
    weights: Weights | None, in_process: bool, **options: Any
) -> Iterator[dict[str, Any]]:
    """The argument of the engine's ``update_weights``; tensors for an engine in another process are in shared
    memory meanwhile.

    Args:
        options: further fields of it.

    Raises:
        RequestError: the weights are something else.
    """
    if weights is None or (isinstance(weights, Mapping) and isinstance(weights.get("source"), str)):
        yield {**(weights or {}), **options}
        return
    pairs = _pairs(weights.items() if isinstance(weights, Mapping) else weights)
    if in_process:
        yield {"source": "process", "given": pairs, **options}
        return
    from headrace_engine.weights.shared_memory import SharedWeights

    with SharedWeights() as shared:
        yield shared.write(pairs, **options)


def said(weights: Weights | None, **options: Any) -> dict[str, Any]:
    """Options of an update (``finish``, ``version``, ``target``), as what a trainer says of its tensors has
    them, or else the caller."""
    told: Any = weights
    if isinstance(told, Mapping) and isinstance(told.get("source"), str):
        return {name: told.get(name, value) for name, value in options.items()}
    return options


def update_offline(
    engine: OfflineEngine, weights: Weights | None, mode: str | None, **options: Any
) -> dict[str, Any]:
    """See :meth:`headrace.LLM.update_weights`.

    Args:
        options: ``finish``, ``version``, ``target``.
    """
    check_mode(mode)
    options = said(weights, **options)
    last = {**options, "finish": True, "keep_requests": mode == "keep"}
    pauses = options["finish"] and mode in ("wait", "abort")

    def call(arguments: Mapping[str, Any]) -> dict[str, Any]:
        sent = engine.collective_rpc("update_weights", args=[arguments], timeout=WAKING_TIMEOUT)
        return dict(sent[0])

    # Nothing pauses for an update that is not whole.
    first = {**last, "finish": options["finish"] and not pauses, "prepare": pauses}
    with as_update(weights, engine.client.in_process, **first) as arguments:
        taken = call(arguments)
    if not pauses:
        return taken
    # Tensors came while requests of other threads ran; the pause is for putting them in.
    try:
        with engine.paused(wait=mode == "wait"):
            return call(last)
    except BaseException:
        if taken["began"]:
            engine.collective_rpc("update_weights", args=[{"cancel": True}])
        raise


def check_mode(mode: object) -> None:
    """Raises: RequestError, it is none of :data:`MODES`, nor None."""
    if mode is not None and mode not in MODES:
        raise RequestError(
            f"mode = {mode!r:.100}: must be None or one of {', '.join(MODES)}", param="mode"
        )


async def update(
    engine: Engine,
    weights: Weights | None,
    *,
    finish: bool,
    mode: str | None,
    version: str | None,
    target: str,
) -> dict[str, Any]:
    """See :meth:`headrace.AsyncLLM.update_weights`."""
    check_mode(mode)
    options = said(weights, finish=finish, version=version, target=target)
    finish = options["finish"]

    async def call(arguments: Mapping[str, Any]) -> dict[str, Any]:
        sent = engine.collective_rpc("update_weights", args=[arguments], timeout=WAKING_TIMEOUT)
        return dict((await sent)[0])

    last = {**options, "finish": True, "keep_requests": mode == "keep"}
    pauses = finish and mode in ("wait", "abort") and not await engine.is_paused()
    # Nothing pauses, nor is aborted, for an update that is not whole.
    first = {**last, "finish": finish and not pauses, "prepare": pauses}
    with as_update(weights, engine.client.in_process, **first) as arguments:
        taken = await call(arguments)
    if not pauses:
        return taken
    # Tensors came while requests ran; the pause is for putting them in.
    try:
        await engine.pause_generation(wait_for_inflight_requests=mode == "wait")
        return await call(last)
    except BaseException:
        if taken["began"]:
            await engine.collective_rpc("update_weights", args=[{"cancel": True}])
        raise
    finally:
        await engine.resume_generation()


def _pairs(weights: Any) -> list[tuple[str, Any]]:
    """Names and tensors.

    Raises:
        RequestError: they are something else.
    """
    pairs: list[Any] = list(weights) if isinstance(weights, Iterable) else [None]
    for pair in pairs:
        ours = isinstance(pair, tuple) and len(pair) == 2 and isinstance(pair[0], str)
        if not ours or not hasattr(pair[1], "detach"):
            raise RequestError(
                f"weights: {pair!r:.100}: must be a mapping of names to tensors, or pairs of a name and a "
                "tensor",
                param="weights",
            )
    return pairs
