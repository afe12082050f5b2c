"""The facts about a running engine's model."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from headrace_core.errors import RequestError
from headrace_core.pooling import PoolingInfo, PoolingParams


@dataclass(frozen=True, slots=True)
class ServedModel:
    """Facts about the model that an engine serves. Plain data, crosses process borders."""

    name: str
    """First served name."""
    names: tuple[str, ...]
    """All served names."""
    root: str
    """Path or hub name of the weights."""
    architecture: str
    max_model_len: int
    vocab_size: int
    max_logprobs: int
    eos_token_ids: tuple[int, ...]
    tasks: tuple[str, ...]
    has_tokenizer: bool
    has_chat_template: bool
    default_sampling_params: Mapping[str, Any]
    """Fields of :class:`~headrace_core.sampling.params.SamplingParams` that the model's generation config
    sets (``max_tokens`` there is a server-wide cap)."""
    priority_scheduling: bool = False
    hidden_size: int = 0
    """Size of an input embedding; 0 where prompt embeddings are off."""
    dtype: str = ""
    """The activations'."""
    logprobs_mode: str = "raw_logprobs"
    """Values that outputs report; see ``model.logprobs_mode``."""
    tokenizer_info: Mapping[str, Any] = field(default_factory=dict)
    special_tokens: tuple[str, ...] = ()
    """Texts of the tokens that ``skip_special_tokens`` drops."""
    prompt_embeds: bool = False
    """True if a prompt may be embeddings: ``{"prompt_embeds": ...}``."""
    runner: str = "generate"
    """``generate`` or ``pooling``."""
    convert: str = "none"
    pooling: PoolingInfo | None = None
    """With runner ``pooling``."""
    class_path: str = ""
    """``module:Class`` of the implementation."""
    source: str = "native"
    """``native``, ``transformers`` or ``plugin:<distribution>``."""
    unmet: Mapping[str, tuple[str, ...]] = field(default_factory=dict)
    """Task -> why the model does not have it, one line for each reason with what mends it; only
    where the class comes close."""
    modalities: tuple[str, ...] = ()
    """Modalities of media that prompts may have."""
    is_encoder_decoder: bool = False
    max_loras: int = 0
    """Adapters that a step can have side by side; 0: the engine takes none."""

    @property
    def reads_extra_kwargs(self) -> bool:
        """True if its pooler may read :attr:`PoolingParams.extra_kwargs`: it is a plug-in's."""
        return self.source.startswith("plugin:")

    def check_extra_kwargs(self, params: PoolingParams) -> None:
        """Refuse extra keywords of pooling parameters where nobody reads them.

        Raises:
            RequestError: the model's pooler is headrace's own.
        """
        if params.extra_kwargs and not self.reads_extra_kwargs:
            raise RequestError(
                f"extra_kwargs = {params.extra_kwargs!r}: must be left out: {self.architecture} is "
                f"pooled by headrace's own code, which ignores it; only plug-in classes and IO "
                f"processors that check parameters (validate_or_generate_params) read it",
                param="extra_kwargs",
                value=params.extra_kwargs,
            )
