"""The offline API: :class:`LLM`."""

from __future__ import annotations

from typing import Any

from headrace.engine_args import EngineArgs
from headrace.llm_engine import LLMEngine
from headrace.offline.completing import CompletesTexts
from headrace.offline.heard import HearsRecordings
from headrace.offline.pooled import PoolsTexts


class LLM(CompletesTexts, PoolsTexts, HearsRecordings):
    """A model for offline batches.

    Args:
        model: folder or hub name of a checkpoint; None: the demo model that ships with headrace.
        engine_args: every engine setting by its flag's name (``max_model_len=2048``,
            ``enable_prefix_caching=False``, ...); see :class:`headrace.EngineArgs`. And
            ``disable_log_stats``: False collects what :meth:`get_metrics` returns.

    Raises:
        TypeError: an unknown setting.
        HeadraceError: the model cannot be resolved, loaded or fitted into memory.

    Leaving a ``with`` block, :meth:`close` or dropping the object frees model and cache.

    Any thread may call any method at any time, a callback of another call included. Calls of several
    threads run together, in the same steps of one engine, and each gets its own outputs. :meth:`close`
    makes calls that still run raise :class:`~headrace_core.errors.EngineDead`.

        >>> llm = LLM()
        >>> llm.generate("Hello", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        engine_args["log_stats"] = _collects_statistics(engine_args)
        if model is not None:
            engine_args["model"] = model
        super().__init__(LLMEngine(EngineArgs(**engine_args)))

    def __enter__(self) -> LLM:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()


def _collects_statistics(engine_args: dict[str, Any]) -> bool:
    """Take the choice out of the keywords of :class:`LLM`, whose default is not to collect any.

    Raises:
        TypeError: ``disable_log_stats`` is not a boolean, or contradicts ``log_stats``.
    """
    collects = engine_args.pop("log_stats", None)
    disabled = engine_args.pop("disable_log_stats", None)
    if disabled is None:
        return False if collects is None else collects
    if not isinstance(disabled, bool):
        raise TypeError(f"disable_log_stats = {disabled!r:.100}: must be True or False")
    if collects is not None and collects is disabled:
        raise TypeError(
            f"disable_log_stats = {disabled} contradicts log_stats = {collects}; give one of them"
        )
    return not disabled
