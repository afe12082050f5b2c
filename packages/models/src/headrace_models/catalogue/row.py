"""The facts of one architecture that tables are made of."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Architecture:
    """A row of the catalogue. Plain data: nothing is imported to read it."""

    name: str
    """Name in ``config.json``'s ``architectures``; also the entry point's name."""
    target: str
    """``module:Class`` below ``headrace_models.families``."""
    models: str
    """Names of the models that people know."""
    caches: tuple[str, ...] = ("full",)
    """Kinds of cache that its layers have, of :data:`CACHES`, in the order of that."""
    task: str = "generate"
    """``generate``, ``pool`` or ``speech``."""
    alias_of: str = ""
    """Another row whose checkpoints may carry this name; tested there."""
    lora: bool = True
    """True if its layers take low-rank adapters (:mod:`headrace_models.lora`)."""
    quantization: bool = True
    """True if a quantization method decides how its linear layers are stored."""

    @property
    def pp(self) -> bool:
        """True if its layers can be on several stages (:mod:`headrace_models.stages`)."""
        return self.name not in WHOLE and not {"none", "cross"} & {*self.caches}

    @property
    def entry(self) -> str:
        """The entry point's value."""
        return f"headrace_models.families.{self.target}"


WHOLE = (
    "CLIPTextModelWithProjection", "Gemma3nForCausalLM", "Gemma4ForCausalLM", "Gemma4UnifiedForCausalLM",
    "IQuestLoopCoderForCausalLM", "OuroForCausalLM", "SiglipTextModel", "SolarForCausalLM",
    "Zamba2ForCausalLM", "ZambaForCausalLM", "ZayaForCausalLM",
)  # fmt: skip
"""Architectures whose layers need more of each other than the stream, beside encoders."""
CACHES = ("full", "sliding", "chunked", "latent", "recurrent", "cross", "none")
