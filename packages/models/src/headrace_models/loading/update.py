"""New weights for a model that is loaded: checked as they come, packed beside the old ones, put in at once.

Tensors come by the checkpoint's names, and the rules that loaded the model map and fuse them. Each leaf
whose tensors are together is packed as at start, but by a twin of the leaf: an object that is as the leaf
was before it was loaded. Nothing of the model changes until :meth:`WeightUpdate.apply`, which hands the
twins' state to the leaves. So a refused tensor costs nothing, and the peak is the model, the leaves that
change once more, and one leaf.
"""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any
from weakref import WeakValueDictionary

import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_core.linear import QuantMethod
from headrace_core.model import TranslatesWeights
from headrace_models.layers.base import Layer, WeightLayer, walk
from headrace_models.loading.cache_scales import CacheScales
from headrace_models.loading.finite import check_finite
from headrace_models.loading.loader import Built, Filling, check_tensor, unstacked
from headrace_models.loading.mapping import Place, Wanted, WeightMap, listed, parts_of

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, CausalLM, ModelInfo

logger = logging.getLogger(__name__)

SOURCE = Path("update_weights")
"""Stands for the file in messages."""

Attributes = Mapping[str, Any]


class LoadRecord:
    """How one model was loaded. Made empty; :func:`~headrace_models.loading.loader.load_model` fills it.

    Args:
        from_nothing: the model has no weights: its first update must bring all.
    """

    def __init__(self, *, from_nothing: bool = False) -> None:
        self._from_nothing = from_nothing
        self.filled: frozenset[tuple[Place, int]] | None = None
        """Slots that the checkpoint had tensors for, and which parts; None: it is not known."""
        self._built: Built | None = None
        self._context: BuildContext | None = None
        self._blank: dict[str, Attributes] = {}
        """Each leaf's attributes before it was loaded, by its path."""
        self.check_loaded: Callable[[], None] = lambda: None
        """Refuses what the loaded weights say (WeightsError), beyond each leaf's own."""

    def begin(
        self, built: Built, context: BuildContext, check: Callable[[], None] | None = None
    ) -> None:
        """Remember a model that has no weights yet.

        Args:
            check: see :attr:`check_loaded`.
        """
        self._built, self._context = built, context
        self.check_loaded = check or self.check_loaded
        self._blank = {path: _copied(vars(leaf)) for path, leaf in built.leaves.items()}

    def got_all(self, filled: frozenset[tuple[Place, int]]) -> None:
        """The model that had no weights has all now."""
        self._from_nothing, self.filled = False, filled

    def got_nothing(self) -> None:
        """It has none after all."""
        self._from_nothing, self.filled = True, None

    @property
    def built(self) -> Built:
        assert self._built is not None, "load_model() has not been given this record"
        return self._built

    @property
    def context(self) -> BuildContext:
        assert self._context is not None, "load_model() has not been given this record"
        return self._context

    @property
    def model(self) -> CausalLM:
        return self.built.model

    @property
    def max_bytes(self) -> int:
        """Of all tensors that the model may be given, about: each number in its widest form."""
        return 8 * sum(math.prod(want.shape) for want in self._wanted()) + (1 << 20)

    @property
    def max_tensors(self) -> int:
        """Tensors that the model may be given, about: a packed weight comes as several, and a checkpoint has
        some that are of no use."""
        return 8 * len(list(self._wanted())) + 1024

    def _wanted(self) -> Iterator[Wanted]:
        """Tensors that the model has to have, those of other stages included, which come along."""
        yield from self.built.weights.wanted()
        if self.built.elsewhere is not None:
            yield from self.built.elsewhere.weights.wanted()

    def twin(self, path: str) -> WeightLayer:
        """A leaf that is as the one at ``path`` was before it was loaded."""
        leaf = self.built.leaves[path]
        made: WeightLayer = object.__new__(type(leaf))
        vars(made).update(_copied(self._blank[path]))
        if "communicator" in vars(leaf):  # another one may have come since, that shares tokens out
            vars(made)["communicator"] = vars(leaf)["communicator"]
        made.is_twin = True
        return made

    def adopt(self, path: str, twin: WeightLayer) -> None:
        """Give a leaf the state of its loaded twin."""
        leaf = self.built.leaves[path]
        vars(leaf).update(vars(twin))
        del leaf.is_twin
        leaf.publish()

    def update(self) -> WeightUpdate:
        """Begin an update."""
        return WeightUpdate(self, from_nothing=self._from_nothing)


