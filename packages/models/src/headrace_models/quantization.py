"""Choice of the quantization method of a checkpoint."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from headrace_core import plugins
from headrace_core.errors import ConfigError, UnsupportedModel
from headrace_core.linear import QuantMethod, QuantNeed
from headrace_core.model import ModelInfo
from headrace_core.ops import OpTable
from headrace_models.activation_forms import ActivationForms, forms_for
from headrace_models.layer_overrides import LayerOverrides

GROUP = "headrace.quantization"
PLAIN = "none"
BLOCKS = "gguf"
"""Method of GGUF files, whose blocks may also be made floats, and these be rounded by another method."""


def quantization_config(info: ModelInfo) -> Mapping[str, Any] | None:
    """The checkpoint's block, None if its weights are plain.

    Raises:
        UnsupportedModel: the block is no object or names no method.
    """
    block = info.config.get("quantization_config") or info.config.get("compression_config")
    if not block:
        return None
    if not isinstance(block, Mapping) or not isinstance(block.get("quant_method"), str):
        raise UnsupportedModel(
            f"model {info.name!r}: config.json: quantization_config = {block!r}: must be an object "
            "with a quant_method"
        )
    return block


def quant_method_name(info: ModelInfo, wanted: str | None) -> str:
    """Name of the method: what the checkpoint says, which the user's choice must equal or be another name
    of (or, of a GGUF file, take its floats: the method itself refuses others); else the user's choice; else
    ``none``. The choice may be a name for a part of what the format has (``modelopt_fp4``): it is then the
    method, which refuses the rest.

    Raises:
        ConfigError: the two differ; names both.
    """
    block = quantization_config(info)
    if block is None:
        return wanted or PLAIN
    stored = str(block["quant_method"])
    if wanted is not None and _is_part(wanted, stored):
        return wanted
    if wanted not in (None, stored) and stored != BLOCKS and not _is_same(wanted, stored):
        raise ConfigError(
            f"model.quantization = {wanted!r}: the checkpoint {info.name!r} is quantized with "
            f"{stored!r}; leave the setting out or give that name",
            field="model.quantization",
        )
    return stored


def _is_same(wanted: str | None, stored: str) -> bool:
    """True if both names lead to one class: names that other engines have for one format's kernels
    (``gptq_marlin``); or if the checkpoint's is a name for a part of the other's format."""
    if wanted is None or not _are_installed(wanted, stored):
        return False
    return plugins.load(GROUP, wanted) is plugins.load(GROUP, stored) or _is_part(stored, wanted)


def _is_part(name: str, whole: str) -> bool:
    """True if a name's method is a subclass of another's that reads the same checkpoints."""
    if not _are_installed(name, whole):
        return False
    part, of = plugins.load(GROUP, name), plugins.load(GROUP, whole)
    return part is not of and issubclass(part, of)


def _are_installed(*names: str) -> bool:
    return plugins.installed(GROUP).keys() >= set(names)


def quant_method(
    info: ModelInfo,
    wanted: str | None,
    ops: OpTable,
    *,
    device: str,
    device_capability: tuple[int, int] | None = None,
    overrides: Mapping[str, str] | None = None,
    activations: str = "auto",
) -> QuantMethod:
    """The method itself, from the plug-ins of the group ``headrace.quantization``.

    Args:
        overrides: see ``model.quantization_overrides``.
        activations: see ``model.quantization_activations``.

    Raises:
        ConfigError: see :func:`quant_method_name`; or the method refuses device, dtype or block; or there are
            overrides for a checkpoint that is quantized already; or the device has no such activations.
        PluginNotFound: no such method is installed.
    """
    need = QuantNeed(dtype=info.dtype, device=device, device_capability=device_capability)
    forms = forms_for(need, activations)
    if forms:
        ops = replace(ops, quant_linear=ActivationForms(ops.quant_linear, forms))
    if overrides:
        return _with_overrides(info, wanted, ops, device, device_capability, overrides)
    name = quant_method_name(info, wanted)
    method: type[QuantMethod] = plugins.load(GROUP, name)
    reasons = method.refuse(need)
    if reasons:
        raise ConfigError(
            f"quantization {name!r} cannot serve {need}: {'; '.join(reasons)}",
            field="model.quantization",
        )
    block = quantization_config(info)
    if block is not None and name == BLOCKS and wanted not in (None, name):
        block = {**block, "requantize": wanted}
    return method.from_config(block, ops)


def _with_overrides(
    info: ModelInfo,
    wanted: str | None,
    ops: OpTable,
    device: str,
    device_capability: tuple[int, int] | None,
    overrides: Mapping[str, str],
) -> QuantMethod:
    block = quantization_config(info)
    if block is not None:
        raise ConfigError(
            f"model.quantization_overrides: the checkpoint {info.name!r} is quantized with "
            f"{block['quant_method']!r} already; overrides are for methods that round while loading",
            field="model.quantization_overrides",
        )
    whole = quant_method(info, wanted, ops, device=device, device_capability=device_capability)
    methods: dict[str, QuantMethod] = {wanted or PLAIN: whole}
    for entry, name in overrides.items():
        if name in methods:
            continue
        try:
            methods[name] = quant_method(
                info, name, ops, device=device, device_capability=device_capability
            )
        except ConfigError as error:
            raise ConfigError(
                f"model.quantization_overrides: {entry!r}: {error}",
                field="model.quantization_overrides",
            ) from error
    return LayerOverrides(whole, [(entry, methods[name]) for entry, name in overrides.items()])
