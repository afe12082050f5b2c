"""Runner of a checkpoint, and conversion of its class. No torch."""

from __future__ import annotations

import logging
from typing import NamedTuple

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.pooling import PoolingTraits
from headrace_models.catalogue import ARCHITECTURES

logger = logging.getLogger(__name__)


class Run(NamedTuple):
    """The choice."""

    runner: str
    """``generate`` or ``pooling``."""
    convert: str
    """``none``, ``embed`` or ``classify``."""


_SUFFIXES = {
    "ForCausalLM": Run("generate", "none"),
    "ForConditionalGeneration": Run("generate", "none"),
    "ChatModel": Run("generate", "none"),
    "LMHeadModel": Run("generate", "none"),
    "OmniModel": Run("generate", "none"),  # a thinker, which writes, and a talker
    "MiDashengLMModel": Run("generate", "none"),
    "UltravoxModel": Run("generate", "none"),
    "D_Model": Run("generate", "none"),  # NVLM's
    "ForTextEncoding": Run("pooling", "embed"),
    "EmbeddingModel": Run("pooling", "embed"),
    "ForRewardModeling": Run("pooling", "embed"),
    "RewardModel": Run("pooling", "embed"),
    "ForSequenceClassification": Run("pooling", "classify"),
    "ForRanking": Run("pooling", "classify"),
    "ForRetrieval": Run("pooling", "embed"),
    "ForTokenClassification": Run("pooling", "classify"),
    "ForImageClassification": Run("pooling", "classify"),
    "ForAudioClassification": Run("pooling", "classify"),
    "ForVideoClassification": Run("pooling", "classify"),
    "ClassificationModel": Run("pooling", "classify"),
    "Model": Run("pooling", "embed"),
}
"""End of an architecture's name -> its usual run. The shortest is last: the first that fits is meant."""


def choose_run(
    config: ModelConfig,
    architecture: str,
    traits: PoolingTraits | None,
    *,
    sentence_transformer: bool,
    scores: bool = False,
) -> Run:
    """The user's choice, else what the files say, else the class, else its name.

    Args:
        traits: of a class that pools by itself; None: it generates.
        sentence_transformer: the checkpoint has a Sentence Transformers pooling module.
        scores: that module makes a score of a language model's logits.

    Raises:
        ConfigError: the class cannot do what the user chose.
    """
    usual = _by_name(architecture)
    runner: str = config.runner
    if runner == "auto":
        pools = sentence_transformer or traits is not None
        runner = "pooling" if pools else usual.runner
        logger.info("runner: auto -> %s (--runner overrides it)", runner)
    if traits is not None:
        _check_own(config, architecture, traits)
        return Run(runner, "none")
    if runner == "generate":
        if config.convert not in ("auto", "none"):
            raise ConfigError(
                f"model.convert = {config.convert!r}: converts for pooling, but the runner is "
                "generate (set --runner pooling)",
                field="model.convert",
            )
        return Run(runner, "none")
    if config.convert != "auto":
        return Run(runner, config.convert)
    if usual.convert == "none":
        return Run(runner, "classify" if scores else "embed")
    return Run(runner, usual.convert)


def _by_name(architecture: str) -> Run:
    row = ARCHITECTURES.get(architecture)
    if row is not None and row.task == "generate":  # ChatGLMModel, in spite of its name
        return Run("generate", "none")
    for suffix, run in _SUFFIXES.items():
        if architecture.endswith(suffix):
            return run
    return Run("generate", "none")


def _check_own(config: ModelConfig, architecture: str, traits: PoolingTraits) -> None:
    """The class pools by itself, in one way."""
    if config.runner == "generate":
        raise ConfigError(
            f"model.runner = 'generate': {architecture} generates no text; must be pooling or auto",
            field="model.runner",
        )
    own = "embed" if traits.purpose == "embed" else "classify"
    if config.convert not in ("auto", "none", own):
        raise ConfigError(
            f"model.convert = {config.convert!r}: {architecture} pools by itself; must be auto, "
            f"none or {own}. Another class of the family is chosen with hf_overrides: "
            "architectures",
            field="model.convert",
        )