def blank_model(info: ModelInfo, context: BuildContext) -> LoadRecord:
    """A model without weights, all of which its first update must bring.

    Raises:
        UnsupportedModel, PluginError: see :func:`~headrace_models.loading.loader.load_model`.
    """
    record = LoadRecord(from_nothing=True)
    built = Built.of(info, context)
    if context.adapters is not None:
        context.adapters.bind(built.model, context, built.weights.rules)
    record.begin(built, context)
    return record


class WeightUpdate:
    """One update, from its first tensor until it is applied or dropped.

    Args:
        record: of the model.
        from_nothing: the model has no weights: all that it needs must come.
    """

    def __init__(self, record: LoadRecord, *, from_nothing: bool = False) -> None:
        self._record = record
        self._from_nothing = from_nothing
        self._twins: dict[str, WeightLayer] = {}
        self._later: dict[str, Mapping[str, Tensor]] = {}
        """Tensors of leaves that are made of others' weights too."""
        self._elsewhere = set[str]()
        """Names of tensors that came for other stages."""
        self._filling = Filling(record.context, record.built, self._pack)
        self._scales = CacheScales({**record.model.attention_layers()}, "auto")
        """Only to know scales of the cache by their names."""
        self._copied: WeakValueDictionary[int, Tensor] = WeakValueDictionary()
        """Tensors that are copies already, by their ids, which others may have once they are gone."""

    @property
    def num_tensors(self) -> int:
        """Tensors that were taken, or are other stages' to take."""
        return len(self._filling.origin) + len(self._elsewhere)

    def check(self, name: str, shape: tuple[int, ...], dtype: str) -> None:
        """Check a tensor that is to come, by what is said of it.

        Raises:
            WeightsError: as :meth:`take`, but for its values.
        """
        kind = getattr(torch, dtype, None)
        if not isinstance(kind, torch.dtype):
            raise WeightsError(f"{SOURCE}: tensor {name!r}: dtype {dtype!r:.40} is unknown")
        if self._takes_stored:
            self._check(name, torch.empty(shape, dtype=kind, device="meta"), {})

    def check_values(self, name: str, tensor: Tensor) -> None:
        """Check the numbers of a tensor that is to come, where its own are those that compute.

        Raises:
            WeightsError: they are not finite.
        """
        if self._takes_stored:
            check_finite(name, tensor, SOURCE)

    def take(self, tensors: Iterable[tuple[str, Tensor]], *, keep: bool = True) -> None:
        """Take a part of the update: any tensors, each once.

        All of the part is checked before any of it is taken. Where a method lays tensors out anew (a weight
        and its scales become floats), those that belong together must be in one part.

        Args:
            keep: tensors that wait for others are copied, so that the caller may write over theirs.

        Raises:
            WeightsError: a tensor is unknown, repeated, of the wrong shape or dtype, or not finite, or a
                layer cannot use its tensors. Nothing of the part is taken then.
        """
        part, restore = self.checked(tensors), self.checkpoint()
        try:
            self.take_checked(part, keep=keep)
        except BaseException:
            restore()
            raise

    def checked(self, tensors: Iterable[tuple[str, Tensor]]) -> Sequence[tuple[str, Tensor]]:
        """Check a part, of which nothing is taken yet: it, as :meth:`take_checked` takes it.

        Raises:
            WeightsError: see :meth:`take`.
        """
        with torch.no_grad():
            part = list(self._translated(tensors))
            claimed: dict[tuple[Place, int], str] = {}
            for name, tensor in part:
                self._check(name, tensor, claimed)
                if not self._is_elsewhere(name):
                    check_finite(name, tensor, SOURCE)
        return part

    def take_checked(self, part: Sequence[tuple[str, Tensor]], *, keep: bool = True) -> None:
        """Take what :meth:`checked` has given; arguments and errors as :meth:`take`'s. After one
        :meth:`checkpoint`'s call restores what was before."""
        with torch.no_grad():
            for name, tensor in part:
                if self._is_elsewhere(name):
                    self._elsewhere.add(name)
                else:
                    self._filling.take(name, tensor, SOURCE)
            if keep:
                self.keep_waiting()

    def checkpoint(self) -> Callable[[], None]:
        """A call that has the update be what it is now. It holds tensors that wait now, and no others."""
        taken = self._filling.checkpoint()
        twins, later, elsewhere = dict(self._twins), dict(self._later), set(self._elsewhere)

        def restore() -> None:
            self._filling.restore(taken)
            self._twins, self._later, self._elsewhere = twins, later, elsewhere

        return restore

    def missing(self) -> list[str]:
        """Names of tensors without which the update cannot be applied: the rest of fused layers, those that
        a layer was loaded with before, and all if the model has nothing."""
        weights, has = self._filling.weights, self._filling.origin
        touched = {place.leaf for place, _ in has}
        wanted = {
            (Place(leaf, key), part)
            for leaf, slots in weights.slots.items()
            if self._from_nothing or leaf in touched
            for key, slot in slots.items()
            if slot.required
            for part in range(slot.num_parts)
        }
        if not self._from_nothing and self._record.filled is not None:
            wanted |= {
                (place, part) for place, part in self._record.filled if place.leaf in touched
            }
        names = (weights.sources(place, part)[0][0] for place, part in wanted - set(has))
        return sorted(dict.fromkeys(names))

    def check_whole(self) -> None:
        """Raises: WeightsError: tensors are missing; names them. More may be taken."""
        missing = self.missing()
        if missing:
            raise WeightsError(f"{SOURCE}: tensors are missing: {listed(missing)}")

    def seal(self) -> None:
        """Pack what has waited for tensors that need not come; :meth:`check_whole` comes first.

        Raises:
            WeightsError: a layer cannot use its tensors, which wait on.
        """
        with torch.no_grad():
            for path, arrived in list(self._filling.arrived.items()):
                if arrived.parts:
                    waits = arrived.copy()
                    try:
                        self._filling.load(path)
                    except BaseException:
                        self._filling.arrived[path] = waits
                        raise

    def apply(self) -> Callable[[], None]:
        """Put the new weights into the model; :meth:`seal` comes first.

        Returns:
            A call that puts the old ones back, which it holds until then.

        Raises:
            WeightsError: a leaf that is made of others cannot use the new ones; the old ones stand.
        """
        record = self._record
        before = {path: dict(vars(leaf)) for path, leaf in record.built.leaves.items()}

        def undo() -> None:
            for path, attributes in before.items():
                own = vars(record.built.leaves[path])
                own.clear()
                own.update(attributes)
                record.built.leaves[path].publish()
            _forget_computed(record.model)
            if self._from_nothing:
                record.got_nothing()
            else:
                record.check_loaded()

        try:
            with torch.no_grad():
                for path, twin in self._twins.items():
                    record.adopt(path, twin)
                _forget_computed(record.model)
                for path in self._dependents():
                    twin = record.twin(path)
                    twin.load(self._later.get(path) or self._own_tensors(path))
                    record.adopt(path, twin)
                record.check_loaded()
        except BaseException:
            undo()
            raise
        if self._from_nothing:
            record.got_all(frozenset(self._filling.origin))
        return undo

    @property
    def _takes_stored(self) -> bool:
        """True if tensors go into the model as they come, and are not laid out anew before."""
        built, context = self._record.built, self._record.context
        is_same = type(context.quant).decode is QuantMethod.decode
        return is_same and not isinstance(built.model, TranslatesWeights)

    def _dependents(self) -> list[str]:
        """Leaves that need no tensor, and so may be made of others' (a head that is the embedding)."""
        return [path for path in self._record.built.leaves if self._is_dependent(path)]

    def _is_dependent(self, path: str) -> bool:
        return not any(slot.required for slot in self._filling.weights.slots[path].values())

    def _own_tensors(self, path: str) -> dict[str, Tensor]:
        """Tensors that such a leaf was loaded with, as it holds them."""
        leaf, filled = self._record.built.leaves[path], self._record.filled or ()
        found = {}
        for key, slot in self._filling.weights.slots[path].items():
            held = getattr(leaf, key, None)
            if isinstance(held, Tensor) and tuple(held.shape) == slot.shape:
                found[key] = held
            elif any(place == Place(path, key) for place, _ in filled):
                name = self._filling.weights.sources(Place(path, key), 0)[0][0]
                raise WeightsError(f"{SOURCE}: tensor {name!r} is missing: it must come along")
        return found

    def _translated(self, tensors: Iterable[tuple[str, Tensor]]) -> Iterable[tuple[str, Tensor]]:
        """The tensors as the model's rules know them."""
        built, context = self._record.built, self._record.context
        given = ((name, tensor.detach(), SOURCE) for name, tensor in tensors)
        stored = context.quant.decode(given, context.dtype, built.passes_over)
        if isinstance(built.model, TranslatesWeights):
            stored = built.model.translate(stored)
        return ((name, tensor) for name, tensor, _ in stored)

    def _check(self, name: str, tensor: Tensor, claimed: dict[tuple[Place, int], str]) -> None:
        filling, weights = self._filling, self._weights_of(name)
        match = weights.find(name)
        if match is None:
            self._check_left_over(name, tensor)
            return
        places, rule = weights.stack(match), match.rule
        rows = unstacked(tensor, len(places), rule, name, SOURCE) if rule.stacked else [tensor]
        for place, row in zip(places, rows, strict=True):
            slot = weights.slots[place.leaf][place.key]
            parts = parts_of(slot, rule)
            check_tensor(slot, parts, rule, name, row, SOURCE, of_checkpoint=False)
            for part in parts:
                other = filling.origin.get((place, part), (claimed.get((place, part)),))[0]
                if other is not None:
                    raise WeightsError(
                        f"{SOURCE}: tensor {name!r} comes twice: {other!r} has the same place in the model"
                    )
                claimed[place, part] = name

    def _weights_of(self, name: str) -> WeightMap:
        """Where a tensor's place is looked for: in another stage's part of the model if it is there."""
        elsewhere = self._record.built.elsewhere
        return (
            elsewhere.weights
            if elsewhere is not None and self._is_elsewhere(name)
            else self._filling.weights
        )

    def _is_elsewhere(self, name: str) -> bool:
        """True if a tensor is another stage's, and not this one's, too."""
        elsewhere = self._record.built.elsewhere
        if elsewhere is None or self._filling.weights.find(name) is not None:
            return False
        return elsewhere.waits_for(name) or elsewhere.takes_scale(name, torch.ones(1), SOURCE)

    def _check_left_over(self, name: str, tensor: Tensor) -> None:
        """A tensor of no leaf, which may be of no use."""
        if not tensor.numel() or self._filling.is_harmless(name):
            return
        if self._scales.take(name, torch.ones(1), SOURCE) or self._is_elsewhere(name):
            if self._record.context.kv_cache_dtype.startswith("fp8"):
                raise WeightsError(
                    f"{SOURCE}: tensor {name!r} is a scale of the KV cache, which stays as it was at start: "
                    "leave it out"
                )
            return
        raise WeightsError(
            f"{SOURCE}: tensor {name!r} {list(tensor.shape)} belongs to no layer of the model"
            f"{self._hint(name)}"
        )

    def _hint(self, name: str) -> str:
        """Names that the same module's tensors have, if it has others."""
        module = name.rpartition(".")[0]
        own = [want.source for want in self._filling.weights.wanted()
               if want.source.rpartition(".")[0] == module]  # fmt: skip
        return f": the layer's tensors are {listed(own)}" if own else ""

    def _pack(self, path: str, tensors: Mapping[str, Tensor]) -> None:
        """Load a leaf's twin."""
        twin = self._record.twin(path)
        if not twin.takes_views or self._is_dependent(
            path
        ):  # it keeps them, and these may be the caller's
            tensors = {key: tensor.clone() for key, tensor in tensors.items()}
        if self._is_dependent(path):
            self._later[path] = tensors
            return
        try:
            twin.load(tensors)
        except WeightsError as error:
            raise WeightsError(f"{SOURCE}: {error}") from None
        self._twins[path] = twin

    def keep_waiting(self) -> None:
        """Copy tensors that wait and are the caller's."""
        for arrived in self._filling.arrived.values():
            for parts in arrived.parts.values():
                for part, (tensor, rule, name, file) in parts.items():
                    if self._copied.get(id(tensor)) is not tensor:
                        own = tensor.clone()
                        self._copied[id(own)] = own
                        parts[part] = (own, rule, name, file)


def _copied(attributes: Attributes) -> dict[str, Any]:
    """Attributes, with lists and dictionaries that are to be filled as new ones."""
    copies: dict[str, Any] = {}
    for name, value in attributes.items():
        copies[name] = value.copy() if type(value) in (list, dict) else value
    return copies


def _forget_computed(model: object) -> None:
    """Drop what layers computed of their pieces' weights when it was first asked for."""
    if not isinstance(model, Layer):
        return
    for _, layer in walk(model):
        for kind in type(layer).__mro__:
            for name, member in vars(kind).items():
                if isinstance(member, cached_property):
                    vars(layer).pop(name, None)
