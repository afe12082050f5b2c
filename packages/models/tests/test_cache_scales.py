"""Scales of the cache that stand in a checkpoint."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_testing.model.decoders import PagedDriver, build_context

SUITE = families.TestLlama()
LAYER = "model.layers.{}.self_attn"
PROMPT = SUITE.prompt(20)


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return SUITE.make_checkpoint(tmp_path_factory.mktemp("llama")).path


def with_scales(plain: Path, folder: Path, scales: dict[str, Tensor]) -> Path:
    """The checkpoint with further tensors in its last layer."""
    path = shutil.copytree(plain, folder / "model")
    tensors = load_file(path / "model.safetensors")
    last = max(int(name.split(".")[2]) for name in tensors if name.startswith("model.layers."))
    more = {f"{LAYER.format(last)}.{name}": scale for name, scale in scales.items()}
    save_file(tensors | more, path / "model.safetensors", {"format": "pt"})
    return path


def load(path: Path, kv_cache_dtype: str = "fp8") -> Any:
    info = SUITE.resolve(path, max_model_len=64)
    return SUITE.load(info, build_context(info, kv_cache_dtype=kv_cache_dtype))


def last_spec(model: Any) -> Any:
    return [*model.attention_layers().values()][-1].spec


@pytest.mark.parametrize(
    ("names", "keys", "values"),
    [
        (("k_scale", "v_scale"), 0.25, 0.5),
        (("attn.k_scale", "attn.v_scale"), 0.25, 0.5),
        (("k_proj.k_scale", "v_proj.v_scale"), 0.25, 0.5),
        (("k_proj.output_scale", "v_proj.output_scale"), 0.25, 0.5),
        (("kv_scale",), 0.25, 0.25),
        (("v_scale",), None, 0.25),
    ],
)
@pytest.mark.parametrize("dtype", ["fp8", "fp8_e5m2"])
def test_every_name(
    names: tuple[str, ...],
    keys: float | None,
    values: float,
    dtype: str,
    plain: Path,
    tmp_path: Path,
) -> None:
    scales = {name: torch.tensor([scale]) for name, scale in zip(names, (0.25, 0.5))}
    spec = last_spec(load(with_scales(plain, tmp_path, scales), dtype))
    heads = spec.num_kv_heads
    assert spec.v_scale.tolist() == [values] * heads
    assert (spec.k_scale is None) if keys is None else (spec.k_scale.tolist() == [keys] * heads)


@pytest.mark.parametrize("shape", ["number", "heads"])
@pytest.mark.parametrize("kind", [torch.float32, torch.bfloat16, torch.float16])
def test_shapes_and_dtypes(shape: str, kind: torch.dtype, plain: Path, tmp_path: Path) -> None:
    heads = last_spec(load(plain)).num_kv_heads
    wanted = torch.tensor(0.5) if shape == "number" else 2.0 ** -torch.arange(1, heads + 1)[:, None]
    spec = last_spec(load(with_scales(plain, tmp_path, {"k_scale": wanted.to(kind)})))
    assert torch.equal(spec.k_scale, wanted.reshape(-1).expand(heads).float())


@pytest.mark.parametrize("dtype", ["auto", "int8"])
def test_other_caches_leave_them_out(dtype: str, plain: Path, tmp_path: Path) -> None:
    spec = last_spec(load(with_scales(plain, tmp_path, {"k_scale": torch.ones(1)}), dtype))
    assert spec.k_scale is None


@pytest.mark.parametrize("dtype", ["int8_per_token_head", "int4_per_token_head"])
def test_caches_with_scales_of_their_own_say_so(
    dtype: str, plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    scales = {"k_scale": torch.ones(1), "v_scale": torch.ones(1)}
    assert last_spec(load(with_scales(plain, tmp_path, scales), dtype)).k_scale is None
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert text.startswith("cache scales of 1 layers in the checkpoint are not used")


def test_layers_without_any_are_named(
    plain: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """Not those of a checkpoint that has none."""
    load(plain)
    assert not [record for record in caplog.records if record.levelname == "WARNING"]
    model = load(with_scales(plain, tmp_path, {"k_scale": torch.ones(1)}))
    (text,) = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    count = len(model.attention_layers())
    assert f"scales of {count} of {count} layers are missing" in text, "the last has none of values"
    assert LAYER.format(0) in text


@pytest.mark.parametrize(
    "name", ["q_scale", "attn.prob_scale", "q_proj.output_scale", "prob_output_scale"]
)
def test_those_of_queries_and_probabilities_are_passed_over(
    name: str, plain: Path, tmp_path: Path
) -> None:
    spec = last_spec(load(with_scales(plain, tmp_path, {name: torch.tensor(0.5)})))
    assert spec.k_scale is spec.v_scale is None


def test_they_change_what_is_stored(plain: Path, tmp_path: Path) -> None:
    """A scale of 2 ** -20 cuts every key off at 448 * 2 ** -20: as good as no key."""
    tiny = with_scales(plain, tmp_path, {"k_scale": torch.tensor(2.0**-20)})
    found, without = (PagedDriver(load(path)).step({"a": PROMPT}) for path in (tiny, plain))
    assert not torch.allclose(found, without, atol=1e-3)
    exact = with_scales(plain, tmp_path / "2", {"k_scale": torch.tensor(1.0)})
    assert torch.equal(PagedDriver(load(exact)).step({"a": PROMPT}), without)


@pytest.mark.parametrize("bad", [0.0, -1.0, float("nan"), float("inf")])
def test_what_is_no_scale(bad: float, plain: Path, tmp_path: Path) -> None:
    path = with_scales(plain, tmp_path, {"v_scale": torch.tensor(bad)})
    with pytest.raises(WeightsError, match=r"self_attn\.v_scale.*above 0|v_scale.*(NaN|finite)"):
        load(path)


def test_scales_of_other_heads(plain: Path, tmp_path: Path) -> None:
    path = with_scales(plain, tmp_path, {"k_scale": torch.ones(77)})
    with pytest.raises(WeightsError, match=r"self_attn\.k_scale.*one float, or one for each"):
        load(path)


def test_names_of_no_layer_are_left_over(plain: Path, tmp_path: Path) -> None:
    path = with_scales(plain, tmp_path, {"k_proj.v_scale": torch.ones(1)})
    with pytest.raises(WeightsError, match=r"k_proj\.v_scale.*belongs to no layer"):
        load(path)
