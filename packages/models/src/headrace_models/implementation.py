"""Choice of the code that runs a checkpoint: a class of headrace's, or transformers' (``model.model_impl``).
Imports torch only if it is transformers'."""

from __future__ import annotations

import difflib
import logging
from collections.abc import Mapping
from importlib.util import find_spec
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core import plugins
from headrace_core.config import ModelConfig
from headrace_core.errors import MissingDependency, UnsupportedModel
from headrace_core.pooling import PoolingTraits
from headrace_models.architectures import served_by
from headrace_models.catalogue.multimodal import (
    REFUSED,
    WRAPPERS,
    nested_settings,
    text_architecture,
)
from headrace_models.generating import auto_processor_of
from headrace_models.pooling.traits import TRAITS
from headrace_models.transformers_backend import checkpoint_code, library
from headrace_models.transformers_backend.refusals import IMAGES_SERVED, MIXTURES

logger = logging.getLogger(__name__)

TRANSFORMERS = "transformers"
"""The :attr:`~headrace_core.model.ModelInfo.source` of models that transformers' code runs."""


class Implementation(NamedTuple):
    """The choice."""

    architecture: str
    """Entry of ``architectures`` that is served."""
    source: str
    """See :attr:`headrace_core.model.ModelInfo.source`."""


def choose_implementation(
    config: ModelConfig, whole: Mapping[str, Any], name: str, path: Path
) -> Implementation:
    """The user's choice; by itself a registered class, else transformers. A registered class of text alone
    gives way to transformers' where that takes the checkpoint's images.

    Args:
        whole: ``config.json`` with the user's overrides.
        name: of the model, for messages.
        path: the checkpoint's folder.

    Raises:
        UnsupportedModel: none serves it; lists what was found and the nearest registered names.
        ConfigError: it would be run by its own code, which the user does not trust.
        MissingDependency: transformers is asked for and not installed.
    """
    architectures = whole.get("architectures")
    found = _named(whole)
    known = plugins.installed("headrace.models")
    inner = _named(nested_settings(whole) or {})
    refused = next((a for a in (*found, *inner) if a in REFUSED and a not in known), None)
    if refused is not None:
        raise UnsupportedModel(f"model {name!r}: {refused} is not supported: {REFUSED[refused]}")
    own = next((a for a in found if served_by(text_architecture(a, whole), known)), None)
    if own is not None and config.model_impl == "auto" and _sees(config, own, whole, path):
        logger.info(
            "model_impl: auto -> transformers' code runs %s, with its images; --model-impl headrace serves "
            "its text by headrace's own class",
            own,
        )
        return Implementation(own, TRANSFORMERS)
    if own is not None and config.model_impl != TRANSFORMERS:
        return Implementation(own, source_of(text_architecture(own, whole)))
    if config.model_impl == "headrace":
        raise _unsupported(architectures, name, "model_impl = 'headrace' allows no other class")
    other = _offered(config, whole, found, name, architectures)
    if own is not None:  # the user asked for it
        logger.info("model_impl: %s is run by transformers' code", other)
    else:
        logger.warning(
            "headrace has no class of its own for %s: transformers' code runs it, over headrace's cache, "
            "scheduler and kernels. Its small steps are as fast as others if they are captured, which the "
            "log says below; if not, more runs in Python between the kernels",
            other,
        )
    return Implementation(other, TRANSFORMERS)


def _named(config: Mapping[str, Any]) -> list[str]:
    """Architectures that a config, or a part of one, names."""
    stated = config.get("architectures")
    return [a for a in stated if isinstance(a, str)] if isinstance(stated, list) else []


def _sees(config: ModelConfig, architecture: str, whole: Mapping[str, Any], path: Path) -> bool:
    """True if transformers' code takes a checkpoint's images, and headrace's own class does not."""
    wrapper = WRAPPERS.get(architecture)
    if wrapper is None or architecture not in IMAGES_SERVED or wrapper.tower_of(whole) is not None:
        return False
    pools = config.runner == "pooling" or (path / "modules.json").is_file()
    limits = config.limit_mm_per_prompt
    try:
        found = auto_processor_of(architecture, path, limits, pools=pools, is_told=False)
    except MissingDependency:
        return False
    hindered = _hindered(config, architecture, whole)
    if found and hindered:
        logger.info("%s: text only: %s", architecture, hindered)
    return bool(found) and not hindered


