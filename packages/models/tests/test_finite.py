"""Weights that are not finite are refused when they are read."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import test_families as families
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from test_loader import copy, logits_of
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_models.loading.finite import check_finite
from headrace_models.loading.loader import load_model
from headrace_models.loading.sharded_state import save_sharded_state
from headrace_testing.model.decoders import Checkpoint, build_context

LLAMA = families.TestLlama()
BAD = "model.layers.1.mlp.down_proj.weight"
FLOATS = [torch.bfloat16, torch.float16, torch.float32, torch.float64]


@pytest.fixture(scope="module")
def llama(tmp_path_factory: pytest.TempPathFactory) -> Checkpoint:
    return LLAMA.make_checkpoint(tmp_path_factory.mktemp("llama"))


def spoiled(value: float) -> Callable[[dict[str, Tensor]], None]:
    def change(tensors: dict[str, Tensor]) -> None:
        tensors[BAD][3, 5] = value

    return change


@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_a_model_with_one_bad_weight_is_refused(
    llama: Checkpoint, tmp_path: Path, value: float
) -> None:
    with pytest.raises(WeightsError) as refused:
        LLAMA.open(copy(llama, tmp_path, spoiled(value)))
    kind = "NaN" if value != value else "infinite"
    assert f"model.safetensors: tensor '{BAD}' [72, 100] has 1 {kind} of 7200 values" in str(
        refused.value
    )


def test_a_sharded_state_with_a_bad_weight_is_refused(llama: Checkpoint, tmp_path: Path) -> None:
    info = LLAMA.resolve(llama.path)
    [file] = save_sharded_state(info, build_context(info), tmp_path)
    with safe_open(file, "pt") as stored:
        facts = stored.metadata()
    tensors = load_file(file)
    name = next(name for name, tensor in tensors.items() if tensor.is_floating_point())
    tensors[name].view(-1)[0] = float("nan")
    save_file(tensors, file, metadata=facts)
    moved = LLAMA.resolve(tmp_path)
    with pytest.raises(WeightsError, match=f"{file.name}: tensor '{name}'.* has 1 NaN"):
        load_model(moved, build_context(moved))


def test_tensors_that_the_model_does_not_read_may_hold_anything(
    llama: Checkpoint, tmp_path: Path
) -> None:
    def add(tensors: dict[str, Tensor]) -> None:
        tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = torch.full((9,), float("nan"))

    changed = copy(llama, tmp_path, add)
    assert torch.equal(logits_of(LLAMA, changed), logits_of(LLAMA, llama.path))


@pytest.mark.parametrize("dtype", FLOATS)
@pytest.mark.parametrize("index", [0, 1_000_003, -1])
@pytest.mark.parametrize("value", [float("nan"), float("inf"), float("-inf")])
def test_one_value_among_many(dtype: torch.dtype, index: int, value: float) -> None:
    tensor = torch.ones(1_000_017, dtype=dtype)
    tensor[index] = value
    with pytest.raises(WeightsError, match="'w'"):
        check_finite("w", tensor, Path("f"))


def test_infinities_that_cancel_each_other_are_seen() -> None:
    tensor = torch.ones(4096)
    tensor[0], tensor[1] = float("inf"), float("-inf")
    with pytest.raises(WeightsError, match="2 infinite of 4096"):
        check_finite("w", tensor, Path("f"))


@pytest.mark.parametrize("dtype", FLOATS)
def test_a_sum_that_overflows_is_no_fault(dtype: torch.dtype) -> None:
    check_finite("w", torch.full((70_000,), torch.finfo(dtype).max, dtype=dtype), Path("f"))


def test_a_bias_may_mask() -> None:
    bias = torch.zeros(9)
    bias[4] = float("-inf")
    check_finite("lm_head.bias", bias, Path("f"))
    for value in (float("inf"), float("nan")):
        bias[5] = value
        with pytest.raises(WeightsError, match=r"lm_head\.bias"):
            check_finite("lm_head.bias", bias, Path("f"))


@pytest.mark.parametrize(
    "dtype", [torch.int8, torch.uint8, torch.float8_e4m3fn, torch.float8_e8m0fnu]
)
def test_codes_are_not_judged(dtype: torch.dtype) -> None:
    check_finite("w", torch.full((16,), 255, dtype=torch.uint8).view(dtype), Path("f"))


def test_empty_tensors_are_finite() -> None:
    check_finite("w", torch.empty(0), Path("f"))


@pytest.mark.parametrize("value", [float("inf"), -float("inf")])
def test_a_single_number_may_be_a_bound_that_is_infinite(value: float) -> None:
    check_finite("layers.0.input_max", torch.tensor(value), Path("a.safetensors"))
    with pytest.raises(WeightsError, match="infinite"):
        check_finite("layers.0.weight", torch.tensor([value, 1.0]), Path("a.safetensors"))


def test_a_bound_is_a_number() -> None:
    with pytest.raises(WeightsError, match="1 NaN"):
        check_finite("layers.0.input_max", torch.tensor(float("nan")), Path("a.safetensors"))
