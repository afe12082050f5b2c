"""A disaggregated encoder: the connector that a configuration names, and what the role asks of the rest."""

from __future__ import annotations

import importlib
import logging
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from headrace.assembly.served import hidden_size
from headrace_core import plugins
from headrace_core.errors import ConfigError, PluginError
from headrace_core.multimodal import ECConnector
from headrace_engine.encoder.settings import FIELD

if TYPE_CHECKING:
    from headrace.assembly.resolved import ResolvedConfig
    from headrace_core.model import ModelInfo
    from headrace_engine.config import EngineConfig
    from headrace_engine.encoder.transfer import EncoderTransfer

logger = logging.getLogger(__name__)

GROUP = "headrace.ec_connectors"


def check_ec_role(config: EngineConfig, info: ModelInfo) -> None:
    """Raises: ConfigError: the model has no towers whose vectors could travel, or does more."""
    stated = config.multimodal.ec_transfer_config
    if not stated:
        return
    role = stated["ec_role"]
    reason = ""
    if not info.processor or not info.has_towers:
        reason = "takes no media, or none that need a tower"
    elif info.is_encoder_decoder:
        reason = "has an encoder of its own, whose states do not travel"
    elif config.multimodal.only_encodes and info.runner != "generate":
        reason = f"runs as a {info.runner} model"
    if reason:
        raise ConfigError(
            f"{FIELD}.ec_role = {role!r}: must be left out for {info.architecture}, which {reason}",
            field=f"{FIELD}.ec_role",
        )


def transfer_maker(resolved: ResolvedConfig) -> Callable[[], EncoderTransfer] | None:
    """A factory of the worker's end; None: the engine takes part in no transfer."""
    config, info = resolved.config, resolved.info
    if not config.multimodal.ec_transfer_config:
        return None

    def make() -> EncoderTransfer:
        from headrace_engine.encoder.transfer import EncoderTransfer, model_name

        stated = config.multimodal.ec_transfer_config
        logger.info(
            "disaggregated encoder: %s %s by %s", stated["ec_role"], stated.get("engine_id", ""),
            stated["ec_connector"],
        )  # fmt: skip
        return EncoderTransfer(
            connector_of(config.multimodal.ec_transfer_config),
            is_producer=config.multimodal.only_encodes,
            model=model_name(info.whole_config, info.dtype, info.weight_bytes),
            dtype=info.dtype,
            hidden_size=hidden_size(info, FIELD),
            device=resolved.platform.device,
        )

    return make


def connector_of(settings: Any) -> ECConnector:
    """The connector of checked settings.

    Raises:
        PluginNotFound, PluginLoadError: it is not installed, or cannot be imported.
        PluginError: a module that is named has no such class.
        ConfigError: the connector refuses the settings.
    """
    name, path = settings["ec_connector"], settings.get("ec_connector_module_path")
    found = plugins.load(GROUP, name) if path is None else _from_module(path, name)
    if not isinstance(found, type) or not issubclass(found, ECConnector):
        raise PluginError(f"{FIELD}.ec_connector = {name!r}: must be a subclass of ECConnector")
    return found(settings)


def _from_module(path: str, name: str) -> object:
    try:
        return getattr(importlib.import_module(path), name)
    except (ImportError, AttributeError) as error:
        raise PluginError(
            f"{FIELD}.ec_connector_module_path = {path!r}: must be a Python module that has the class "
            f"{name}: {error}"
        ) from error
