"""Building a model and filling it from its checkpoint, strictly.

Every tensor that the model needs must come exactly once, with the right shape and dtype; every
tensor that comes must be needed, or be known to be harmless. A leaf is packed as soon as its last
tensor arrives, straight from the mapped file where the leaf allows it, so the peak is about one
copy of the weights plus one leaf.
"""

from __future__ import annotations

import itertools
import logging
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import torch

from headrace_core import plugins
from headrace_core.config import DTYPES, LoadConfig
from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.model import (
    BuildContext,
    CausalLM,
    IgnoresWeights,
    ModelInfo,
    ProgressCallback,
    SharesByRank,
    SupportsPooling,
    TranslatesWeights,
    WeightFormat,
    WeightRule,
    ignore_progress,
)
from headrace_core.plugins import check_constructor
from headrace_models.companions import companion_tensors
from headrace_models.convert import model_class
from headrace_models.formats.dummy import dummy_tensors
from headrace_models.formats.mistral_config import PARAMS
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_models.layers.base import Slot, WeightLayer
from headrace_models.loading.cache_scales import CacheScales
from headrace_models.loading.elsewhere import Elsewhere, leaves_of
from headrace_models.loading.fill_sharded_state import fill_slots
from headrace_models.loading.finite import check_finite
from headrace_models.loading.mapping import Place, WeightMap, listed, parts_of, stored_shape
from headrace_models.loading.only_towers import layers_passed_over, with_one_layer
from headrace_models.loading.packed_tensors import config_hint, decoded, left_over_hint
from headrace_models.loading.pieces import piece_of
from headrace_models.loading.returned_memory import freed_memory_returns
from headrace_models.quantization import quantization_config

if TYPE_CHECKING:
    from torch import Tensor

    from headrace_core.ops import PackedLinear
    from headrace_models.loading.ahead.weights import WeightsAhead
    from headrace_models.loading.update import LoadRecord

logger = logging.getLogger(__name__)

HARMLESS: Mapping[str, str] = {
    r".*\.rotary_emb\.inv_freq": "computed from the config",
    r"(transformer\.)?h\.\d+\.attn\.(masked_)?bias": "GPT-2's causal mask",
    r".*\.weight_shape": "repeats the shape of a packed weight",
    r"(.*\.)?position_ids": "counts from 0",
}
"""Left-over tensors that are passed over: a pattern of the whole name, and why. A class may add its
own (:class:`~headrace_core.model.IgnoresWeights`)."""

_PREFERRED = ("safetensors", "pt", "gguf", "sharded_state")
"""Formats that ``auto`` asks first, in this order."""
_UNREAD = ("*.h5", "*.msgpack", "*.onnx", "*.gguf")
_ALIGNMENT = 64
_MAX_SCRATCH = 128 << 20
"""Scratch memory that is kept from leaf to leaf, in bytes; more is given back at once."""


