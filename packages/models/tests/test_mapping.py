from __future__ import annotations

from collections.abc import Mapping

import pytest
from torch import Tensor

from headrace_core.model import WeightRule
from headrace_models.layers.base import Part, Shard, Slot, WeightLayer
from headrace_models.loading.mapping import ALL_PARTS, Place, WeightMap


class Leaf(WeightLayer):
    def __init__(self, **slots: Slot) -> None:
        self.name = "leaf"
        self._slots = slots

    def slots(self) -> Mapping[str, Slot]:
        return self._slots

    def load(self, tensors: Mapping[str, Tensor]) -> None: ...


FUSED = Slot((6, 4), parts=(Part(4), Part(2)))


def test_wildcards_stand_for_one_component_each() -> None:
    leaves = {"layers.0.experts": Leaf(**{"7.down.weight": Slot((2, 2))})}
    rules = (WeightRule("m.{}.moe.{}.w2", "layers.{}.experts.{}.down"),)
    weights = WeightMap(rules, leaves)
    found = weights.find("m.0.moe.7.w2.weight")
    assert found is not None
    assert found.place == Place("layers.0.experts", "7.down.weight")
    assert weights.find("m.0.moe.8.w2.weight") is None
    assert weights.find("m.0.x.moe.7.w2.weight") is None
    assert weights.find("xm.0.moe.7.w2.weight") is None
    assert [wanted.source for wanted in weights.wanted()] == ["m.0.moe.7.w2.weight"]


def test_dots_in_rules_are_literal() -> None:
    weights = WeightMap((WeightRule("a.b", "t"),), {"t": Leaf(weight=Slot((1,)))})
    assert weights.find("aXb.weight") is None


def test_most_specific_rule_wins() -> None:
    leaves = {"norm": Leaf(weight=Slot((1,))), "other": Leaf(weight=Slot((1,)))}
    rules = (WeightRule("{}.norm", "other"), WeightRule("model.norm", "norm"))
    found = WeightMap(rules, leaves).find("model.norm.weight")
    assert found is not None
    assert found.place.leaf == "norm"


def test_a_tensor_may_hold_some_of_the_parts() -> None:
    slot = Slot((7, 4), parts=(Part(4), Part(2), Part(1)))
    rules = (WeightRule("qg", "all", split=ALL_PARTS, order=(0, 2)), WeightRule("k", "all", part=1))
    wanted = list(WeightMap(rules, {"all": Leaf(weight=slot)}).wanted())
    assert [(w.source, w.part, w.shape) for w in wanted] == [
        ("qg.weight", 0, (5, 4)), ("k.weight", 1, (2, 4)),
    ]  # fmt: skip


def test_parts_and_their_names() -> None:
    rules = (WeightRule("q", "qk", part=0), WeightRule("k", "qk", part=1))
    wanted = list(WeightMap(rules, {"qk": Leaf(weight=FUSED)}).wanted())
    assert [(w.source, w.part, w.shape) for w in wanted] == [
        ("q.weight", 0, (4, 4)), ("k.weight", 1, (2, 4)),
    ]  # fmt: skip


def test_parts_that_are_stored_differently_have_slots_of_their_own() -> None:
    rules = (WeightRule("q", "qk", part=0), WeightRule("k", "qk", part=1))
    alone = Leaf(**{"weight@0": Slot((4, 4), only_part=0), "codes@1": Slot((1, 4), only_part=1)})
    weights = WeightMap(rules, {"qk": alone})
    assert [(w.source, w.part, w.shape) for w in weights.wanted()] == [
        ("q.weight", 0, (4, 4)), ("k.codes", 0, (1, 4)),
    ]  # fmt: skip
    found = weights.find("k.codes")
    assert found is not None
    assert found.place == Place("qk", "codes@1")
    assert weights.find("k.weight") is None


def test_all_parts_in_one_tensor() -> None:
    rules = (WeightRule("qk_proj", "qk", split=ALL_PARTS, transposed=True),)
    wanted = list(WeightMap(rules, {"qk": Leaf(weight=FUSED)}).wanted())
    assert [(w.source, w.part, w.shape) for w in wanted] == [("qk_proj.weight", 0, (4, 6))]


def test_some_parts_in_one_tensor() -> None:
    """Query by itself, key and value together (TeleChat)."""
    slot = Slot((8, 4), parts=(Part(4), Part(2), Part(2)))
    rules = (
        WeightRule("query", "qkv"),
        WeightRule("key_value", "qkv", split=ALL_PARTS, order=(1, 2)),
    )
    wanted = list(WeightMap(rules, {"qkv": Leaf(weight=slot)}).wanted())
    assert [(w.source, w.part, w.shape) for w in wanted] == [
        ("query.weight", 0, (4, 4)), ("key_value.weight", 1, (4, 4)),
    ]  # fmt: skip


def test_shapes_in_the_checkpoint_are_whole() -> None:
    slot = Slot(
        (6, 4), parts=(Part(4, Shard(2, 1)), Part(2, Shard(1, 0))), in_dim=1, in_shard=Shard(3, 0)
    )
    assert slot.source_shape(0) == (8, 12)
    assert slot.source_shape(1) == (2, 12)


def test_slot_without_rule_is_an_error_of_the_family() -> None:
    with pytest.raises(LookupError, match=r"no weight rule leads to qk\.weight"):
        list(WeightMap((), {"qk": Leaf(weight=FUSED)}).wanted())


EXPERTS = Leaf(**{f"{i}.{key}": FUSED for i in range(3) for key in ("gate_up.weight",)})
STACKED = WeightRule(
    "m.{}.gate_up_proj", "layers.{}.experts.{}.gate_up.weight", split=ALL_PARTS, stacked=True
)


def test_a_stack_has_a_place_for_each_row() -> None:
    weights = WeightMap((STACKED,), {"layers.4.experts": EXPERTS})
    found = weights.find("m.4.gate_up_proj")
    assert found is not None
    assert weights.stack(found) == [
        Place("layers.4.experts", f"{i}.gate_up.weight") for i in range(3)
    ]
    wanted = list(weights.wanted())
    assert [(w.source, w.shape) for w in wanted] == [("m.4.gate_up_proj", (3, 6, 4))]
    assert weights.find("m.5.gate_up_proj") is None


def test_one_tensor_for_each_target_is_the_usual_layout() -> None:
    single = WeightRule("m.{}.{}.w", "layers.{}.experts.{}.gate_up", split=ALL_PARTS)
    weights = WeightMap((STACKED, single), {"layers.4.experts": EXPERTS})
    assert [w.source for w in weights.wanted()] == [f"m.4.{i}.w.weight" for i in range(3)]
