"""``adapter_config.json`` of PEFT: what an adapter does to each module, and what is not done here."""

from __future__ import annotations

import logging
import math
import re
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.json_object import read_object
from headrace_models.config.settings import Settings

logger = logging.getLogger(__name__)

CONFIG = "adapter_config.json"
_OFF: tuple[Any, ...] = (False, [], {})
_REFUSED: Mapping[str, tuple[Any, ...]] = {
    "bias": ("none",), "use_dora": _OFF, "modules_to_save": _OFF, "layer_replication": _OFF,
    "trainable_token_indices": _OFF, "lora_bias": _OFF, "use_qalora": _OFF,
    "use_bdlora": _OFF, "alora_invocation_tokens": _OFF, "arrow_config": _OFF, "velora_config": _OFF,
    "monteclora_config": _OFF, "megatron_config": _OFF, "ensure_weight_tying": _OFF,
}  # fmt: skip
"""Settings that ask for more than a product that is added to a weight, and their values that do not."""
_TRAINING = frozenset({
    "peft_type", "task_type", "auto_mapping", "base_model_name_or_path", "revision", "inference_mode",
    "peft_version", "r", "lora_alpha", "use_rslora", "rank_pattern", "alpha_pattern", "target_modules",
    "target_parameters",
    "exclude_modules", "lora_dropout", "init_lora_weights", "layers_to_transform", "layers_pattern",
    "fan_in_fan_out", "megatron_core", "loftq_config", "eva_config", "corda_config", "lora_ga_config",
    "qalora_group_size", "runtime_config",
})  # fmt: skip
"""Settings that are read, or that say how it was trained: which modules it changes its tensors say."""
_OTHER_BASE = ("pissa", "corda", "olora", "loftq", "lora_ga")
"""Beginnings of values of ``init_lora_weights`` whose training changes the base weights, too."""
_EXPERTS = "experts"
"""Module of transformers whose parameters hold all experts' weights."""
_MAX_PATTERNS, _LONGEST_PATTERN = 4096, 500
_MAX_REPEATS = 2
"""Repetitions (``*``) in a pattern, and none of a group: matching one with more can take for ever."""


class AdapterSettings:
    """The settings of one folder.

    Args:
        folder: of the adapter.

    Raises:
        UnsupportedModel: the file is missing or unreadable, or asks for what is not done; names the key.
    """

    def __init__(self, folder: Path) -> None:
        self.path = folder / CONFIG
        if not self.path.exists():
            raise UnsupportedModel(
                f"{self.path}: not found: must be in the folder of an adapter, beside its weights"
            )
        stated = read_object(self.path, required=True)
        settings = Settings(stated, file=str(self.path))
        settings.refuse("peft_type", "LORA")
        for name, accepted in _REFUSED.items():
            settings.refuse(name, *accepted)
        self._check_base(stated)
        self.rank = settings.integer("r", 8)
        self.alpha = settings.number("lora_alpha", 8)
        self.by_root = settings.flag("use_rslora", False)
        self.fan_in_fan_out = settings.flag("fan_in_fan_out", False)
        self.target_modules = stated.get("target_modules")
        self.target_parameters = self._names(stated, "target_parameters")
        self.ranks = self._patterns(stated, "rank_pattern")
        self.alphas = self._patterns(stated, "alpha_pattern")
        if unknown := sorted(
            k for k, v in stated.items() if v and k not in _TRAINING | {*_REFUSED}
        ):
            logger.warning("%s: settings that headrace does not know: %.500s", self.path, unknown)

    def _check_base(self, stated: Mapping[str, Any]) -> None:
        begun = stated.get("init_lora_weights")
        if isinstance(begun, str) and begun.lower().startswith(_OTHER_BASE):
            raise UnsupportedModel(
                f"{self.path}: init_lora_weights = {begun!r:.100}: the adapter belongs to base weights that "
                "this changed; accepted is one that was converted as it was saved "
                "(save_pretrained(..., path_initial_model_for_weight_conversion=...)), which has true or "
                "false here"
            )

    def _names(self, stated: Mapping[str, Any], name: str) -> list[str]:
        given = stated.get(name) or []
        if not isinstance(given, list) or not all(isinstance(one, str) for one in given):
            raise self._wrong(name, given, "a list of names")
        return given

    def _patterns(
        self, stated: Mapping[str, Any], name: str
    ) -> list[tuple[re.Pattern[str], float]]:
        """Regular expressions of modules' names, in PEFT's reading of them, and their values."""
        given = stated.get(name) or {}
        if not isinstance(given, dict) or len(given) > _MAX_PATTERNS:
            raise self._wrong(name, given, f"an object of at most {_MAX_PATTERNS} patterns")
        found = []
        for pattern, value in given.items():
            if type(value) not in (int, float) or not 0 <= value <= 1e6:
                raise self._wrong(f"{name}[{pattern!r:.100}]", value, "a number from 0 to 1000000")
            found.append((self._compiled(name, pattern), value))
        return found

    def _compiled(self, name: str, pattern: str) -> re.Pattern[str]:
        repeats = len(re.findall(r"[*+?{]", pattern))
        if (
            len(pattern) > _LONGEST_PATTERN
            or repeats > _MAX_REPEATS
            or re.search(r"\)[*+?{]", pattern)
        ):
            accepted = (
                f"patterns of at most {_LONGEST_PATTERN} characters and {_MAX_REPEATS} repetitions, none of "
                "a group"
            )
            raise self._wrong(name, pattern, accepted)
        try:
            return re.compile(rf"(.*\.)?({pattern})$")
        except (re.error, RecursionError, OverflowError) as error:
            raise self._wrong(name, pattern, f"regular expressions ({error})") from error

    def _wrong(self, name: str, value: object, accepted: str) -> UnsupportedModel:
        return UnsupportedModel(f"{self.path}: {name} = {value!r:.200}: must be {accepted}")

    def parameters_of(self, module: str) -> list[str]:
        """Names below a module of those of its parameters that are adapted by themselves. A name alone is
        one of experts'."""
        split = (target.rpartition(".") for target in self.target_parameters)
        experts = module.rpartition(".")[2] == _EXPERTS
        return [
            name
            for around, _, name in split
            if (f".{module}".endswith(f".{around}") if around else experts)
        ]

    def rank_of(self, module: str) -> int:
        """Rank of the factors of a module, or of a parameter, by the file."""
        return int(_first(self.ranks, module, self.rank))

    def scale_of(self, module: str) -> float:
        """Number that a module's product is multiplied by (rsLoRA: Kalajdzievski 2023, arXiv:2312.03732)."""
        rank = self.rank_of(module)
        return _first(self.alphas, module, self.alpha) / (math.sqrt(rank) if self.by_root else rank)


def _first(patterns: list[tuple[re.Pattern[str], float]], module: str, default: float) -> float:
    return next((value for pattern, value in patterns if pattern.match(module)), default)