def load_model(
    info: ModelInfo,
    context: BuildContext,
    *,
    load: LoadConfig | None = None,
    seed: int = 0,
    progress: ProgressCallback = ignore_progress,
    admit: Callable[[CausalLM], None] | None = None,
    only_towers: bool = False,
    record: LoadRecord | None = None,
    ahead: WeightsAhead | None = None,
) -> CausalLM:
    """Build ``info.architecture`` and fill it; see the module's docstring.

    Args:
        context: its ``quant`` says how linear layers are stored
            (:func:`headrace_models.quantization.quant_method` makes it).
        load: format and strategy; default: ``LoadConfig()``.
        seed: of ``load_format="dummy"``.
        progress: told the bytes that are done.
        admit: called with the built model before a weight is read; what it raises ends the loading.
        only_towers: of the language model one layer is enough (:mod:`~headrace_models.loading.only_towers`).
        record: remembers how the model was filled, so that its weights can be replaced.
        ahead: weights that are packed already, and a plan for the next start.

    Raises:
        UnsupportedModel: the config asks for something that the family cannot do, or the class does
            not pool though it is to.
        PluginError: the class cannot be imported, or has another constructor.
        ConfigError: ``load.load_format`` does not fit the checkpoint.
        WeightsError: a tensor is missing, left over, repeated, of the wrong shape or dtype, or not finite;
            or a file is unreadable. Names tensor and file.
    """
    load = load or LoadConfig()
    built = Built.of(info, context, only_towers=only_towers)
    if context.adapters is not None:
        context.adapters.bind(built.model, context, built.weights.rules)
    if record is not None:
        record.begin(built, context)
    if admit is not None:
        admit(built.model)
    wanted = load.load_format.lower()
    chosen = None if wanted == "dummy" else choose_format(info.path, load)
    # Not inference_mode: graph capture and compilers want plain tensors.
    with torch.no_grad(), freed_memory_returns():
        by_rank = cast(object, chosen)
        if isinstance(by_rank, SharesByRank):
            if context.experts is not None:
                raise UnsupportedModel(
                    f"{info.path}: is a sharded state, in which experts are divided by columns: it cannot be "
                    "loaded with expert parallelism; leave that out, or load the checkpoint it was made of"
                )
            group = context.communicator
            shares = by_rank.rank_tensors(info.path, group.rank, group.world_size, progress)
            own = (share for share in shares if not built.is_slot_elsewhere(share[0]))
            fill_slots(own, built.leaves, built.weights.slots, context, info.path)
        else:
            stored = (
                dummy_tensors(built.weights.wanted(), context.dtype, seed)
                if chosen is None
                else checkpoint_tensors(built, context, load, chosen, progress, ahead)
            )
            filled = fill(built, context, stored, ahead=ahead)
            if record is not None and chosen is not None:
                record.filled = filled
    logger.info("%s: %s weights loaded from %s", info.architecture, wanted, info.path)
    return built.model


class Built(NamedTuple):
    """A model without weights, and what it waits for."""

    model: CausalLM
    info: ModelInfo
    leaves: Mapping[str, WeightLayer]
    """Layer by path."""
    weights: WeightMap
    harmless: Mapping[str, str]
    """See :data:`HARMLESS`."""
    elsewhere: Elsewhere | None = None
    """What other stages have; None: the model is not cut."""

    @classmethod
    def of(cls, info: ModelInfo, context: BuildContext, *, only_towers: bool = False) -> Built:
        """Raises: UnsupportedModel, PluginError, see :func:`load_model`."""
        chosen = model_class(info)
        check_constructor(chosen)
        model = chosen(with_one_layer(context) if only_towers else context)
        if info.pooling is not None and not isinstance(model, SupportsPooling):
            raise UnsupportedModel(f"model {info.name!r}: {info.architecture} has no pooler")
        rules = (*model.weight_rules, *_dense_rules(info))
        if context.stage is not None and context.adapters is not None:
            context.adapters.survey(model, context)
        elsewhere = None if context.stage is None else Elsewhere(model, rules, context)
        leaves = leaves_of(model)
        weights = WeightMap(rules, leaves)
        ignored = model.ignored_weights if isinstance(model, IgnoresWeights) else {}
        if only_towers:
            ignored = {**ignored, **layers_passed_over(model.weight_rules)}
        return cls(model, info, leaves, weights, {**HARMLESS, **ignored}, elsewhere)

    def passes_over(self, name: str) -> bool:
        """True if a tensor of the checkpoint is known to be of no use to the model, or to this stage."""
        known = any(re.fullmatch(pattern, name) for pattern in self.harmless)
        is_elsewhere = self.elsewhere is not None and self.elsewhere.waits_for(name)
        return (known or is_elsewhere) and self.weights.find(name) is None

    def slots_anywhere(self, leaf: str) -> Mapping[str, object] | None:
        """Slots of a leaf, which may be another stage's; None: there is no such leaf."""
        found = self.weights.slots.get(leaf)
        return self.elsewhere.slots(leaf) if found is None and self.elsewhere is not None else found

    def is_slot_elsewhere(self, name: str) -> bool:
        """True if it is the name of another stage's slot (``layers.0.attention.qkv.weight``)."""
        leaf, _, key = name.rpartition(".")
        return leaf not in self.leaves and key in (self.slots_anywhere(leaf) or ())


