"""Rotary settings as written in config.json, old spelling or new. No torch.

Up to transformers 4 a config holds ``rope_theta`` and an optional ``rope_scaling``; from 5 on one
``rope_parameters``, which may hold one block per layer type.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from headrace_core.errors import UnsupportedModel
from headrace_models.settings import Settings

KINDS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope", "proportional", "ntk")
_ALIASES = {"su": "longrope", "mrope": "default"}
_AXES = 3
"""Time, height and width."""
_BLOCKS = ("rope_parameters", "rope_scaling")
"""Names of the block, the one that is read first."""
_BESIDE = ("rope_theta", "partial_rotary_factor", "original_max_position_embeddings")
"""Settings that configs have in the block or beside it."""
_SCALES_FROM_ORIGINAL = ("llama3", "yarn", "longrope")


@dataclass(frozen=True, slots=True)
class RopeSettings:
    """How positions turn into angles."""

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
    """How many of the frequencies go by a token's position in time, height and width (Qwen2-VL,
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
        UnsupportedModel: an unknown kind, or a value that is no number.
    """
    block = scaling_block(config, layer_type)
    own, whole = Settings(block), Settings(config)
    kind = block.get("rope_type") or block.get("type") or "default"
    kind = _ALIASES.get(kind, kind) if isinstance(kind, str) else kind
    if kind not in KINDS:
        raise UnsupportedModel(
            f"config.json: rope_type = {kind!r}: must be one of {', '.join(KINDS)}"
        )
    limit = max_positions or whole.integer("max_position_embeddings", 2048)
    original = whole.integer(  # beside the block it wins: Phi-3 writes both
        "original_max_position_embeddings",
        own.integer("original_max_position_embeddings", limit),
    )
    return RopeSettings(
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


def _sections(block: Mapping[str, Any]) -> tuple[int, ...]:
    value = block.get("mrope_section")
    if value is None:
        return ()
    good = isinstance(value, list) and len(value) == _AXES
    if not good or not all(type(size) is int and 0 <= size < 2**16 for size in value):
        raise UnsupportedModel(
            f"config.json: mrope_section = {value!r:.200}: must be {_AXES} numbers of frequencies"
        )
    return tuple(value)


def scaling_block(config: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """``rope_parameters`` or ``rope_scaling``, of the layer type if it is kept by layer type."""
    block = _written(config)
    if is_per_layer_type(block):
        block = block.get(layer_type or "full_attention") or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModel(f"config.json: rope settings are {block!r}: must be an object")
    return block


def _written(config: Mapping[str, Any]) -> Mapping[str, Any]:
    block = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if not isinstance(block, Mapping):
        raise UnsupportedModel(f"config.json: rope settings are {block!r}: must be an object")
    return block


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
    """Whether the block holds one block per layer type."""
    return any(
        isinstance(block.get(kind), Mapping)
        for kind in ("full_attention", "sliding_attention", "hybrid", "hybrid_sliding")
    )


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
    if is_per_layer_type(_written(config)) or str(config.get("model_type", "")).startswith(
        "gemma3"
    ):
        return max_positions
    rope = rope_settings(config, max_positions=max_positions)
    if rope.kind == "linear":
        return _context(max_positions * rope.number("factor"))
    if rope.kind == "yarn":
        scaled = rope.original_max_position_embeddings * rope.number("factor", 1.0)
        return max(max_positions, _context(scaled))
    return max_positions


def _context(tokens: float) -> int:
    if not 1 <= tokens < 2**31:
        raise UnsupportedModel(f"config.json: rope scaling gives a context of {tokens:g} tokens")
    return int(tokens)
