"""TorchAO's tensors in PyTorch's own files: taken apart, without TorchAO."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from headrace_core.errors import WeightsError
from headrace_models.formats.pickled import read_pickled

LIBRARY = Path(__file__).parent / "data" / "torchao-0.18.0.bin"
"""``torch.save`` of layers [4, 32] that torchao 0.18.0 quantized; ``meant`` is its own dequantization."""


@pytest.fixture
def library() -> Iterator[ModuleType]:
    """A module of the name of TorchAO's, whose classes pickles can be made of."""
    module = ModuleType("torchao.quantization")
    with mock.patch.dict(sys.modules, {"torchao": ModuleType("torchao"), module.__name__: module}):
        yield module


def written(
    module: ModuleType, folder: Path, kind: str, beside: str = "m.bias", **attributes: Any
) -> Path:
    """A file with one tensor of a class of TorchAO's, and a plain one beside it."""

    def refuse(cls: type, *_: object) -> object:
        raise AssertionError(cls)

    made = type(kind, (Tensor,), {"__torch_dispatch__": classmethod(refuse)})
    made.__module__ = module.__name__
    setattr(module, kind, made)
    tensor = Tensor._make_wrapper_subclass(made, (2, 4), dtype=torch.bfloat16)
    vars(tensor).update(attributes)
    file = folder / "pytorch_model.bin"
    torch.save({"m.weight": tensor, beside: torch.ones(2)}, file)
    return file


@pytest.mark.parametrize("eager", [False, True])
def test_the_librarys_file(eager: bool) -> None:
    found = read_pickled(LIBRARY, eager=eager)
    assert {name.partition(".")[0] for name in found} == {"int8", "int8-dynamic", "int4", "fp8"}
    for case in ("int8", "int8-dynamic", "int4", "fp8"):
        codes = found[f"{case}._weight_qdata"].float()
        scales = found[f"{case}._weight_scale"]
        zeros = found.get(f"{case}._weight_zero_point", torch.zeros(1)).float()
        groups = codes.view(4, scales.shape[1], -1)
        meant = (groups - zeros.view(-1, zeros.shape[-1], 1)) * scales[..., None]
        torch.testing.assert_close(meant.view(4, 32), found[f"{case}.meant"], rtol=3e-7, atol=1e-9)
    assert all(type(tensor) is Tensor for tensor in found.values())


def test_other_tensors_stay(library: ModuleType, tmp_path: Path) -> None:
    parts = {"qdata": torch.ones(2, 4, dtype=torch.int8), "scale": torch.ones(2, 1)}
    file = written(library, tmp_path, "Int8Tensor", **parts, act_pre_scale=None, block_size=[1, 4])
    assert sorted(read_pickled(file)) == ["m._weight_qdata", "m._weight_scale", "m.bias"]


def test_a_part_is_missing(library: ModuleType, tmp_path: Path) -> None:
    file = written(library, tmp_path, "Int8Tensor", qdata=torch.ones(2, 4))
    with pytest.raises(WeightsError, match=r"'m\.weight', TorchAO's Int8Tensor, has no scale"):
        read_pickled(file)


def test_parts_of_parts_are_refused(library: ModuleType, tmp_path: Path) -> None:
    """Their bytes would be at address 0."""
    body = {"__module__": library.__name__, "__torch_dispatch__": classmethod(print)}
    made = type("Float8Tensor", (Tensor,), body)
    library.Float8Tensor = made  # type: ignore[attr-defined]
    inner = Tensor._make_wrapper_subclass(made, (1 << 30, 1 << 30))
    file = written(library, tmp_path, "Int8Tensor", qdata=inner, scale=torch.ones(2, 1))
    with pytest.raises(
        WeightsError, match=r"Int8Tensor, has a Float8Tensor as qdata: must be a plain"
    ):
        read_pickled(file)


def test_names_must_be_texts_and_differ(library: ModuleType, tmp_path: Path) -> None:
    parts = {"qdata": torch.ones(2, 4, dtype=torch.int8), "scale": torch.ones(2, 1)}
    file = written(library, tmp_path, "Int8Tensor", beside="m._weight_qdata", **parts)
    with pytest.raises(WeightsError, match=r"tensor 'm\._weight_qdata' is there twice"):
        read_pickled(file)
    torch.save({1: torch.ones(2)}, file)
    with pytest.raises(WeightsError, match="a tensor's name is 1: must be text"):
        read_pickled(file)


def test_older_classes_are_refused_by_name(library: ModuleType, tmp_path: Path) -> None:
    file = written(library, tmp_path, "AffineQuantizedTensor", tensor_impl=None)
    with pytest.raises(WeightsError, match=r"AffineQuantizedTensor, which is not read; .*0\.13"):
        read_pickled(file)


def test_nothing_of_the_library_is_called(library: ModuleType, tmp_path: Path) -> None:
    """A function of it, and a class of another library, in a file."""

    class Calls:
        def __reduce__(self) -> Any:
            return library.do, ("x",)  # type: ignore[attr-defined]

    called: list[str] = []

    def do(word: str) -> str:
        called.append(word)
        return word

    do.__module__, do.__qualname__ = library.__name__, "do"
    library.do = do  # type: ignore[attr-defined]
    file = tmp_path / "pytorch_model.bin"
    torch.save({"a": Calls(), "b": torch.ones(1)}, file)
    with pytest.raises(WeightsError, match="'a' is a do, not a tensor"):
        read_pickled(file)
    assert not called
    torch.save({"b": Path("x")}, file)
    with pytest.raises(WeightsError, match="could run code"):
        read_pickled(file)