def fill(
    built: Built,
    context: BuildContext,
    tensors: Iterable[tuple[str, Tensor, Path]],
    deliver: Callable[[str, Mapping[str, Tensor]], None] | None = None,
    ahead: WeightsAhead | None = None,
) -> frozenset[tuple[Place, int]]:
    """Bring a checkpoint's tensors to the leaves that wait for them: the slots that got one, and which
    of their parts.

    Args:
        tensors: by the checkpoint's names.
        deliver: takes a leaf's path and its tensors, which may be views that are soon overwritten,
            in place of the leaf.
        ahead: see :func:`load_model`.

    Raises:
        WeightsError: see :func:`load_model`.
    """
    filling = Filling(context, built, deliver, ahead)
    if ahead is not None:
        ahead.begin()
    for name, tensor, file in tensors:
        filling.take(name, tensor, file)
    filling.close(built.info.path)
    if ahead is not None:
        ahead.end()
    return frozenset(filling.origin)


def checkpoint_tensors(
    built: Built,
    context: BuildContext,
    load: LoadConfig,
    chosen: WeightFormat,
    progress: ProgressCallback,
    ahead: WeightsAhead | None = None,
) -> Iterable[tuple[str, Tensor, Path]]:
    """All tensors of the folder, those of its Dense modules included, as the model's rules know them."""
    own = chosen.tensors(built.info.path, progress)
    if ahead is not None and isinstance(chosen, SafetensorsFormat):
        own = ahead.watched(own)
    companions = companion_tensors(
        built.info.whole_config, lambda path: choose_format(path, load).tensors(path, progress)
    )
    stored = decoded(
        itertools.chain(own, companions),
        lambda tensors: context.quant.decode(tensors, context.dtype, built.passes_over),
        built.weights.is_transposed,
    )
    everything = itertools.chain(stored, _dense_tensors(built.info, load, progress))
    model = cast(object, built.model)
    return model.translate(everything) if isinstance(model, TranslatesWeights) else everything


def _dense_rules(info: ModelInfo) -> list[WeightRule]:
    """Rules for the tensors of Dense modules, which are in folders of their own."""
    modules = info.pooling.dense if info.pooling is not None else ()
    return [
        WeightRule(f"{module.path}.linear".lstrip("."), f"pooler.head.dense.{index}")
        for index, module in enumerate(modules)
    ]


def _dense_tensors(
    info: ModelInfo, load: LoadConfig, progress: ProgressCallback
) -> Iterable[tuple[str, Tensor, Path]]:
    for module in info.pooling.dense if info.pooling is not None else ():
        if not module.path:  # it is among the model's own
            continue
        folder = info.path / module.path
        for name, tensor, file in choose_format(folder, load).tensors(folder, progress):
            yield f"{module.path}.{name}", tensor, file


def choose_format(path: Path, load: LoadConfig) -> WeightFormat:
    """The format that the user asks for, or the first that knows the files.

    Raises:
        ConfigError: the files are not of the format that was asked for.
        WeightsError: no format knows them.
    """
    group, wanted = "headrace.weight_formats", load.load_format.lower()
    if wanted != "auto":
        chosen: WeightFormat = plugins.load(group, wanted)(load)
        if not chosen.recognises(path):
            raise ConfigError(
                f"load.load_format = {wanted!r}: {path} holds no checkpoint of that format",
                field="load.load_format",
            )
        return chosen
    known = plugins.installed(group)
    for name in dict.fromkeys([*(name for name in _PREFERRED if name in known), *known]):
        candidate: WeightFormat = plugins.load(group, name)(load)
        if candidate.recognises(path):
            return candidate
    others = [p.name for kind in _UNREAD for p in sorted(path.glob(kind))][:3]
    hint = (
        f" It holds {', '.join(others)}: name one GGUF file, or convert what is none."
        if others
        else ""
    )
    if (path / PARAMS).is_file():
        hint += (
            f" There is a {PARAMS}: --load-format mistral fetches and reads Mistral's own layout."
        )
    raise WeightsError(f"{path}: no weights found; readable formats are: {', '.join(known)}.{hint}")


@dataclass(slots=True)
class _Arrived:
    """Tensors of one leaf that have come, until it is complete."""

    parts: dict[Place, dict[int, tuple[Tensor, WeightRule, str, Path]]] = field(
        default_factory=dict
    )
    missing: int = 0

    def copy(self) -> _Arrived:
        """The same tensors, to which others may be added."""
        return _Arrived({place: dict(parts) for place, parts in self.parts.items()}, self.missing)