def _hindered(config: ModelConfig, architecture: str, whole: Mapping[str, Any]) -> str:
    """Why a checkpoint's own class stays, though transformers' code takes its images; "": nothing."""
    if IMAGES_SERVED[architecture] and find_spec("torchvision") is None:
        return "its images need pip install torchvision"
    if whole.get("quantization_config"):
        return "it is stored quantized; --model-impl transformers tries it with its images"
    if config.quantization and architecture in MIXTURES:
        return "its experts are to be quantized, which transformers' code cannot run"
    return ""


def _offered(
    config: ModelConfig,
    whole: Mapping[str, Any],
    found: list[str],
    name: str,
    architectures: object,
) -> str:
    """The architecture that transformers, or the checkpoint's own code, has a class for."""
    code = checkpoint_code.reference(whole, "AutoModel")
    try:
        offered = next((a for a in found if library.offers(a)), None)
    except MissingDependency as error:
        if config.model_impl == TRANSFORMERS:
            raise
        raise _unsupported(architectures, name, str(error)) from error
    if offered is not None:
        return offered
    if code is not None:
        if not config.trust_remote_code:
            raise checkpoint_code.refused(code)
        return found[0] if found else code.rpartition(".")[2]
    raise _unsupported(architectures, name, "transformers has no class of these names")


def _unsupported(architectures: object, name: str, why: str) -> UnsupportedModel:
    known = plugins.installed("headrace.models")
    near: list[str] = []
    for architecture in architectures if isinstance(architectures, list) else []:
        near += difflib.get_close_matches(str(architecture), known, n=5, cutoff=0.5)
    nearest = ", ".join(dict.fromkeys(near[:5])) or "none (`headrace models` lists all)"
    packages = sorted({plugin.distribution for plugin in known.values()})
    return UnsupportedModel(
        f"model {name!r}: config.json's architectures {architectures!r} are not supported. If the "
        "model has the shape of a supported one, say so with hf_overrides (--hf-overrides "
        f'\'{{"architectures": ["..."]}}\'). Nearest supported: {nearest}. '
        f"Packages with models here: {', '.join(packages) or 'none'}. General plug-ins that were run: "
        f"{', '.join(f'{p.name} ({p.distribution})' for p in plugins.run_general()) or 'none'}. {why}"
    )


def source_of(architecture: str) -> str:
    """Distribution whose class serves a registered architecture."""
    known = plugins.installed("headrace.models")
    distribution = known[served_by(architecture, known) or architecture].distribution
    own = distribution.split(" ")[0] == "headrace-models"
    return "native" if own else f"plugin:{distribution}"


def transformers_facts(config: ModelConfig, whole: Mapping[str, Any], path: Path) -> dict[str, Any]:
    """The language model's settings as transformers reads them, over what else the file says.

    Raises:
        UnsupportedModel, ConfigError: see :func:`.transformers_backend.library.read_config`.
    """
    read = library.read_config(whole, path, trusted=config.trust_remote_code)
    plain = {key: value for key, value in whole.items() if not isinstance(value, Mapping)}
    facts = {**plain, **library.facts(read)}
    for key in ("dtype", "torch_dtype", "quantization_config"):
        facts.pop(key, None)
        if whole.get(key) is not None:
            facts[key] = whole[key]
    return facts


def transformers_traits(
    config: ModelConfig, architecture: str, whole: Mapping[str, Any], path: Path
) -> PoolingTraits | None:
    """Traits of an encoder that pools by itself; None: it is no encoder, and has to be converted.

    Raises:
        UnsupportedModel: as headrace's own class it would pool in a way that transformers' does not.
    """
    traits = TRAITS.get(architecture)
    if traits is not None:
        if traits.tasks or traits.sparse:
            raise UnsupportedModel(
                f"{architecture} pools in a way of its own: model_impl must be auto or headrace"
            )
        return traits
    read = library.read_config(whole, path, trusted=config.trust_remote_code)
    if not library.is_encoder(read) or architecture.endswith(("ForCausalLM", "LMHeadModel")):
        return None
    segments = isinstance(getattr(read, "type_vocab_size", None), int)
    if architecture.endswith("ForTokenClassification"):
        return PoolingTraits("token_classify", "ALL", ("ALL", "STEP"), token_types=segments)
    if architecture.endswith("ForSequenceClassification"):
        return PoolingTraits("classify", "CLS", ("CLS",), token_types=segments)
    kinds = ("CLS", "MEAN", "LAST", "ALL")
    return PoolingTraits("embed", "CLS", kinds, token_types=segments)
