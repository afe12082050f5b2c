"""The head that guesses tokens by the hidden states of the model that is served."""

from __future__ import annotations

import contextlib
import dataclasses
import logging
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from headrace.assembly.drafts.model import naming_the_setting, speculators_config
from headrace_core.errors import ConfigError, UnsupportedFeature, UnsupportedModel
from headrace_engine.speculation.config import DRAFT_MODEL, HEADS, WITHIN

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.model import CausalLM, ModelInfo
    from headrace_core.ops import OpTable
    from headrace_engine.config import EngineConfig
    from headrace_engine.speculation.draft_head import BuildHead, DraftHead
    from headrace_engine.weights.update_set import LoadedModel
    from headrace_models.speculators.found import HeadInfo

logger = logging.getLogger(__name__)


def with_verifier(config: EngineConfig) -> EngineConfig:
    """The configuration whose model is a folder of a head that is packed with its model's name
    (``speculators``): of that model, with the head. Any other as it is. Reads JSON only.

    Raises:
        ConfigError: the head does not say for which model it is.
    """
    folder = Path(str(config.model.model)).expanduser()
    if not (folder / "config.json").is_file():
        return config
    from headrace_models.speculators.found import stated, verifier_of

    try:
        whole = stated(folder)
    except UnsupportedModel:
        return config  # which whoever reads it as a model's says better
    if whole.get("speculators_model_type") is None:
        return config
    verifier = verifier_of(whole, str(folder))
    logger.info("%s is a head: its model, %s, is served with it", folder, verifier)
    names = config.model.served_model_name or (str(config.model.model),)
    speculative = dataclasses.replace(config.speculative, model=str(folder))
    return dataclasses.replace(
        config,
        model=dataclasses.replace(config.model, model=verifier, served_model_name=names),
        speculative=speculative,
    )


def with_head(config: EngineConfig, info: ModelInfo) -> EngineConfig:
    """The configuration with method and number of guesses of the head that guesses; as it is without one.
    Reads JSON only.

    Raises:
        ConfigError: the head cannot be found, is for another method or model, or does not say how many
            tokens it guesses.
        UnsupportedFeature: heads cannot guess for the model.
    """
    found, speculative = _find(config, info), config.speculative
    if found is None and (speculative.method is not None or speculative.model is None):
        return config
    method = DRAFT_MODEL if found is None else found.method
    count = speculative.num_speculative_tokens
    if count is None:
        count = None if found is None else found.num_guesses
    if count is None:
        name = "speculative_config.num_speculative_tokens"
        raise ConfigError(
            f"{name} = None: must be a number with method = {method!r}, whose checkpoint names none",
            field=name,
        )
    chosen = dataclasses.replace(speculative, method=method, num_speculative_tokens=count)
    return dataclasses.replace(config, speculative=chosen)


def _find(config: EngineConfig, info: ModelInfo) -> HeadInfo | None:
    """The head of a configuration; None: a smaller model guesses, a proposer, or nobody."""
    speculative = config.speculative
    method, within = speculative.method, speculative.method in WITHIN
    if not within and (speculative.model is None or method not in (None, *HEADS)):
        return None
    from headrace_models.speculators.found import find_head

    model = config.model if within else speculators_config(config)
    with contextlib.nullcontext() if within else naming_the_setting():
        found = find_head(method, model, config.load, info)
    if found is not None and (info.source == "transformers" or info.is_encoder_decoder):
        raise UnsupportedFeature(
            f"speculative_config.method = {found.method!r}: {info.architecture}: heads guess for decoders "
            "that headrace runs by its own classes only",
            param="speculative_config",
        )
    return found


def has_head(config: EngineConfig, info: ModelInfo) -> bool:
    """True if a head guesses by the model's hidden states. Reads JSON only."""
    return _find(config, info) is not None


def is_within(config: EngineConfig) -> bool:
    """True if what guesses is layers of the model's own checkpoint."""
    return config.speculative.method in WITHIN


def head_builder(
    resolved: ResolvedConfig, ops: OpTable, tell: Callable[[LoadedModel], None]
) -> BuildHead | None:
    """Builds and loads the head for a model; None: there is none.

    Args:
        tell: is told how a head was loaded, unless the call names another.
    """
    config, info = resolved.config, resolved.info
    found = _find(config, info)
    if found is None:
        return None
    from headrace.assembly.worker.context import backend_chooser, build_context
    from headrace.assembly.worker.model import cut_files_raise
    from headrace_models.loading.update import LoadRecord
    from headrace_models.speculators.load import load_head

    own: dict[str, Any] = {} if found.path == info.path else {"path": found.path}
    about = dataclasses.replace(info, config=found.config, whole_config=found.config, **own)
    load, model = config.load, config.model
    if own:
        model = dataclasses.replace(
            config.model,
            quantization=config.speculative.quantization,
            quantization_overrides={},
        )
        if load.load_format.lower() != "dummy":
            load = dataclasses.replace(load, load_format="auto")
    asked = resolved._replace(info=about, config=dataclasses.replace(config, model=model))

    def build(
        target: CausalLM, path: str | None, told: Callable[[LoadedModel], None] | None = None
    ) -> DraftHead:
        choose, here, of = backend_chooser(asked, ops), found, about
        if path is not None and not own:  # the head comes with the model
            here = found._replace(path=Path(path))
            of = dataclasses.replace(about, path=here.path)
        context, record = build_context(asked, ops, choose), LoadRecord()
        with cut_files_raise():
            head = load_head(here, of, context, target, load=load, seed=model.seed, record=record)
        choose.check_used()
        (told or tell)(record)
        return head

    return build
