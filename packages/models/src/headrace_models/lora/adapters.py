"""The slots of one built model: adapters are read, placed in them, and chosen for the rows of a step."""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.ops.optional.low_rank import LOW_RANK, LowRankOp
from headrace_models.loading.mapping import listed
from headrace_models.lora.files import AdapterFiles, Factors, read_folder
from headrace_models.lora.find_places import find_places
from headrace_models.lora.names import ModuleNames
from headrace_models.lora.places import Memory, Place
from headrace_models.lora.rows import MediaSlot, RowSlots
from headrace_models.lora.stacks import stack_pieces
from headrace_models.lora.targets import Piece

if TYPE_CHECKING:
    from headrace_core.model import BuildContext, WeightRule
    from headrace_core.ops import OpTable


@dataclass(frozen=True, slots=True)
class ReadAdapter:
    """An adapter in the host's memory, in the terms of one model's layers."""

    path: Path
    pieces: tuple[Piece, ...]
    num_bytes: int
    digest: str
    """Hexadecimal SHA-256 of what it adds to which module: equal ones compute the same."""
    changes_media: bool
    """It changes towers for media, or their projectors."""


class Adapters:
    """See :class:`headrace_core.lora.AdapterSlots`. Layers get their places once the model is built.

    Args:
        max_loras: slots.
        max_lora_rank: largest rank of an adapter.
        dtype: of the factors; the activations'.
        max_tokens: tokens of a step.
        max_logits_rows: rows of hidden states that logits are computed of at once.
        towers: towers for media and their projectors have places, too.
        fully_sharded: see :mod:`headrace_models.lora.sharded_place`.

    Raises:
        ConfigError: no kernel provider has the op ``low_rank``.
    """

    def __init__(
        self,
        ops: OpTable,
        *,
        max_loras: int,
        max_lora_rank: int,
        dtype: str,
        device: str,
        max_tokens: int,
        max_logits_rows: int,
        towers: bool = False,
        fully_sharded: bool = False,
    ) -> None:
        like = torch.empty(0, dtype=getattr(torch, dtype), device=device)
        self.ops, self.dtype = ops, dtype
        op = ops.optional(LOW_RANK)
        self.memory = Memory(op, max_loras, max_lora_rank, like, fully_sharded)
        self.tokens = RowSlots("tokens", max_tokens, device)
        self.logits = RowSlots("rows of logits", max_logits_rows, device)
        self.media = MediaSlot(device) if towers else None
        self.places: dict[str, Place] = {}
        """Of this rank's layers."""
        self._elsewhere: dict[str, Place] = {}
        """Of all stages' layers, by the same paths: without memory, they say what adapters may change."""
        self.refused: dict[str, str] = {}
        """Name of a layer without a place -> why, where there is more to say than that it has none."""
        self.names: ModuleNames | None = None

    def survey(self, model: Any, context: BuildContext) -> None:
        """Note which layers of a whole model take adapters, before it is cut into stages: every stage reads
        the same files, and refuses what no stage has a place for."""
        logits = self.logits if context.pooling is None else None
        self._elsewhere, _ = find_places(
            model,
            replace(self.memory, op=cast(LowRankOp, _NoMemory())),
            self.tokens,
            logits,
            self.media,
        )

    def bind(self, model: Any, context: BuildContext, rules: Sequence[WeightRule]) -> None:
        """Give the layers of a built model their places, before its weights are loaded. Of a stage's model
        :meth:`survey` has seen the whole.

        Args:
            rules: the family's.

        Raises:
            UnsupportedModel: it has no layer that takes adapters.
            ConfigError: factors have another dtype than the activations, or adapters of towers are wanted,
                and there is no tower that takes some.
        """
        if context.dtype != self.dtype:
            raise ConfigError(
                f"lora.lora_dtype = {self.dtype!r}: must be the activations', {context.dtype!r}",
                field="lora.lora_dtype",
            )
        logits = self.logits if context.pooling is None else None
        self.places, self.refused = find_places(model, self.memory, self.tokens, logits, self.media)
        everywhere = {**self._elsewhere, **self.places}
        if not everywhere:
            raise UnsupportedModel(f"{type(model).__name__} takes no low-rank adapters (LoRA)")
        if self.media is not None and not any(map(_is_tower, everywhere.values())):
            raise ConfigError(
                f"lora.enable_tower_connector_lora = True: must be False: {type(model).__name__} has no "
                "tower or projector whose layers take adapters",
                field="lora.enable_tower_connector_lora",
            )
        self.names = ModuleNames(model, rules, everywhere)

    @property
    def num_slots(self) -> int:
        return self.memory.num_slots

    @property
    def num_bytes(self) -> int:
        """Bytes of the slots. Experts and tables add theirs once an adapter changes them."""
        return sum(place.num_bytes for place in self.places.values())

    @property
    def runs_eagerly(self) -> bool:
        """True while a slot's adapter changes layers that recorded steps know nothing of (experts, tables):
        steps with adapters must not be replayed then."""
        return any(place.is_late and place.filled for place in self.places.values())

    def read(self, path: str) -> ReadAdapter:
        """See :meth:`headrace_core.lora.AdapterSlots.read`."""
        self._checked(read_folder(Path(path), values=False))
        files = read_folder(Path(path))
        pieces = self._checked(files)
        own = set(map(id, self.places.values()))
        kept = self._kept([piece for piece in pieces if id(piece.place) in own])
        shared = {id(t): t.nbytes for piece in kept for t in piece.factors[:2]}
        changes_media = any(_is_tower(piece.place) for piece in pieces)
        return ReadAdapter(files.path, kept, sum(shared.values()), _digest(files), changes_media)

    def _checked(self, files: AdapterFiles) -> list[Piece]:
        """The parts of layers that an adapter is for, all of which have places.

        Raises: WeightsError, UnsupportedModel: it cannot be used; says why.
        """
        places, without = list[Piece](), list[str]()
        for module, pieces in self._pieces(files):
            places += pieces
            if not pieces and not self._names().is_unread(module):
                without.append(module)
        if without or not places:
            raise self._homeless(files, without)
        _check_once(files, places)
        self._check_ranks(files, places)
        _check_bases(files, self._names())
        return places

    def place(self, slot: int, adapter: ReadAdapter) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.place`."""
        if not 0 <= slot < self.num_slots:
            raise IndexError(f"slot {slot} of {self.num_slots}")
        for place in self.places.values():
            place.clear(slot)
        for piece in adapter.pieces:
            piece.place.place(slot, piece.key, piece.part, piece.factors)

    def choose(self, tokens: Tensor | None, logits: Tensor | None = None) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.choose`."""
        self.tokens.choose(tokens)
        self.logits.choose(logits)

    def choose_media(self, slot: int | None) -> None:
        """See :meth:`headrace_core.lora.AdapterSlots.choose_media`."""
        if self.media is not None:
            self.media.choose_slot(slot)

    def _pieces(self, files: AdapterFiles) -> Iterator[tuple[str, list[Piece]]]:
        """By module; []: it has no place."""
        names = self._names()
        for module, factors in files.factors.items():
            yield module, names.pieces(module, factors, files.path)
        for stack in files.stacks:
            place = names.mixture(stack.module)
            yield (
                stack.module,
                []
                if place is None
                else list(
                    stack_pieces(
                        place,
                        stack,
                        files.settings,
                        files.path,
                        interleaved=names.has_interleaved(place),
                    )
                ),
            )

    def _names(self) -> ModuleNames:
        assert self.names is not None, "the model is not built"
        return self.names

    def _check_ranks(self, files: AdapterFiles, pieces: Sequence[Piece]) -> None:
        largest = max(pieces, key=lambda piece: piece.factors.rank)
        if largest.factors.rank > self.memory.max_rank:
            raise UnsupportedModel(
                f"{files.path}: the factors of {largest.place.name!r} have rank {largest.factors.rank}: must "
                f"be at most max_lora_rank = {self.memory.max_rank}"
            )

    def _homeless(self, files: AdapterFiles, modules: list[str]) -> UnsupportedModel:
        reasons = {
            why for name, why in self.refused.items() if any(_is_of(m, name) for m in modules)
        }
        said = f" ({'; '.join(sorted(reasons))})" if reasons else ""
        kinds = sorted({_kind(name) for name in self._names().known()})
        what = (
            listed(modules)
            if modules
            else f"target_modules = {files.settings.target_modules!r:.200}"
        )
        return UnsupportedModel(
            f"{files.path}: no place in this model for {what}{said}; there are places for {', '.join(kinds)}"
        )

    def _kept(self, pieces: Sequence[Piece]) -> tuple[Piece, ...]:
        """Factors in memory of their own, as the slots hold them; each stored once, however many share it."""
        made: dict[tuple[int, ...], Tensor] = {}

        def own(tensor: Tensor) -> Tensor:
            key = (tensor.data_ptr(), tensor.storage_offset(), *tensor.shape, *tensor.stride())
            if key not in made:
                made[key] = torch.empty(tensor.shape, dtype=self.memory.like.dtype).copy_(tensor)
            return made[key]

        return tuple(
            piece._replace(
                factors=piece.factors._replace(
                    down=own(piece.factors.down), up=own(piece.factors.up)
                )
            )
            for piece in pieces
        )


class _NoFactors:
    """Factors of layers that are on another stage."""

    num_bytes = 0


class _NoMemory:
    """Stands for the op ``low_rank`` where nothing is ever written."""

    def allocate(self, *sizes: Any) -> _NoFactors:
        return _NoFactors()


def _is_tower(place: Place) -> bool:
    return isinstance(place.rows, MediaSlot)


def _kind(name: str) -> str:
    """A module's name with its numbers left out."""
    return ".".join("N" if part.isdigit() else part for part in name.split("."))