class _Scratch:
    """Memory for the fused tensors of one leaf after the other.

    One buffer for all leaves: memory that is written again and again stays in the processor's
    cache, while fresh memory would be zeroed by the system first.
    """

    def __init__(self) -> None:
        self._buffer = torch.empty(0, dtype=torch.uint8)
        self._used = 0

    def take(self, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
        """An uninitialised tensor, valid until :meth:`reset`."""
        num_bytes = math.prod(shape) * dtype.itemsize
        start = -(-self._used // _ALIGNMENT) * _ALIGNMENT
        if start + num_bytes > self._buffer.numel():
            # What was handed out keeps the old buffer alive.
            self._buffer, start = torch.empty(num_bytes, dtype=torch.uint8), 0
        self._used = start + num_bytes
        return self._buffer[start : self._used].view(dtype).view(shape)

    def reset(self) -> None:
        """Everything that was handed out is no longer needed."""
        self._used = 0
        if self._buffer.numel() > _MAX_SCRATCH:
            self._buffer = torch.empty(0, dtype=torch.uint8)


class FillingState(NamedTuple):
    """What a :class:`Filling` has taken."""

    origin: Mapping[tuple[Place, int], tuple[str, Path]]
    arrived: Mapping[str, _Arrived]
    loaded: Set[str]


class Filling:
    """Collects tensors by leaf and loads each leaf when it is complete."""

    def __init__(
        self,
        context: BuildContext,
        built: Built,
        deliver: Callable[[str, Mapping[str, Tensor]], None] | None,
        ahead: WeightsAhead | None = None,
    ) -> None:
        self.context = context
        self.built = built
        self.ahead = ahead
        self.passes_over = built.passes_over
        self.leaves = built.leaves
        self.weights = weights = built.weights
        self.deliver = deliver
        self.origin: dict[tuple[Place, int], tuple[str, Path]] = {}
        self.arrived = {
            path: _Arrived(
                missing=sum(s.num_parts for s in slots.values() if s.required and s.copies)
            )
            for path, slots in weights.slots.items()
        }
        self.loaded: set[str] = set()
        self.left_over: list[str] = []
        """Tensors for nobody. From the first on names are compared, and nothing is loaded."""
        self.quantization = quantization_config(built.info)
        self.scratch = _Scratch()
        self.cache_scales = CacheScales(built.model.attention_layers(), context.kv_cache_dtype)

    def checkpoint(self) -> FillingState:
        """What has come until now; holds the tensors that wait."""
        arrived = {path: one.copy() for path, one in self.arrived.items()}
        return FillingState(dict(self.origin), arrived, set(self.loaded))

    def restore(self, state: FillingState) -> None:
        """Have come what had come then."""
        self.origin, self.arrived, self.loaded = (
            dict(state.origin), dict(state.arrived), set(state.loaded),
        )  # fmt: skip
        self.scratch.reset()

    def take(self, name: str, tensor: Tensor, file: Path) -> None:
        match = self.weights.find(name)
        if match is None and self._takes_scale(name, tensor, file):
            return
        if match is None:
            if tensor.numel() and not self.is_harmless(name):
                self.left_over.append(f"tensor {name!r} {list(tensor.shape)} of {file.name}")
                return
            logger.debug("%s: tensor %r passed over", file, name)
            return
        places, rule = self.weights.stack(match), match.rule
        keeps = [self._keeps(place) for place in places]
        if all(keeps) and not (self.ahead and self.ahead.is_checked(name, tensor, file)):
            check_finite(name, tensor, file)
        rows = unstacked(tensor, len(places), rule, name, file) if rule.stacked else [tensor]
        for place, row, is_kept in zip(places, rows, keeps, strict=True):
            if is_kept and not all(keeps):
                check_finite(name, row, file)
            self._take(place, rule, name, row, file)

    def _keeps(self, place: Place) -> bool:
        return self.weights.slots[place.leaf][place.key].copies > 0

    def _takes_scale(self, name: str, tensor: Tensor, file: Path) -> bool:
        elsewhere = self.built.elsewhere
        return self.cache_scales.take(name, tensor, file) or (
            elsewhere is not None and elsewhere.takes_scale(name, tensor, file)
        )

    def _take(self, place: Place, rule: WeightRule, name: str, tensor: Tensor, file: Path) -> None:
        slot = self.weights.slots[place.leaf][place.key]
        parts = parts_of(slot, rule)
        check_tensor(slot, parts, rule, name, tensor, file, self.quantization)
        for part in parts:
            self._claim(place, part, name, file)
        if self.left_over or not slot.copies:  # what other ranks keep is not even read
            return
        arrived = self.arrived[place.leaf]
        for part in parts:
            arrived.parts.setdefault(place, {})[part] = (tensor, rule, name, file)
            arrived.missing -= slot.required
        if arrived.missing == 0 and not self._may_get_more(place.leaf):
            self.load(place.leaf)

    def _claim(self, place: Place, part: int, name: str, file: Path) -> None:
        if (place, part) in self.origin:
            other, other_file = self.origin[place, part]
            raise WeightsError(
                f"{file}: tensor {name!r} comes twice: {other!r} of {other_file} has the same place "
                "in the model"
            )
        self.origin[place, part] = name, file

    def close(self, path: Path) -> None:
        """Load what waits only for optional tensors or for other leaves; complain of the rest."""
        missing = [w for w in self.weights.wanted() if not self._has(w.place, w.part)]
        wrong = []
        if missing:
            named = listed([f"{w.source!r} {list(w.shape)}" for w in missing])
            wrong.append(f"tensors are missing from the checkpoint: {named}")
        if self.left_over:
            one = "belongs" if len(self.left_over) == 1 else "belong"
            hint = left_over_hint(self.quantization, self.left_over)
            wrong.append(f"{listed(self.left_over)} {one} to no layer of the model{hint}")
        if wrong:
            raise WeightsError(f"{path}: {'; '.join(wrong)}")
        for leaf in sorted(self.leaves, key=lambda name: not self.weights.slots[name]):
            if leaf not in self.loaded:
                self.load(leaf)
        self.cache_scales.report()

    def _has(self, place: Place, part: int) -> bool:
        return (place, part) in self.origin

    def _may_get_more(self, leaf: str) -> bool:
        return any(not slot.required for slot in self.weights.slots[leaf].values())

    def load(self, leaf: str) -> None:
        arrived = self.arrived.pop(leaf)
        views = self.context.device == "cpu" and (
            self.deliver is not None or self.leaves[leaf].takes_views
        )
        tensors, stored = {}, dict[str, Path]()
        packed: PackedLinear | None = None
        for key, slot in self.weights.slots[leaf].items():
            parts = arrived.parts.pop(Place(leaf, key), None)
            if parts is not None:
                stored |= {name: file for _, _, name, file in parts.values()}
                _check_whole(slot, parts)
                if key == "weight" and self.ahead is not None:
                    packed = self._packed_ahead(self.ahead, leaf, slot, parts)
                if packed is None or key != "weight":
                    tensors[key] = self._assemble(slot, parts, views)
        if packed is not None:
            self.leaves[leaf].adopt(packed, tensors)
        elif self.deliver is not None:
            self.deliver(leaf, tensors)
        else:
            self._hand_over(leaf, tensors, stored)
        self.scratch.reset()
        self.loaded.add(leaf)

    def _hand_over(self, leaf: str, tensors: dict[str, Tensor], stored: Mapping[str, Path]) -> None:
        """Raises: WeightsError: the leaf cannot use the tensors; names them and their files."""
        try:
            self.leaves[leaf].load(tensors)
        except WeightsError as error:
            files = ", ".join(dict.fromkeys(str(file) for file in stored.values()))
            raise WeightsError(f"{files}: {error} (of tensors {listed([*stored])})") from None

    def _packed_ahead(
        self,
        ahead: WeightsAhead,
        leaf: str,
        slot: Slot,
        parts: Mapping[int, tuple[Tensor, WeightRule, str, Path]],
    ) -> PackedLinear | None:
        """The leaf's weight if it was packed ahead out of just these tensors."""
        if not self.leaves[leaf].adopts_packed or self.deliver is not None:
            return None
        own = [
            (parts[part][2], piece_of(slot, part, *parts[part][:2]), parts[part][3])
            for part in range(slot.num_parts)
        ]
        dtype = slot.dtype or self.context.dtype
        if any(piece.dtype != getattr(torch, dtype) for _, piece, _ in own):
            return None
        return ahead.take(leaf, own, slot.shape, dtype, self.context.ops.linear)

    def _assemble(
        self, slot: Slot, parts: Mapping[int, tuple[Tensor, WeightRule, str, Path]], views: bool
    ) -> Tensor:
        """One tensor on the model's device out of the parts' pieces for this rank.

        Args:
            views: the tensor may be a view of the file or of the scratch memory.
        """
        dtype = getattr(torch, slot.dtype or self.context.dtype)
        if views and len(parts) == 1:
            piece = piece_of(slot, 0, *parts[0][:2])
            if piece.dtype == dtype:
                return piece
        if views:
            out = self.scratch.take(slot.shape, dtype)
        else:
            out = torch.empty(slot.shape, dtype=dtype, device=self.context.device)
        start = 0
        for part in range(slot.num_parts):
            tensor, rule, name, file = parts[part]
            piece = piece_of(slot, part, tensor, rule)
            if slot.parts and slot.part_dim is not None:
                size = slot.parts[part].size
                out.narrow(slot.part_dim, start, size).copy_(piece)
                start += size
            elif part == 0:
                out.copy_(piece)
            elif not torch.equal(out, piece.to(out)):
                raise WeightsError(
                    f"{file}: tensor {name!r} differs from that of the layers it is fused with"
                )
        return out

    def is_harmless(self, name: str) -> bool:
        if self.passes_over(name):
            return True
        # A head that is the embedding may be stored all the same.
        heads = [rule.source for rule in self.weights.rules if rule.target == "head"]
        slots = self.built.slots_anywhere("head")
        tied = slots is not None and "weight" not in slots
        return tied and name in ("lm_head.weight", *(f"{head}.weight" for head in heads))


def _check_whole(slot: Slot, parts: Mapping[int, tuple[Tensor, WeightRule, str, Path]]) -> None:
    """Raises: WeightsError: some of a fused layer's parts have an optional tensor, and others have not."""
    if len(parts) < slot.num_parts:
        named = listed([f"{name!r} of {file}" for _, _, name, file in parts.values()])
        raise WeightsError(
            f"{named}: {slot.num_parts} modules are one layer here: all must have such a tensor, or none"
        )


def unstacked(
    tensor: Tensor, count: int, rule: WeightRule, name: str, file: Path
) -> Sequence[Tensor]:
    """The tensors that one holds for so many targets."""
    if tensor.dim() and tensor.shape[0] == count:
        return tensor.unbind(0)
    if tensor.dim() and tensor.shape[0] and tensor.shape[0] % count == 0:
        return tensor.chunk(count)
    raise WeightsError(
        f"{file}: tensor {name!r} has shape {list(tensor.shape)}, the model needs {count} of "
        f"{rule.target!r} in it"
    )


def check_tensor(
    slot: Slot, parts: Sequence[int], rule: WeightRule, name: str, tensor: Tensor, file: Path,
    quantization: Mapping[str, Any] | None = None, *, of_checkpoint: bool = True,
) -> None:  # fmt: skip
    """Raises: WeightsError, the tensor does not fit its slot; says what of ``config.json`` has to do with it,
    if it is a checkpoint's."""
    expected = stored_shape(slot, parts, rule)
    dtype = str(tensor.dtype).removeprefix("torch.")
    hint = config_hint(quantization, slot, dtype) if of_checkpoint else ""
    if tuple(tensor.shape) != expected:
        raise WeightsError(
            f"{file}: tensor {name!r} has shape {list(tensor.shape)}, the model needs {list(expected)}{hint}"
        )
    accepted = DTYPES if slot.dtype is None or slot.any_float else (slot.dtype,)
    if dtype not in accepted:
        raise WeightsError(
            f"{file}: tensor {name!r} has dtype {dtype}, the model needs {' or '.join(accepted)}{hint}"
        )
