"""The smaller model that guesses tokens for the model that is served."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING

from headrace_core.config import ModelConfig
from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_engine.lora.config import LoRAConfig
from headrace_engine.speculation.config import DRAFT_MODEL

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_engine.config import EngineConfig


def draft_model(resolved: ResolvedConfig) -> ResolvedConfig | None:
    """The configuration of the draft model, as if it were served; None: there is none. Reads JSON only.

    Raises:
        ConfigError: it has another vocabulary than the model, or cannot be found.
        UnsupportedModel: no installed family serves it.
    """
    speculative, config = resolved.config.speculative, resolved.config
    if speculative.method != DRAFT_MODEL:
        return None
    from headrace_models.resolve import resolve

    model = dataclasses.replace(
        speculators_config(config),
        dtype=resolved.info.dtype,
        trust_remote_code=config.model.trust_remote_code,
    )
    with naming_the_setting():
        try:
            info = resolve(model, config.load, resolved.platform)
        except UnsupportedModel:
            _refuse_head(model, resolved)
            raise
    if info.vocab_size != resolved.info.vocab_size:
        raise ConfigError(
            f"speculative_config.model = {speculative.model!r}: has a vocabulary of {info.vocab_size} "
            f"tokens: must be the model's, of {resolved.info.vocab_size}",
            field="speculative_config.model",
        )
    drafts = dataclasses.replace(config, model=model, lora=LoRAConfig())
    return resolved._replace(config=drafts, info=info)


def _refuse_head(model: ModelConfig, resolved: ResolvedConfig) -> None:
    """Refuse a head's checkpoint, naming the method that it is made for."""
    from headrace_models.speculators.found import find_head

    head = find_head(None, model, resolved.config.load, resolved.info)
    if head is not None:
        name = "speculative_config.method"
        raise ConfigError(
            f"{name} = {DRAFT_MODEL!r}: {model.model} is made for {head.method!r}: give that name",
            field=name,
        )


@contextmanager
def naming_the_setting() -> Iterator[None]:
    """A checkpoint that is not there is that of ``speculative_config.model``, says the error.

    Raises:
        ConfigError: in place of one that names no setting, or the served model's.
    """
    try:
        yield
    except ConfigError as error:
        if (error.field or "").startswith("speculative_config"):
            raise
        field = "speculative_config.model"
        raise ConfigError(f"{field}: {error}", field=field) from error


def speculators_config(config: EngineConfig) -> ModelConfig:
    """How the checkpoint of ``speculative_config.model`` is read."""
    speculative = config.speculative
    return ModelConfig(
        model=speculative.model,
        revision=speculative.revision,
        quantization=speculative.quantization,
        hf_token=config.model.hf_token,
        seed=config.model.seed,
    )
