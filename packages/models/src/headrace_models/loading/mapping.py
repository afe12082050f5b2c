"""Map from a checkpoint's names to a model's slots and back, by the family's weight rules. No torch."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple, Protocol

from headrace_core.model import WeightRule
from headrace_models.layers.base import Slot

ALL_PARTS: tuple[int, ...] = ()
"""``WeightRule.split`` of a checkpoint tensor that holds several parts of its target (all in order, or
those of ``WeightRule.order``); their sizes are the target's own."""


_ONLY = "@"
"""Stands before a part's number in the name of a slot of one part (``TensorSpec.only_part``)."""
SHOWN = 10
"""Names that a message lists."""


def listed(names: Sequence[str], between: str = ", ") -> str:
    """The first :data:`SHOWN`, and how many more there are."""
    more = f" and {len(names) - SHOWN} more" if len(names) > SHOWN else ""
    return between.join(names[:SHOWN]) + more


class Place(NamedTuple):
    """A slot of a model."""

    leaf: str
    """Path of the leaf."""
    key: str
    """Name of the slot below it."""


class Wanted(NamedTuple):
    """A tensor that the checkpoint must have."""

    source: str
    place: Place
    part: int
    """The first that it holds."""
    shape: tuple[int, ...]
    """Shape as stored."""
    dtype: str | None


class Match(NamedTuple):
    """A rule applied to a tensor's name."""

    place: Place
    rule: WeightRule


class HasSlots(Protocol):
    """A :class:`~headrace_models.layers.base.WeightLayer`, or what stands for one."""

    def slots(self) -> Mapping[str, Slot]: ...


class WeightMap:
    """The rules of one built model.

    Args:
        leaves: by path.
    """

    def __init__(self, rules: Sequence[WeightRule], leaves: Mapping[str, HasSlots]) -> None:
        # Longest source first: the most specific rule that matches is the one that is meant. Of names
        # that the checkpoint may use, one for each target is the usual one.
        self.rules = sorted(rules, key=lambda rule: (rule.stacked, -len(rule.source)))
        self.slots = {path: leaf.slots() for path, leaf in leaves.items()}

    def find(self, name: str) -> Match | None:
        """Target of a checkpoint's tensor, or (with ``{}`` in the key) of its rows; None: it has none."""
        for rule in self.rules:
            target = _translate(rule.source, rule.target, name)
            place = None if target is None else self._place(target, rule)
            if place is not None and self._has_part(place, rule):
                return Match(place, rule)
        return None

    def is_transposed(self, name: str) -> bool:
        """True if a checkpoint's matrix of floats of this name is stored [in, out]."""
        match = self.find(name)
        return match is not None and is_transposed(
            self.slots[match.place.leaf][match.place.key], match.rule
        )

    def _has_part(self, place: Place, rule: WeightRule) -> bool:
        """A layer that makes queries only has no place for keys, which its family's rules know."""
        if rule.split is not None or rule.stacked:
            return True
        slot = self.slots[place.leaf][place.key]
        return slot.only_part is not None or rule.part < slot.num_parts

    def stack(self, match: Match) -> list[Place]:
        """The places of a stacked tensor's rows; of any other tensor, its own."""
        place, rule = match
        if not rule.stacked:
            return [place]
        slots = self.slots[place.leaf]
        found: list[Place] = []
        while (key := _numbered(place.key, len(found))) in slots:
            found.append(Place(place.leaf, key))
        return found

    def sources(self, place: Place, part: int) -> list[tuple[str, WeightRule]]:
        """Names under which the checkpoint may hold one part of a slot, the usual one first."""
        slot = self.slots[place.leaf][place.key]
        target = f"{place.leaf}.{place.key.partition(_ONLY)[0]}"
        found = []
        for rule in self.rules:
            if part not in parts_of(slot, rule):
                continue
            name = _translate(rule.target, rule.source, target)
            if name is not None:
                found.append((name, rule))
        return found

    def wanted(self) -> Iterator[Wanted]:
        """Every required tensor, by its usual name."""
        for leaf, slots in self.slots.items():
            for key, slot in slots.items():
                if slot.required:
                    yield from self._wanted(Place(leaf, key), slot)

    def _wanted(self, place: Place, slot: Slot) -> Iterator[Wanted]:
        covered: set[int] = set()
        for part in range(slot.num_parts):
            if part in covered:
                continue
            candidates = self.sources(place, part)
            if not candidates:
                raise LookupError(f"no weight rule leads to {place.leaf}.{place.key}, part {part}")
            source, rule = candidates[0]
            parts = parts_of(slot, rule)
            covered.update(parts)
            shape = stored_shape(slot, parts, rule)
            if rule.stacked:
                template = self.find(source)
                assert template is not None, source
                rows = self.stack(template)
                if place != rows[0]:
                    continue
                shape = (len(rows), *shape)
            yield Wanted(source, place, part, shape, slot.dtype)

    def _place(self, target: str, rule: WeightRule) -> Place | None:
        """Cut a full target name into leaf and slot, maybe the slot of the rule's part alone; of a stack, its
        first row's must be there."""
        leaf, key = target, ""
        while leaf:
            leaf, _, last = leaf.rpartition(".")
            key = f"{last}.{key}" if key else last
            if leaf in self.slots:
                keys = (key, f"{key}{_ONLY}{rule.part}")
                return next(
                    (Place(leaf, k) for k in keys if _numbered(k, 0) in self.slots[leaf]), None
                )
        return None


def parts_of(slot: Slot, rule: WeightRule) -> tuple[int, ...]:
    """The slot's parts in a tensor that the rule leads there, in the tensor's order."""
    if slot.only_part is not None:
        return (0,) if rule.split is None and rule.part == slot.only_part else ()
    if rule.split is None:
        return (rule.part,)
    return rule.order or tuple(range(slot.num_parts))


def stored_shape(slot: Slot, parts: Sequence[int], rule: WeightRule) -> tuple[int, ...]:
    """Shape in the checkpoint of a tensor that holds these parts."""
    shape = list(slot.source_shape(parts[0]))
    if slot.parts and slot.part_dim is not None:
        stored = (slot.parts[part] for part in parts)
        shape[slot.part_dim] = sum(part.whole for part in stored)
    if is_transposed(slot, rule) and len(shape) == 2:
        shape.reverse()
    return tuple(shape)


def is_transposed(slot: Slot, rule: WeightRule) -> bool:
    """True if a matrix that the rule leads to the slot is stored [in, out].

    Quantizers turn GPT-2's Conv1D before they pack it: a slot of another dtype than the model's, which is
    one of codes or of scales, has every layer the usual way round. Of experts in one tensor they do not.
    """
    return rule.transposed and (rule.stacked or slot.dtype is None)


def _numbered(key: str, row: int) -> str:
    """The slot of one row of a stack."""
    return key.replace("{}", str(row), 1)


def _translate(pattern: str, into: str, name: str) -> str | None:
    """``name``, which fits ``pattern`` plus an unchanged rest, spelled by ``into``; what ``into`` has
    more of ``{}`` stays."""
    found = _compiled(pattern).fullmatch(name)
    if found is None:
        return None
    *wildcards, rest = found.groups()
    values = iter(wildcards)
    return re.sub(r"\{\}", lambda _: next(values, "{}"), into) + (rest or "")


@functools.cache
def _compiled(pattern: str) -> re.Pattern[str]:
    return re.compile("([^.]+)".join(map(re.escape, pattern.split("{}"))) + r"(\..+)?")