def _is_of(module: str, name: str) -> bool:
    """True if a module is a layer of this name, in some spelling, or below it."""
    return f"{name}." in f"{module}." or module.rpartition(".")[2] == name.rpartition(".")[2]


def _check_once(files: AdapterFiles, pieces: Sequence[Piece]) -> None:
    """Raises: WeightsError: two modules are one here, in two spellings or fused and apart."""
    seen: set[tuple[int, str, int]] = set()
    for place, key, part, _ in pieces:
        if (id(place), key, part) in seen:
            raise WeightsError(
                f"{files.path}: factors of {place.name!r} come twice, under two names"
            )
        seen.add((id(place), key, part))


def _check_bases(files: AdapterFiles, names: ModuleNames) -> None:
    """Weights of the base that PEFT stores beside factors of a table or a head are the model's own already;
    those of a changed vocabulary are not.

    Raises: WeightsError.
    """
    for module, (outputs, inputs) in files.base_shapes.items():
        is_table = module in files.factors and files.factors[module].is_table
        if is_table:
            outputs, inputs = inputs, outputs
        blank = Factors(torch.empty(1, inputs), torch.empty(outputs, 1), 1.0, is_table)
        names.pieces(module, blank, files.path)


def _digest(files: AdapterFiles) -> str:
    digest = hashlib.sha256()
    entries: list[tuple[str, Any, Tensor, Tensor]] = [
        (module, (factors.scale, factors.is_table), factors.down, factors.up)
        for module, factors in files.factors.items()
    ]
    for module, parameters, down, up in files.stacks:
        scales = [files.settings.scale_of(f"{module}.{name}") for name in parameters]
        entries.append((f"{module}.{down.shape[1]}", scales, down, up))
    for name, said, down, up in sorted(entries, key=lambda entry: entry[0]):
        digest.update(repr((name, said, [(t.dtype, t.shape) for t in (down, up)])).encode())
        for tensor in (down, up):
            digest.update(tensor.contiguous().view(torch.uint8).numpy().data)
    return digest.hexdigest()
