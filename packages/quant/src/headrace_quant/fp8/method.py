"""``fp8``: weights in 8-bit floats (E4M3) with a scale for each block, or one for each tensor.

``weight`` float8_e4m3fn [N, K] and ``weight_scale_inv`` [ceil(N / n), ceil(K / k)], whose numbers multiply
the blocks of n rows and k columns (``weight_block_size``; DeepSeek-AI 2024, arXiv:2412.19437, section 3.3);
without blocks one number: ``weight_scale_inv``, ``weight_scale``, or Mistral's ``qscale_weight``.

Linear layers stay packed (:mod:`headrace_quant.fp8.layers`); what else is in FP8 becomes floats of the
activations' dtype before it is divided. Which layers are quantized is read off the tensors: one in FP8 must
have its scale, one in floats is as it is. Activations whose scheme is ``dynamic`` are ``fp8``
(:data:`headrace_core.ops.QUANT_ACTIVATIONS`): with one scale for a token, where DeepSeek has one for each 128
of its inputs. Others stay floats, and stored scales of theirs are not needed.

Without a checkpoint made for it, every linear layer but the head is rounded to E4M3 while it is loaded,
with a scale for each output: its largest magnitude over 448.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, ClassVar

import torch

from headrace_core.errors import ConfigError, WeightsError
from headrace_core.linear import LinearMethod, LinearSpec, QuantMethod, QuantNeed
from headrace_core.ops import OpTable
from headrace_quant.config_checks import listed_names, refusal
from headrace_quant.fp8.layers import Fp8Layers
from headrace_quant.fp8.tensors import Fp8Layout, StoredTensor, decode_fp8
from headrace_quant.ignored_layers import module_names
from headrace_quant.none import PlainWeight
from headrace_quant.parted import method_by_name
from headrace_quant.rounded_floats import FP8 as BOOK
from headrace_quant.rounded_floats import RoundedFloats

if TYPE_CHECKING:
    from torch import Tensor

HEAD = "lm_head"
_SERVED: Mapping[str, tuple[object, ...]] = {
    "quant_method": ("fp8",),
    "fmt": ("e4m3", "float8_e4m3fn"),
    "activation_scheme": ("dynamic", "static"),
    "scale_fmt": ("float", "ue8m0"),
    "expert_dtype": ("fp8",),
    "dequantize": (False, True),
    "is_checkpoint_fp8_serialized": (True,),
    "modules_to_convert": ([],),
    "kv_cache_scheme": ("static",),
}
"""Key -> values that are served; null is served everywhere."""
_LISTS = ("modules_to_not_convert", "ignored_layers")
_BLOCK = "weight_block_size"


class Fp8(QuantMethod):
    """Weights in 8-bit floats with a scale for each block or tensor.

    Args:
        block: rows and columns that share a scale; None: a tensor has one.
        has_activation_scales: pass over the scales of activations.
        activations: form of the stored layers' activations.
        ignore: entries of layers that the checkpoint says it left alone.
        stored: the checkpoint holds FP8; else its weights are floats.
    """

    name: ClassVar[str] = "fp8"

    def __init__(
        self,
        ops: OpTable,
        block: tuple[int, int] | None,
        *,
        has_activation_scales: bool = False,
        activations: str = "float",
        ignore: Sequence[str] = (),
        stored: bool = True,
    ) -> None:
        self.ops, self.stored = ops, stored
        self.layers = Fp8Layers(ops, may_be_floats=True)
        self.layout = Fp8Layout(block, has_activation_scales, activations)
        self.ignore = {entry: _pattern(entry) for entry in ignore}

    @classmethod
    def from_config(cls, config: Mapping[str, Any] | None, ops: OpTable) -> Fp8:
        if config is None:
            return cls(ops, None, stored=False)
        for key, value in config.items():
            if key not in (*_SERVED, *_LISTS, _BLOCK) and value is not None:
                raise refusal(key, value, "absent: fp8 has no such key")
        for key, served in _SERVED.items():
            value = config.get(key)
            if not any(value == one and type(value) is type(one) for one in (None, *served)):
                raise refusal(key, value, " or ".join(map(repr, served)))
        return cls(
            ops,
            _block(config.get(_BLOCK)),
            has_activation_scales=config.get("activation_scheme") == "static",
            activations="fp8" if config.get("activation_scheme") == "dynamic" else "float",
            ignore=[entry for key in _LISTS for entry in listed_names(key, config.get(key) or [])],
        )

    @classmethod
    def refuse(cls, need: QuantNeed) -> list[str]:
        return []

    def for_layer(self, spec: LinearSpec) -> LinearMethod:
        if spec.name.rpartition(".")[2] == HEAD:
            return PlainWeight(self.ops)
        if not self.stored:
            return RoundedFloats(self.ops, BOOK)
        names = module_names(spec)
        ours = [name for name in names if self._entry_of(name) is None]

        def make(is_left: bool) -> LinearMethod:
            if is_left:
                return PlainWeight(self.ops)
            return self.layers.method(spec, ours if len(ours) < len(names) else None, self.layout)

        return method_by_name(spec, lambda name: self._entry_of(name) is not None, make)

    def _entry_of(self, module: str) -> str | None:
        """The entry that says that the module was left alone."""
        for entry, pattern in self.ignore.items():
            if pattern.match(module) or module.endswith(entry):
                return entry
        return None

    def decode(
        self,
        tensors: Iterable[tuple[str, Tensor, Path]],
        dtype: str,
        passes_over: Callable[[str], bool],
    ) -> Iterator[tuple[str, Tensor, Path]]:
        """See :meth:`headrace_core.linear.QuantMethod.decode`."""
        if not self.stored:
            return iter(tensors)
        found = decode_fp8(
            tensors,
            getattr(torch, dtype),
            lambda _: self.layout,
            passes_over=passes_over,
            check=self._check_is_meant,
            keep=self.layers.kept,
        )
        return self.layers.with_stand_ins(found)

    def _check_is_meant(self, weight: StoredTensor) -> None:
        """Raises: WeightsError: the checkpoint says that the layer was left alone."""
        module = weight.name.rpartition(".")[0]
        if (entry := self._entry_of(module)) is not None:
            raise WeightsError(
                f"{weight.file}: tensor {weight.name!r} is in FP8, but quantization_config says by "
                f"{entry!r} that it was not converted"
            )


def _pattern(entry: str) -> re.Pattern[str]:
    """A name, or the beginning of one up to a dot, in which ``.`` and ``*`` may mean what they do in
    patterns; that it may also be the end of a name is seen to where it is asked."""
    try:
        return re.compile(rf"(?:{entry})(?:(?<=\.)|(?=\.|$))")
    except re.error as error:
        raise ConfigError(f"quantization_config: {entry!r} is not a pattern: {error}") from error


def _block(value: object) -> tuple[int, int] | None:
    if value is None:
        return None
    if isinstance(value, list) and len(value) == 2:
        rows, columns = value
        if type(rows) is int and type(columns) is int and min(value) > 0:
            return rows, columns
    raise refusal(_BLOCK, value, "a list of two sizes, or null")
