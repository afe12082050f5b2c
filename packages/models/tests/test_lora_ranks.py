"""Adapters of a model whose layers are cut over ranks: both modes are one rank's, in float32."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import test_vision_language as vision
import torch
from adapter_files import with_adapters
from test_lora_peft import GPT_OSS, OWN, SIZES, add, reference, run
from torch import Tensor

from headrace_core.config import LoadConfig, ModelConfig
from headrace_core.errors import HeadraceError
from headrace_core.model import CausalLM
from headrace_core.ops import KernelNeed, bind_ops
from headrace_core.ops.optional.low_rank import LOW_RANK
from headrace_core.parallel import Communicator, SingleProcess
from headrace_core.platform import CpuPlatform
from headrace_models.layers.base import WHOLE, Part, Shard
from headrace_models.layers.moe.division import ExpertDivision
from headrace_models.loading.loader import load_model
from headrace_models.lora.adapters import Adapters
from headrace_models.lora.places import LinearPlace, Memory
from headrace_models.lora.rows import RowSlots
from headrace_models.lora.sharded_place import ShardedPlace
from headrace_models.resolve import resolve
from headrace_testing.model.adapters import write_adapter
from headrace_testing.model.decoders import build_context, run_ranks

EIGHT = {**SIZES, "hidden_size": 64, "intermediate_size": 96}
FAMILIES: dict[str, dict[str, Any]] = {
    "Llama": EIGHT, "Phi3": EIGHT, "Mixtral": OWN["Mixtral"], "GptOss": GPT_OSS,
    "DeepseekV3": OWN["DeepseekV3"],
}  # fmt: skip


def opened(
    folder: Path,
    communicator: Communicator,
    *,
    native: bool = False,
    division: ExpertDivision | None = None,
    **settings: Any,
) -> tuple[CausalLM, Adapters]:
    info = resolve(ModelConfig(model=str(folder), max_model_len=64), LoadConfig(), CpuPlatform())
    more = {"ops": bind_ops(KernelNeed(device="cpu", dtype="float32"))} if native else {}
    context = build_context(info, communicator=communicator, **more)
    context = dataclasses.replace(context, experts=division)
    context, slots = with_adapters(context, most=96, max_loras=3, **settings)
    return load_model(info, context), slots


def adapters_of(model: Any, folder: Path) -> list[Path]:
    """Of all linear layers, one whose rank no number of ranks divides, and one of rank 1."""
    linear = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    experts = {name: module for name, module in model.named_modules() if name.endswith(".experts")}
    stacked: dict[str, tuple[int, int]] = {}
    for name, module in experts.items():
        first, last = module.gate_up_proj, module.down_proj
        sides = (1, 2) if not getattr(module, "is_transposed", False) else (2, 1)
        for index in range(len(first)):
            half = first.shape[sides[0]] // 2
            stacked |= {
                f"{name}.{index}.{part}": (half, first.shape[sides[1]])
                for part in ("gate_proj", "up_proj")
            }
            stacked[f"{name}.{index}.down_proj"] = last.shape[sides[0]], last.shape[sides[1]]
    for rank in (8, 5, 1):
        write_adapter(folder / str(rank), {**linear, **stacked}, rank, seed=rank, scale=0.5)
    return [folder / str(rank) for rank in (8, 5, 1)]


@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.parametrize("fully_sharded", [False, True])
def test_two_ranks_are_one(
    tmp_path: Path, family: str, fully_sharded: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(OWN, family, FAMILIES[family])
    model = reference(family)
    model.save_pretrained(tmp_path / "base")
    folders = adapters_of(model, tmp_path)
    order = [0, 2, -1, 1, 0]

    def work(communicator: Communicator) -> list[Tensor]:
        own, slots = opened(tmp_path / "base", communicator, fully_sharded=fully_sharded)
        for slot, folder in enumerate(folders):
            slots.place(slot, slots.read(str(folder)))
        sharded = [isinstance(place, ShardedPlace) for place in slots.places.values()]
        assert any(sharded) is (fully_sharded and communicator.world_size > 1)
        found = run(own, slots, order)
        slots.choose(None)
        return found

    expected = work(SingleProcess())
    assert float((expected[0] - expected[2]).abs().max()) > 0.1
    for ranks in run_ranks(2, work):
        for found, wanted in zip(ranks, expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_experts_that_are_whole_on_a_rank_take_no_adapters(tmp_path: Path) -> None:
    """Other layers do."""
    model = reference("Mixtral")
    model.save_pretrained(tmp_path / "base")
    of_experts = adapters_of(model, tmp_path)[0]
    linear = {
        name: tuple(module.weight.shape)
        for name, module in model.named_modules()
        if isinstance(module, torch.nn.Linear)
    }
    write_adapter(tmp_path / "other", linear, 4, scale=0.5)

    def work(communicator: Communicator) -> list[Tensor]:
        whole = communicator.world_size > 1
        division = ExpertDivision() if whole else None
        own, slots = opened(tmp_path / "base", communicator, division=division)
        if whole:
            with pytest.raises(HeadraceError, match=r"experts.*enable_expert_parallel"):
                slots.read(str(of_experts))
        slots.place(0, slots.read(str(tmp_path / "other")))
        return run(own, slots, [0, -1])

    expected = work(SingleProcess())
    assert float((expected[0] - expected[1]).abs().max()) > 0.1
    for ranks in run_ranks(2, work):
        for found, wanted in zip(ranks, expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("family", ["Llama", "Gemma3"])
def test_tables_and_heads_that_are_divided(family: str, tmp_path: Path) -> None:
    """Each has a weight of its own, or both are one; two ranks do not divide the 131 tokens."""
    model = reference(family)
    model.save_pretrained(tmp_path / "base")
    targets = ["down_proj", "embed_tokens", "lm_head"]
    add(model, tmp_path / "adapter", 0, r=8, target_modules=targets)

    def work(communicator: Communicator) -> list[Tensor]:
        own, slots = opened(tmp_path / "base", communicator)
        slots.place(0, slots.read(str(tmp_path / "adapter")))
        found = run(own, slots, [0, -1])
        slots.choose(None)
        return found

    expected = work(SingleProcess())
    assert float((expected[0] - expected[1]).abs().max()) > 0.01
    for ranks in run_ranks(2, work):
        for found, wanted in zip(ranks, expected, strict=True):
            torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


def test_four_ranks_with_native_kernels(tmp_path: Path) -> None:
    """There are fewer heads of keys than ranks; a slot that is used again forgets what it held."""
    model = reference("Llama")
    model.save_pretrained(tmp_path / "base")
    folders = adapters_of(model, tmp_path)

    def work(communicator: Communicator, fully_sharded: bool = True) -> list[Tensor]:
        own, slots = opened(
            tmp_path / "base", communicator, native=True, fully_sharded=fully_sharded
        )
        read = [slots.read(str(folder)) for folder in folders]
        slots.place(0, read[0])
        slots.place(1, read[1])
        first = run(own, slots, [0, 1, -1])
        slots.place(0, read[2])
        return [*first, *run(own, slots, [0, 1])]

    expected = work(SingleProcess())
    for ranks in (run_ranks(4, work), run_ranks(4, lambda group: work(group, False))):
        for one in ranks:
            for found, wanted in zip(one, expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)


@pytest.mark.parametrize("cuts_inputs", [False, True])
def test_a_slot_takes_less_memory(cuts_inputs: bool) -> None:
    ops = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})
    memory = Memory(ops.optional(LOW_RANK), 1, 16, torch.empty(0))

    def taken(communicator: Communicator) -> tuple[int, int]:
        rows, world = RowSlots("tokens", 1, "cpu"), communicator.world_size
        shard = Shard(world, communicator.rank)
        inputs, parts, cut = 4096, (Part(2048 // world, shard),) * 2, WHOLE
        if cuts_inputs:
            inputs, parts, cut = 4096 // world, (Part(4096),), shard
        plain = LinearPlace(memory, "x", rows, inputs, parts, in_shard=cut)
        sharded = ShardedPlace(memory, "x", rows, inputs, parts, communicator, in_shard=cut)
        return plain.num_bytes, sharded.num_bytes

    for plain, sharded in run_ranks(4, taken):
        assert sharded < 0.5 * plain


def test_towers_are_cut_like_layers(tmp_path: Path) -> None:
    case = vision.TestQwen2VL()
    torch.manual_seed(0)
    made = case.hf_class()(case.hf_config()).eval()
    case.save(made, tmp_path / "base")
    linear = {
        name: tuple(module.weight.shape)
        for name, module in made.named_modules()
        if isinstance(module, torch.nn.Linear) and "visual" in name
    }
    write_adapter(tmp_path / "adapter", linear, 5, scale=1.0)

    def work(communicator: Communicator, fully_sharded: bool) -> list[Tensor]:
        info = resolve(ModelConfig(model=str(tmp_path / "base")), LoadConfig(), CpuPlatform())
        info = dataclasses.replace(info, processor=info.architecture)
        context, slots = with_adapters(
            build_context(info, communicator=communicator), towers=True, fully_sharded=fully_sharded
        )
        model = load_model(info, context)
        slots.place(1, slots.read(str(tmp_path / "adapter")))
        slots.choose_media(1)
        return case.embed(model, case.images())

    expected = work(SingleProcess(), False)
    for fully in (False, True):
        for ranks in run_ranks(2, lambda group, fully=fully: work(group, fully)):
            for found, wanted in zip(ranks, expected, strict=True):
                torch.testing.assert_close(found, wanted, atol=1e-4, rtol=0)
