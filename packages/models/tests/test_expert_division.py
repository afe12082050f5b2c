"""Whole experts on several ranks: each rank loads its own only, and their shares are the mixture."""

from __future__ import annotations

import dataclasses
import functools
import json
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import test_latent_families as latent
import torch
from test_experts import EXPERTS, HIDDEN, INFO, INNER, Integers, routing
from test_loader import copy
from torch import Tensor

from headrace_core.errors import ConfigError, UnsupportedModel, WeightsError
from headrace_core.linear import QuantMethod
from headrace_core.parallel import Communicator
from headrace_models.layers.base import walk
from headrace_models.layers.moe.division import ExpertDivision, initial_places
from headrace_models.layers.moe.experts import GATED_NAMES, Experts
from headrace_models.layers.moe.moving import slot_weights
from headrace_models.loading.loader import Built, load_model
from headrace_models.weight_bytes import kept_bytes
from headrace_testing.model.decoders import Checkpoint, PagedDriver, build_context, run_ranks

MIXTRAL, LONGCAT = families.TestMixtral(), latent.TestLongcatFlash()


@pytest.fixture(scope="module")
def mixtral(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return MIXTRAL.make_checkpoint(tmp_path_factory.mktemp("mixtral"))


@pytest.mark.parametrize(
    ("strategy", "redundant", "expected"),
    [
        ("linear", 0, [[0, 1, 2], [3, 4]]),
        ("round_robin", 0, [[0, 2, 4], [1, 3]]),
        ("linear", 3, [[0, 1, 2, 3], [4, 0, 1, 2]]),
    ],
)
def test_first_places(strategy: str, redundant: int, expected: list[list[int]]) -> None:
    assert initial_places(5, 2, strategy, redundant) == expected


def layer(
    group: Communicator | None,
    division: ExpertDivision | None,
    names: tuple[str, ...] = GATED_NAMES,
    quant: QuantMethod | None = None,
    **options: Any,
) -> Experts:
    """Experts with weights, the same whoever has them."""
    context = build_context(INFO, communicator=group, quant=quant)
    context = dataclasses.replace(context, experts=division)
    modules = [f"mlp.experts.{index}" for index in range(EXPERTS)]
    made = Experts(context, modules, HIDDEN, INNER, "silu", module_names=names, top_k=2, **options)
    generator = torch.Generator().manual_seed(1)
    drawn = {
        name: torch.randn(slot.shape, generator=generator) / 4
        for name, slot in made.slots().items()
    }
    made.load({name: drawn[name] for name, slot in made.slots().items() if slot.copies})
    return made


@pytest.mark.parametrize("stored", ["floats", "joined", "apart"])
@pytest.mark.parametrize("names", [GATED_NAMES, ("up_proj", "down_proj")], ids=len)
@pytest.mark.parametrize("redundant", [0, 2])
@pytest.mark.parametrize("identities", [0, 1])
@pytest.mark.parametrize("weighed", [True, False])
def test_shares_add_up(
    stored: str, names: tuple[str, ...], redundant: int, identities: int, weighed: bool
) -> None:
    quant = None if stored == "floats" else Integers(stored == "apart")
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()
    ids = (ids + identities) % (EXPERTS + identities)
    by = weights if weighed else None
    make = functools.partial(layer, names=names, quant=quant, identities=identities)
    expected = make(None, None)(x, by, ids)

    def share(group: Communicator) -> Tensor:
        return make(group, ExpertDivision(redundant=redundant))(x, by, ids)

    shares = run_ranks(3, share)
    torch.testing.assert_close(sum(shares), expected, atol=1e-5, rtol=1e-5)
    assert all(bool(one.abs().max()) for one in shares), "each rank has something to do"


def test_a_tokens_share_does_not_depend_on_others() -> None:
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()

    def share(group: Communicator) -> tuple[Tensor, Tensor]:
        made = layer(group, ExpertDivision(redundant=4))
        alone = [made(x[i : i + 1], weights[i : i + 1], ids[i : i + 1]) for i in range(9)]
        return made(x, weights, ids), torch.cat(alone)

    for together, alone in run_ranks(2, share):
        torch.testing.assert_close(together, alone, atol=1e-5, rtol=1e-5)


def test_copies_share_an_experts_tokens() -> None:
    """Four experts, each on both ranks: each rank gets some tokens of each."""
    x = torch.randn(200, HIDDEN, generator=torch.Generator().manual_seed(2))

    def taken(group: Communicator) -> Tensor:
        placement = layer(group, ExpertDivision(redundant=4)).placement
        assert placement is not None
        ids = torch.arange(200).remainder(EXPERTS)[:, None]
        slots, _ = placement.find(x, ids)
        return (slots < placement.absent).flatten()

    first, second = run_ranks(2, taken)
    assert bool((first ^ second).all()), "one of them, and only one"
    assert all(10 < int(first[expert::EXPERTS].sum()) < 40 for expert in range(EXPERTS))


@pytest.mark.parametrize("names", [GATED_NAMES, ("up_proj", "down_proj")], ids=len)
@pytest.mark.parametrize("stored", ["floats", "joined"])
def test_experts_change_places(names: tuple[str, ...], stored: str) -> None:
    """A layer whose slots are overwritten by those of one that began so is the same, bit for bit."""
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()
    quant = None if stored == "floats" else Integers(False)

    def work(group: Communicator) -> tuple[Tensor, Tensor]:
        made = layer(group, ExpertDivision(), names, quant)
        other = layer(group, ExpertDivision("round_robin"), names, quant)
        held, wanted = slot_weights(made), slot_weights(other)
        assert held is not None
        assert wanted is not None
        assert other.placement is not None
        assert made.placement is not None
        for own, source in zip(held, wanted, strict=True):
            for tensor, new in zip(own, source, strict=True):
                tensor.copy_(new)
        made.placement.put(other.placement.places)
        return made(x, weights, ids), other(x, weights, ids)

    for moved, expected in run_ranks(2, work):
        assert torch.equal(moved, expected)


def test_experts_that_nothing_joins_cannot_move() -> None:
    assert slot_weights(layer(None, None, quant=Integers(True))) is None


def test_counts_are_of_the_last_step() -> None:
    x = torch.randn(9, HIDDEN, generator=torch.Generator().manual_seed(2))
    weights, ids = routing()

    def work(group: Communicator) -> list[list[int]]:
        made = layer(group, ExpertDivision(counts=9))
        assert made.placement is not None
        found = []
        for rows in (9, 4, 0):
            if rows:
                made(x[:rows], weights[:rows], ids[:rows])
            found.append(made.placement.take_counts().tolist())
        return found

    expected = [torch.bincount(ids[:n].flatten(), minlength=EXPERTS).tolist() for n in (9, 4, 0)]
    assert run_ranks(2, work) == [expected] * 2


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_a_rank_keeps_its_own_experts_only(mixtral: Checkpoint, ranks: int) -> None:
    info = MIXTRAL.resolve(mixtral.path, max_model_len=64)
    whole = build_context(info)

    def work(group: Communicator) -> tuple[list[int], int]:
        only_experts = dataclasses.replace(whole, experts=ExpertDivision(), communicator=group)
        context = dataclasses.replace(
            only_experts,
            config={**info.config, "num_attention_heads": 12, "num_key_value_heads": 12},
        )
        model: Any = Built.of(info, context).model
        made = [piece for _, piece in walk(model) if isinstance(piece, Experts)]
        return made[0].numbers, sum(kept_bytes(piece, "float32") for piece in made)

    model: Any = Built.of(info, whole).model
    total = sum(kept_bytes(p, "float32") for _, p in walk(model) if isinstance(p, Experts))
    count = info.config["num_local_experts"]
    found = run_ranks(ranks, work)
    assert sorted(number for numbers, _ in found for number in numbers) == list(range(count))
    assert [size * count for _, size in found] == [total * len(numbers) for numbers, _ in found]


def _divided(checkpoint: Path, suite: Any, **options: Any) -> list[Tensor]:
    info = suite.resolve(checkpoint, max_model_len=64)

    def work(group: Communicator) -> Tensor:
        context = build_context(info, communicator=group)
        context = dataclasses.replace(context, experts=ExpertDivision(**options))
        return PagedDriver(load_model(info, context)).step({"a": suite.prompt(20)})

    return run_ranks(2, work)


@pytest.mark.parametrize("suite", [MIXTRAL, LONGCAT], ids=lambda s: type(s).__name__)
@pytest.mark.parametrize("redundant", [0, 2])
def test_models_say_the_same(suite: Any, redundant: int, tmp_path: Path) -> None:
    checkpoint = suite.make_checkpoint(tmp_path)
    expected = checkpoint.logprobs(suite.prompt(20))
    for logits in _divided(checkpoint.path, suite, redundant=redundant):
        suite.assert_close(logits, expected)


def test_what_another_rank_keeps_must_be_there_all_the_same(
    mixtral: Checkpoint, tmp_path: Path
) -> None:
    def drop(tensors: dict[str, Tensor]) -> None:
        for name in [n for n in tensors if ".experts.3." in n or "gate_up_proj" in n]:
            del tensors[name]

    path = copy(mixtral, tmp_path, drop)
    info = MIXTRAL.resolve(path, max_model_len=64)

    def work(group: Communicator) -> str:
        context = build_context(info, communicator=group)
        with pytest.raises(WeightsError, match=r"missing.*experts") as caught:
            load_model(info, dataclasses.replace(context, experts=ExpertDivision()))
        return str(caught.value)

    first, second = run_ranks(2, work)
    assert first == second


def test_fewer_experts_than_ranks_are_refused() -> None:
    with pytest.raises(UnsupportedModel, match=r"4 experts cannot be divided over.*= 5.*at most"):
        run_ranks(5, lambda group: layer(group, ExpertDivision()))


@pytest.mark.parametrize(("redundant", "fine"), [(0, False), (1, False), (2, True)])
def test_slots_of_experts_that_move_are_equally_many(redundant: int, fine: bool) -> None:
    def work(group: Communicator) -> None:
        layer(group, ExpertDivision(redundant=redundant, may_move=True))

    if fine:
        run_ranks(3, work)
        return
    with pytest.raises(ConfigError, match=r"num_redundant_experts.*multiple of.* = 3: set 2"):
        run_ranks(3, work)


def test_a_sharded_state_is_refused(mixtral: Checkpoint, tmp_path: Path) -> None:
    from headrace_models.loading.sharded_state import save_sharded_state

    info = MIXTRAL.resolve(mixtral.path, max_model_len=64)
    save_sharded_state(
        dataclasses.replace(info, name=str(mixtral.path)), build_context(info), tmp_path
    )
    saved = MIXTRAL.resolve(tmp_path, max_model_len=64)
    context = dataclasses.replace(build_context(saved), experts=ExpertDivision())
    with pytest.raises(UnsupportedModel, match=r"sharded state.*expert parallelism"):
        load_model(saved, context)
    assert json.loads((tmp_path / "config.json").read_text())
