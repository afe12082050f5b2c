"""Rotary settings as written in config.json, old spelling or new. No torch.

Up to transformers 4 a config holds ``rope_theta`` and an optional ``rope_scaling``; from 5 on one
``rope_parameters``, which may hold one block per layer type. Of a config with both blocks ``rope_scaling``
counts, as in transformers (``RotaryEmbeddingConfigMixin.convert_rope_params_to_dict``); where that would
lose a setting of the other without a word, the config is refused.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.config.settings import Settings

logger = logging.getLogger(__name__)

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "ntk")
_ALIASES = {"su": "longrope", "mrope": "default", "xdrope": "dynamic"}
_AXES = (3, 4)
"""Time, height and width; of HunyuanOCR number, column, row and image."""
_SECTIONS = ("mrope_section", "xdrope_section")
_NEW, _OLD = "rope_parameters", "rope_scaling"
_BLOCKS = (_OLD, _NEW)
"""Names of the block, the one that is read first."""
_LAYER_TYPES = ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Settings that configs have in the block or beside it."""
_SCALES_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """Settings that turn positions into angles."""

    kind: str
    """One of :data:`KINDS`."""
    theta: float
    partial_rotary_factor: float
    """Share of a head's dimensions that turn."""
    original_max_position_embeddings: int
    """Context of the pre-training that the scaling starts from."""
    scaling: Mapping[str, Any]
    """The kind's own keys (``factor``, ``low_freq_factor``, ``long_factor``, ...)."""
    sections: tuple[int, ...] = ()
    """Numbers of frequencies that go by a token's position in time, height and width (Qwen2-VL,
    arXiv:2409.12191); empty: all go by one position."""
    interleaved_sections: bool = False
    """The axes take turns (Qwen3-VL), instead of one run of frequencies for each."""

    def number(self, name: str, default: float | None = None) -> float:
        """A key of ``scaling``.

        Raises:
            UnsupportedModel: absent without default, or no number above 0.
        """
        settings = Settings(self.scaling)
        return settings.positive(name) if default is None else settings.positive(name, default)


def rope_settings(
    config: Mapping[str, Any],
    layer_type: str | None = None,
    *,
    theta: float | None = None,
    partial: float = 1.0,
    max_positions: int | None = None,
) -> RopeSettings:
    """Read the settings of a config, or of one of its layer types.

    Args:
        theta: base if the config names none; default 10,000.
        partial: ``partial_rotary_factor`` if the config names none.
        max_positions: replaces ``max_position_embeddings``, if the config has another name for it.

    Raises:
        UnsupportedModel: the kind is unknown, a value is not a number, or two blocks contradict each
            other.
    """
    block = scaling_block(config, layer_type)
    own, whole = Settings(block), Settings(config)
    kind = _kind(block)
    limit = max_positions or whole.integer("max_position_embeddings", 2048)
    original = _original_context(config, block, limit)
    settings = RopeSettings(
        kind=kind,
        theta=own.positive("rope_theta", whole.positive("rope_theta", theta or 10_000.0)),
        partial_rotary_factor=own.positive(
            "partial_rotary_factor", whole.positive("partial_rotary_factor", partial)
        ),
        original_max_position_embeddings=original if kind in _SCALES_FROM_ORIGINAL else limit,
        scaling=block,
        sections=_sections(block),
        interleaved_sections=own.flag("mrope_interleaved", False),
    )
    _check_nothing_is_lost(config, settings)
    return settings


def _original_context(config: Mapping[str, Any], block: Mapping[str, Any], default: int) -> int:
    """Context of the pre-training; beside the block it wins, as Phi-3 writes both."""
    name = "original_max_position_embeddings"
    return Settings(config).integer(name, Settings(block).integer(name, default))


