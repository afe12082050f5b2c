"""The engine that an ``LLM`` holds, until it is closed: :class:`EngineMixin`."""

from __future__ import annotations

from typing import TYPE_CHECKING

from headrace.offline.controls import EngineControls
from headrace_core.sampling.params import SamplingParams

if TYPE_CHECKING:
    from headrace.llm_engine import LLMEngine
    from headrace.metrics import Metric
    from headrace.offline.model_facts import ModelFacts
    from headrace.tokenizer import ModelTokenizer
    from headrace_engine.offline import OfflineEngine


class EngineMixin(EngineControls):
    """An engine, and what can be asked of it. Once it is closed, every method raises RuntimeError and
    says so; :meth:`close` does nothing then.

    Args:
        llm_engine: runs; belongs to this object from now on.
    """

    def __init__(self, llm_engine: LLMEngine) -> None:
        self._llm_engine: LLMEngine | None = llm_engine
        self.model_info = llm_engine.front.info
        self.engine_config = llm_engine.front.config

    @property
    def llm_engine(self) -> LLMEngine:
        """The engine underneath, to be driven step by step. It lives until this object is closed, or
        until both objects were dropped.

        Raises:
            RuntimeError: the object was closed.
        """
        if self._llm_engine is None:
            raise RuntimeError("this LLM was closed")
        return self._llm_engine

    @property
    def engine(self) -> OfflineEngine:
        """The synchronous engine under :attr:`llm_engine`, of the package headrace-engine.

        Raises:
            RuntimeError: the object was closed.
        """
        return self.llm_engine.engine

    @property
    def model_config(self) -> ModelFacts:
        """Facts about the model: ``model``, ``max_model_len``, ``dtype``, ``hf_config``, ..."""
        return self.llm_engine.model_config

    def get_tokenizer(self) -> ModelTokenizer:
        """The model's tokenizer, with the interface of transformers' tokenizers; one object for all
        calls.

        Raises:
            RuntimeError: none was loaded (``skip_tokenizer_init``).
        """
        return self.llm_engine.get_tokenizer()

    def get_supported_tasks(self) -> tuple[str, ...]:
        """The tasks that the model has, such as ``generate`` or ``embed``."""
        return self.llm_engine.get_supported_tasks()

    def get_metrics(self) -> list[Metric]:
        """A snapshot of all metrics; see :meth:`LLMEngine.get_metrics`."""
        return self.llm_engine.get_metrics()

    def get_default_sampling_params(self) -> SamplingParams:
        """The sampling values of the model's generation config, else the neutral ones."""
        return SamplingParams(**self.engine.model.default_sampling_params)

    def close(self) -> None:
        """Stop the engine and free model and cache. Idempotent.

        Raises:
            EngineError: called by a function that runs inside the engine (:meth:`collective_rpc`).
        """
        engine = self._llm_engine
        if engine is None:
            return
        engine.engine.check_caller()
        self._llm_engine = None
        engine.shutdown()
