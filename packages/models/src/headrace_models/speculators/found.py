"""What a head's checkpoint says of itself, before a weight is read. No torch."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any, NamedTuple

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import ConfigError
from headrace_core.model import ModelInfo
from headrace_models.config.json_object import read_object
from headrace_models.config.settings import Settings
from headrace_models.resolve import checkpoint_folder
from headrace_models.speculators.families import MTP_NAMES, mtp_of, num_mtp_layers

MTP = "mtp"
METHODS = ("eagle", "eagle3", "mlp_speculator", "medusa", MTP)
_MODEL = "speculative_config.model"
_METHOD = "speculative_config.method"


class HeadInfo(NamedTuple):
    """A head as found."""

    method: str
    """One of :data:`METHODS`."""
    path: Path
    """Local folder of its weights: the model's own, with ``mtp``."""
    config: Mapping[str, Any]
    """Its settings, flat."""
    num_guesses: int | None
    """Guesses that it is made for; None: it does not say."""


def method_of(config: Mapping[str, Any]) -> str | None:
    """The method that a checkpoint's ``config.json`` says it is for; None: it says none.

    Raises:
        ConfigError: it is for one that is not known.
    """
    packed, kind = config.get("speculators_model_type"), str(config.get("model_type"))
    if packed is not None:
        if packed not in METHODS:
            raise ConfigError(
                f"{_MODEL}: config.json: speculators_model_type = {packed!r}: must be eagle or eagle3",
                field=_MODEL,
            )
        return str(packed)
    if kind in METHODS:
        return kind
    listed = config.get("architectures")
    named = " ".join(map(str, listed)) if isinstance(listed, list) else ""
    if "Eagle3" in named or config.get("draft_vocab_size") is not None:
        return "eagle3"
    if "Eagle" in named:
        return "eagle"
    return "medusa" if config.get("medusa_num_heads") is not None else None


def stated(folder: Path) -> dict[str, Any]:
    """``config.json`` of a head's folder. Raises: UnsupportedModel."""
    return read_object(folder / "config.json", required=True)


def verifier_of(config: Mapping[str, Any], name: str) -> str:
    """The model that a packed head is for.

    Args:
        config: its ``config.json``.
        name: of the head, for messages.

    Raises:
        ConfigError: it does not say.
    """
    packed = config.get("speculators_config")
    verifier = packed.get("verifier") if isinstance(packed, Mapping) else None
    named = verifier.get("name_or_path") if isinstance(verifier, Mapping) else None
    if not named or not isinstance(named, str):
        raise ConfigError(
            f"model.model = {name!r}: is a head, whose config.json names no speculators_config.verifier: "
            "give the model, and the head as speculative_config.model",
            field="model.model",
        )
    return named


def find_head(
    wanted: str | None, config: ModelConfig, load: LoadConfig, target: ModelInfo
) -> HeadInfo | None:
    """The head that a checkpoint holds.

    Args:
        wanted: the method that the user names; None: whatever it is for.
        config: of the head's checkpoint, of the model's with ``mtp``.
        target: the model that it is to guess for.

    Returns:
        None if no method is named, and the checkpoint is of none: it is a model.

    Raises:
        ConfigError: it cannot be found, is for another method, or does not fit the model.
    """
    if wanted in MTP_NAMES:
        return _within(str(wanted), target)
    path = checkpoint_folder(config, load)
    whole = stated(path)
    said = method_of(whole)
    method = wanted or said
    if method is None:
        return None
    if said not in (None, method):
        raise ConfigError(
            f"{_METHOD} = {method!r}: {config.model} is made for {said!r}: give that name",
            field=_METHOD,
        )
    flat = _flat(whole)
    _check_fit(str(config.model), method, flat, target)
    return HeadInfo(method, path, flat, _num_guesses(method, whole, flat))


def _within(name: str, target: ModelInfo) -> HeadInfo:
    """The head in a model's own checkpoint."""
    family = mtp_of(name, target.architecture)
    key, number = num_mtp_layers(family, target.config)
    if isinstance(number, bool) or not isinstance(number, int) or number < 1:
        raise ConfigError(
            f"{_METHOD} = {name!r}: {target.name} has no layers for it: {key} = "
            f"{number!r} in its config.json must be at least 1",
            field=_METHOD,
        )
    return HeadInfo(MTP, target.path, {**target.config, "mtp_family": family}, number)


def _flat(whole: Mapping[str, Any]) -> dict[str, Any]:
    """The settings of a head, with those of its layer."""
    inner = whole.get("transformer_layer_config")
    outer = {k: v for k, v in whole.items() if not isinstance(v, Mapping) or k.startswith("rope")}
    flat = {**outer, **(inner if isinstance(inner, Mapping) else {})}
    if isinstance(whole.get("eagle_config"), Mapping):
        flat |= whole["eagle_config"]
    for key in ("vocab_size", "hidden_size"):  # what a packing says outside counts, if it says it
        if whole.get(key) is not None:
            flat[key] = whole[key]
    return flat


def _check_fit(name: str, method: str, config: Mapping[str, Any], target: ModelInfo) -> None:
    """Raises: ConfigError: another width or vocabulary than the model's."""
    settings = Settings(config)
    width_key = "emb_dim" if method == "mlp_speculator" else "hidden_size"
    width = settings.optional_integer(width_key)
    if method == "eagle3":
        width = settings.optional_integer("target_hidden_size") or width
    of_model = Settings(target.config, {"hidden_size": ("n_embd", "d_model")})
    hidden = of_model.optional_integer("hidden_size")
    if None not in (width, hidden) and width != hidden:
        raise ConfigError(
            f"{_MODEL} = {name!r}: reads states {width} wide ({width_key}): must be the model's width, "
            f"{hidden}",
            field=_MODEL,
        )
    vocab = settings.optional_integer("vocab_size")
    if vocab is not None and vocab != target.vocab_size:
        raise ConfigError(
            f"{_MODEL} = {name!r}: has a vocabulary of {vocab} tokens: must be the model's, of "
            f"{target.vocab_size}",
            field=_MODEL,
        )


def _num_guesses(method: str, whole: Mapping[str, Any], flat: Mapping[str, Any]) -> int | None:
    if method == "mlp_speculator":
        return Settings(flat).integer("n_predict")
    if method == "medusa":
        key = "num_heads" if flat.get("num_heads") is not None else "medusa_num_heads"
        return Settings(flat).integer(key)
    packed = whole.get("speculators_config")
    proposals = packed.get("proposal_methods") if isinstance(packed, Mapping) else None
    for proposal in proposals if isinstance(proposals, list) else ():
        if isinstance(proposal, Mapping) and proposal.get("speculative_tokens") is not None:
            return Settings(proposal).integer("speculative_tokens")
    return None