def _sections(block: Mapping[str, Any]) -> tuple[int, ...]:
    name = next((key for key in _SECTIONS if block.get(key) is not None), None)
    if name is None:
        return ()
    value = block[name]
    good = isinstance(value, list) and len(value) in _AXES
    if not good or not all(type(size) is int and 0 <= size < 2**16 for size in value):
        axes = " or ".join(map(str, _AXES))
        raise UnsupportedModel(
            f"config.json: {name} = {value!r:.200}: must be {axes} numbers of frequencies"
        )
    return tuple(value)


def _kind(block: Mapping[str, Any]) -> str:
    kind = block.get("rope_type") or block.get("type") or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise UnsupportedModel(
            f"config.json: rope_type = {kind!r}: must be one of {', '.join(KINDS)}"
        )
    return str(kind)


def scaling_block(config: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """``rope_scaling`` or ``rope_parameters``, of the layer type if it is kept by layer type.

    Raises:
        UnsupportedModel: it is not an object, of an unknown kind, or contradicted by the other.
    """
    block = _written(config)
    return _of_type(block, layer_type or "full_attention") if is_per_layer_type(block) else block


def _written(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The block that is read. The kinds of both are checked, so that a wrong one is always told."""
    new, old = (_checked(name, config.get(name)) for name in (_NEW, _OLD))
    if not (new and old):
        return old or new
    if not is_per_layer_type(new):
        return old
    full = _of_type(new, "full_attention")
    if old == new or (_kind(old) == _kind(full) and all(full.get(k) == old[k] for k in _own(old))):
        return new
    raise UnsupportedModel(
        f"config.json: {_OLD} = {_shown(old)} contradicts {_NEW}, which is by layer type and says "
        f"{_shown(full)} of full_attention: write the scaling into {_NEW} and remove {_OLD}"
    )


def _checked(name: str, block: object) -> Mapping[str, Any]:
    if not block:
        return {}
    if not isinstance(block, Mapping):
        raise UnsupportedModel(f"config.json: {name} = {_shown(block)}: must be an object")
    if not is_per_layer_type(block):
        _kind(block)
        return block
    for layer_type in block:
        if layer_type in _LAYER_TYPES:
            _kind(_of_type(block, layer_type))
    return block


def _of_type(block: Mapping[str, Any], layer_type: str) -> Mapping[str, Any]:
    found = block.get(layer_type) or {}
    if not isinstance(found, Mapping):
        raise UnsupportedModel(
            f"config.json: rope settings of {layer_type} are {_shown(found)}: must be an object"
        )
    return found


def _own(block: Mapping[str, Any]) -> list[str]:
    """Keys besides that of the kind, which has two names."""
    return [key for key in block if key not in ("rope_type", "type")]


def _shown(value: object) -> str:
    return f"{value!r:.200}"


def _check_nothing_is_lost(config: Mapping[str, Any], used: RopeSettings) -> None:
    """``rope_scaling`` takes the place of the whole other block, with what only that one says: a base of
    1,000,000 would become the family's default.

    Raises:
        UnsupportedModel: it says something else than what would be used.
    """
    new, old = config.get(_NEW), config.get(_OLD)
    if not (isinstance(new, Mapping) and isinstance(old, Mapping) and old):
        return
    scales = used.kind in _SCALES_FROM_ORIGINAL
    for name in _BESIDE if scales else _BESIDE[:-1]:
        lost, value = new.get(name), getattr(used, name.removeprefix("rope_"))
        if lost is None or lost == value or not old.get(name) == config.get(name) is None:
            continue
        raise UnsupportedModel(
            f"config.json: {_OLD} = {_shown(old)} takes the place of {_NEW} = {_shown(new)}, whose "
            f"{name} = {lost!r} would be lost ({value:g} would be used): write {name} into {_OLD}, or the "
            f"scaling into {_NEW} and remove {_OLD}"
        )


def announce_both(config: Mapping[str, Any]) -> None:
    """Warn of a config with two blocks that differ.

    Raises:
        UnsupportedModel: they contradict each other, or one is of an unknown kind.
    """
    used, other = _written(config), config.get(_NEW)
    if other and used is config.get(_OLD) and used != other:
        logger.warning(
            "config.json has both %s and %s: %s = %s counts, as in transformers; %s = %s does not",
            _OLD, _NEW, _OLD, _shown(used), _NEW, _shown(other),
        )  # fmt: skip


def respelled(overrides: Mapping[str, Any], config: Mapping[str, Any]) -> dict[str, Any]:
    """A user's overrides in a config's own spelling, so that merging them leaves nothing without
    effect: settings of the block that are given beside it, the block by its other name, its ``type``.

    Args:
        config: as the checkpoint says it; nested configs are followed.
    """
    found = dict(overrides)
    for key, value in overrides.items():
        inner = config.get(key)
        if key not in _BLOCKS and isinstance(value, Mapping) and isinstance(inner, Mapping):
            found[key] = respelled(value, inner)
    written = next((name for name in _BLOCKS if config.get(name)), None)
    block = config.get(written) if written is not None else None
    if written is None or not isinstance(block, Mapping) or is_per_layer_type(block):
        return found
    given = {}
    for name in reversed(_BLOCKS):
        if isinstance(found.get(name), Mapping):
            given.update(found.pop(name))
    if "type" in given and "rope_type" not in given:
        given["rope_type"] = given["type"]
    for name in _BESIDE:
        if found.get(name) is not None and block.get(name) is not None:
            given.setdefault(name, found[name])
    return {**found, written: given} if given else found


def is_per_layer_type(block: Mapping[str, Any]) -> bool:
    """True if the block holds one block per layer type."""
    return any(isinstance(block.get(kind), Mapping) for kind in _LAYER_TYPES)


def of_windows(config: Mapping[str, Any], theta: Any) -> Mapping[str, Any]:
    """The config as it is for layers with windows. In the old spelling, which has no settings by layer
    type, these have a base of their own, ``theta``, and never the full layers' scaling."""
    if is_per_layer_type(_written(config)):
        return config
    plain = {key: value for key, value in config.items() if not key.startswith("rope_")}
    return {**plain, "rope_theta": theta}


def by_rotary_dim(config: Mapping[str, Any], head_dim: int) -> Mapping[str, Any]:
    """The config with the share of a head that its ``rotary_dim``, a number of dimensions, comes to, if it
    has one and no share of its own.

    Raises:
        UnsupportedModel: it is not a number from 1 to the head's.
    """
    turning = config.get("rotary_dim")
    if turning is None or config.get("partial_rotary_factor") is not None:
        return config
    dims = Settings(config).integer("rotary_dim", maximum=head_dim)
    # Half a dimension more, as the product of share and size is rounded down.
    return {**config, "partial_rotary_factor": (dims + 0.5) / head_dim}


def scaled_context(config: Mapping[str, Any], max_positions: int) -> int:
    """Longest context of a model trained on ``max_positions``, given its rope scaling.

    ``linear`` and ``yarn`` multiply the original context; ``llama3`` and ``longrope`` configs
    already state the scaled one, as do configs by layer type (Gemma 3). ``dynamic`` keeps the
    trained context: beyond it the base would depend on the length of each request, which a cache
    of rotated keys cannot follow.
    """
    block = _written(config)
    if is_per_layer_type(block) or str(config.get("model_type", "")).startswith("gemma3"):
        return max_positions
    settings, kind = Settings(block), _kind(block)
    if kind == "linear":
        return _context(max_positions * settings.positive("factor"))
    if kind == "yarn":
        original = _original_context(config, block, max_positions)
        return max(max_positions, _context(original * settings.positive("factor", 1.0)))
    return max_positions


def _context(tokens: float) -> int:
    if not 1 <= tokens < 2**31:
        raise UnsupportedModel(f"config.json: rope scaling gives a context of {tokens:g} tokens")
    return int(tokens)
