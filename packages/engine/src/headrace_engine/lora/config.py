"""Settings of low-rank adapters."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from dataclasses import dataclass

from headrace_core.config import option, require, require_choice
from headrace_core.multimodal import MODALITIES

RANKS = (1, 8, 16, 32, 64, 128, 256, 320, 512)


@dataclass(frozen=True, kw_only=True)
class LoRAConfig:
    """Low-rank adapters (LoRA) on one base model."""

    enable_lora: bool = option(
        False, "Compute requests with low-rank adapters (LoRA) of the base model.",
        cost="memory of the slots; a step with adapters reads their factors, and adds two small products to "
        "each layer that they change",
    )  # fmt: skip
    max_loras: int = option(
        1, "Different adapters that a step may have; requests with another one wait for a slot.",
        cost="each slot holds factors of max_lora_rank for every layer",
    )  # fmt: skip
    max_lora_rank: int = option(
        16, f"Largest rank of an adapter: one of {', '.join(map(str, RANKS))}.",
        cost="memory of each slot grows with it, whatever the adapters' own ranks are",
    )  # fmt: skip
    max_cpu_loras: int | None = option(
        None, "Adapters that are kept in the host's memory, those in slots included; the one that was used "
        "longest ago goes first. Default: max_loras.",
        cost="the adapters' files, in memory",
    )  # fmt: skip
    fully_sharded_loras: bool = option(
        False, "Cut both factors of adapters over the ranks of tensor parallelism, not only one.",
        cost="an exchange of as many numbers as an adapter's rank in each layer; pays with large ranks and "
        "long sequences",
    )  # fmt: skip
    enable_tower_connector_lora: bool = option(
        False, "Take adapters that change towers for images, audio and video, and their projectors; media "
        "are embedded once for each such adapter, in the step that reaches them.",
        cost="memory of the slots, of every linear layer of the towers",
    )  # fmt: skip
    lora_dtype: str = option(
        "auto",
        "Type of the factors in the slots: auto, or the activations' by name; others are refused.",
    )
    default_mm_loras: Mapping[str, str] = option(
        {}, "JSON: modality -> path of the adapter of prompts that bring media of it and name none: "
        "{\"audio\": \"path\"}. A prompt with two such modalities gets none, unless both have one together "
        "(\"audio+image\"). Checkpoints that come with adapters for media have theirs by default.",
    )  # fmt: skip

    def __post_init__(self) -> None:
        require(self.max_loras >= 1, "lora.max_loras", self.max_loras, "at least 1")
        require_choice("lora.max_lora_rank", self.max_lora_rank, RANKS)
        kept = self.max_cpu_loras
        require(
            kept is None or kept >= self.max_loras,
            "lora.max_cpu_loras",
            kept,
            f"at least max_loras = {self.max_loras}",
        )
        require_choice(
            "lora.lora_dtype", self.lora_dtype, ("auto", "float16", "bfloat16", "float32")
        )
        require(
            self.enable_lora or not self.default_mm_loras,
            "lora.default_mm_loras",
            dict(self.default_mm_loras),
            "set together with enable_lora",
        )
        require(
            self.enable_lora or not self.enable_tower_connector_lora,
            "lora.enable_tower_connector_lora",
            self.enable_tower_connector_lora,
            "set together with enable_lora",
        )
        for modality in (part for key in self.default_mm_loras for part in key.split("+")):
            require_choice("lora.default_mm_loras", modality, tuple(MODALITIES))

    def check_used(self) -> None:
        """Refuse settings of adapters for an engine that takes none, once it is known that it takes none.

        Raises:
            ConfigError: names the first that is not its default.
        """
        for field in () if self.enable_lora else dataclasses.fields(self):
            value = getattr(self, field.name)
            default = field.default if field.default_factory is dataclasses.MISSING else {}
            require(value == default, f"lora.{field.name}", value, "set together with enable_lora")

    @property
    def num_kept(self) -> int:
        """Adapters in the host's memory."""
        return self.max_cpu_loras or self.max_loras
