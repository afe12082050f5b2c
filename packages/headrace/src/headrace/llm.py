"""The offline API: :class:`LLM`."""

from __future__ import annotations

from typing import Any

from headrace.engine_args import EngineArgs
from headrace.llm_engine import LLMEngine
from headrace.offline.completing import GenerationMixin
from headrace.offline.embedding import PoolingMixin
from headrace.offline.own_names import own_names
from headrace.offline.speech import TranscriptionMixin


@own_names
class LLM(GenerationMixin, PoolingMixin, TranscriptionMixin):
    """A model for offline batches.

    Args:
        model: folder or hub name of a checkpoint; None: the demo model that ships with headrace.
        engine_args: every engine setting by its flag's name (``max_model_len=2048``,
            ``enable_prefix_caching=False``, ...); see :class:`headrace.EngineArgs`. One default is
            another: ``log_stats`` is False. ``log_stats=True``, or ``disable_log_stats=False``, collects
            what :meth:`get_metrics` returns.

    Raises:
        TypeError: an unknown setting.
        HeadraceError: the model cannot be resolved, loaded or fitted into memory.

    Leaving a ``with`` block, :meth:`close` or dropping the object frees model and cache.

    Any thread may call any method at any time, a callback of another call included. Calls of several
    threads run together, in the same steps of one engine, and each gets its own outputs. :meth:`close`
    makes calls that still run raise :class:`~headrace_core.errors.EngineDead`; every later call raises
    RuntimeError. A function that the engine itself runs (:meth:`collective_rpc`, :meth:`apply_model`) cannot
    call methods that need the engine: they raise :class:`~headrace_core.errors.EngineError`.

        >>> llm = LLM()
        >>> llm.generate("Hello", SamplingParams(temperature=0))[0].outputs[0].text
    """

    def __init__(self, model: str | None = None, **engine_args: Any) -> None:
        if engine_args.get("log_stats") is None and engine_args.get("disable_log_stats") is None:
            engine_args["log_stats"] = False
        if model is not None:
            engine_args["model"] = model
        super().__init__(LLMEngine(EngineArgs(**engine_args)))

    def __enter__(self) -> LLM:
        self.engine.check_caller()  # raises where the object was closed, too
        return self

    def __exit__(self, *_: object) -> None:
        self.close()
