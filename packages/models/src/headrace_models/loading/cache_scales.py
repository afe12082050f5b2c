"""Scales of the key-value cache that stand in a checkpoint, beside the attention layers' weights.

A stored x of an 8-bit float stands for ``x * scale``. llm-compressor, AutoFP8, ModelOpt and Quark write one
number for a layer's keys and one for its values, or one for each head, under several names.
"""

from __future__ import annotations

import dataclasses
import logging
import re
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch

from headrace_core.errors import WeightsError
from headrace_core.kv import ROW_SCALED_BITS, MLASpec
from headrace_core.model import AttentionLayer

if TYPE_CHECKING:
    from torch import Tensor

logger = logging.getLogger(__name__)

_NAME = re.compile(
    r"(?P<layer>.+?)(?:\.attn)?\."
    r"(?:(?P<own>[kv]|kv)_scale|(?P<proj>[kv])_proj\.(?:(?P<twice>[kv])_scale|output_scale))"
)
"""``self_attn.k_scale``, ``self_attn.attn.k_scale``, ``self_attn.k_proj.k_scale``,
``self_attn.k_proj.output_scale``; ``self_attn.kv_scale`` is both."""
_OF_QUERIES = re.compile(
    r"(?P<layer>.+?)(?:\.attn)?\.(?:(?:q|prob)_scale|q_proj\.(?:q_scale|output_scale)|prob_output_scale)"
)
"""The same of queries and of attention's probabilities, which stay as they are here."""
_FLOATS = ("fp8", "fp8_e4m3", "fp8_e5m2")
"""Cache dtypes that the scales are made for."""


class CacheScales:
    """The scales of a model's layers, as they come.

    Args:
        layers: the model's, by name; their ``spec`` gets the scales.
        kv_cache_dtype: other caches than of 8-bit floats leave the scales out.
    """

    def __init__(self, layers: Mapping[str, AttentionLayer], kv_cache_dtype: str) -> None:
        self._layers = layers
        self._is_used = kv_cache_dtype in _FLOATS
        self._dtype = kv_cache_dtype
        self.found: set[str] = set()
        """Names of the layers that got a scale."""
        self._unused: set[str] = set()

    def take(self, name: str, tensor: Tensor, file: Path) -> bool:
        """True if the tensor is a scale of a layer, which then has it if its cache is made for it, or one of
        its queries or probabilities, which is passed over.

        Raises:
            WeightsError: it is no scale: not positive, not finite, or of another number of heads.
        """
        of_queries = _OF_QUERIES.fullmatch(name)
        if of_queries is not None and of_queries["layer"] in self._layers:
            return True
        match = _NAME.fullmatch(name)
        layer = None if match is None else self._layers.get(match["layer"])
        if match is None or layer is None or match["proj"] != (match["twice"] or match["proj"]):
            return False
        if layer.kv_spec is None or not self._is_used:
            self._unused.add(match["layer"])
            return True
        scale = self._scale(name, tensor, layer.spec.num_kv_heads, file)
        which = match["own"] or match["proj"]
        names = ("k_scale", "v_scale") if which == "kv" else (f"{which}_scale",)
        scales: Any = dict.fromkeys(names, scale)
        layer.spec = dataclasses.replace(layer.spec, **scales)
        self.found.add(match["layer"])
        return True

    def report(self) -> None:
        """Log how many layers have the checkpoint's scales, and which have only some or none; or that none
        has as rows find their own."""
        if self.found:
            logger.info("%d layers have cache scales of the checkpoint", len(self.found))
            self._warn_of_missing()
        if self._unused and self._dtype in ROW_SCALED_BITS:
            logger.warning(
                "cache scales of %d layers in the checkpoint are not used: with cache.kv_cache_dtype = "
                "%r each token and head has a scale of its own", len(self._unused), self._dtype,
            )  # fmt: skip

    def _warn_of_missing(self) -> None:
        cached = {name: layer for name, layer in self._layers.items() if layer.kv_spec is not None}
        missing = [
            name
            for name, layer in cached.items()
            if layer.spec.k_scale is None
            or (layer.spec.v_scale is None and not isinstance(layer.kv_spec, MLASpec))
        ]
        if missing:
            logger.warning(
                "cache scales of %d of %d layers are missing from the checkpoint, which has those of others: "
                "1 is used in their place (%s)", len(missing), len(cached), ", ".join(missing[:3]),
            )  # fmt: skip

    @staticmethod
    def _scale(name: str, tensor: Tensor, heads: int, file: Path) -> Tensor:
        """[heads] float32."""
        if tensor.numel() not in (1, heads) or not tensor.is_floating_point():
            raise WeightsError(
                f"{file}: tensor {name!r} is {str(tensor.dtype).removeprefix('torch.')} "
                f"{list(tensor.shape)}: a scale of the cache is one float, or one for each of this rank's "
                f"{heads} heads"
            )
        scale = tensor.detach().to(torch.float32).reshape(-1)
        if not bool((scale.isfinite() & (scale > 0)).all()):
            raise WeightsError(
                f"{file}: tensor {name!r}: a scale of the cache must be a number above 0"
            )
        return scale.expand(heads).clone()
