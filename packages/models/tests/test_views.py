"""Reading weights ahead, and packing them without copies of one's own."""

from __future__ import annotations

import dataclasses
import mmap
from pathlib import Path
from typing import Any

import pytest
import test_families as families
import torch
from safetensors.torch import save_file
from torch import Tensor

from headrace_core.config import LoadConfig
from headrace_core.ops import KernelNeed, OpTable, PackedLinear, bind_ops
from headrace_models.checkpoint.read_ahead import read_ahead
from headrace_models.formats.safetensors import SafetensorsFormat
from headrace_reference.linear import Linear as ReferenceLinear
from headrace_testing.model.decoders import Checkpoint, PagedDriver, PlainQuant, build_context

LLAMA = families.TestLlama()
PROMPT = LLAMA.prompt(20)


class CopyingLinear(ReferenceLinear):
    """Packs as native kernels do, into memory of its own, and then spoils what it was given."""

    pack_copies = True

    def __init__(self) -> None:
        self.packed: list[PackedLinear] = []

    def pack(self, weight: Tensor) -> PackedLinear:
        self.packed.append(super().pack(weight.clone()))
        weight.fill_(7.0)  # as the next leaf would do that gets the same memory
        return self.packed[-1]


class ViewTaking(PlainQuant):
    takes_views = True


@pytest.fixture(scope="module", params=[False, True], ids=["untied", "tied"])
def checkpoint(request: pytest.FixtureRequest, tmp_path_factory: Any) -> Checkpoint:
    folder = tmp_path_factory.mktemp("llama")
    return LLAMA.make_checkpoint(folder, tie_word_embeddings=request.param)


def copying_ops() -> OpTable:
    ops = bind_ops(KernelNeed(device="cpu", dtype="float32"), choose={"*": "reference"})
    return dataclasses.replace(ops, linear=CopyingLinear())


def test_a_model_packed_from_views_computes_the_same(checkpoint: Checkpoint) -> None:
    """Nothing that was packed, and no norm or bias beside it, still looks into borrowed memory."""
    info = LLAMA.resolve(checkpoint.path, max_model_len=LLAMA.max_model_len)
    ops = copying_ops()
    model = LLAMA.load(info, build_context(info, ops=ops, quant=ViewTaking(ops)))
    expected = PagedDriver(LLAMA.open(checkpoint.path)).step({"a": PROMPT})
    assert torch.equal(PagedDriver(model).step({"a": PROMPT}), expected)


def test_a_tied_table_is_held_once(tmp_path: Path) -> None:
    tied = LLAMA.make_checkpoint(tmp_path, tie_word_embeddings=True)
    info = LLAMA.resolve(tied.path, max_model_len=LLAMA.max_model_len)
    ops = copying_ops()
    model: Any = LLAMA.load(info, build_context(info, ops=ops, quant=ViewTaking(ops)))
    assert model.head.packed() is model.embed.packed
    tables = [p for p in ops.linear.packed if p.out_features == info.vocab_size]  # type: ignore[attr-defined]
    assert len(tables) == 1


def resident(tensor: Tensor) -> int:
    """Bytes of the file mapping that holds ``tensor``, and that are in this process's memory."""
    inside = False
    for line in Path("/proc/self/smaps").read_text(encoding="utf-8").splitlines():
        first = line.split(" ", 1)[0]
        if "-" in first and not first.endswith(":"):
            low, high = (int(part, 16) for part in first.split("-"))
            inside = low <= tensor.data_ptr() < high
        elif inside and line.startswith("Rss:"):
            return int(line.split()[1]) * 1024
    return 0


@pytest.mark.skipif(not hasattr(mmap, "MADV_DONTNEED"), reason="no madvise here")
def test_pages_of_tensors_that_were_passed_on_are_given_back(tmp_path: Path) -> None:
    size = 4 << 20
    tensors = {f"t{i}": torch.full((size,), i, dtype=torch.uint8) for i in range(8)}
    save_file(tensors, tmp_path / "model.safetensors")
    seen = []
    for name, tensor, _ in SafetensorsFormat(LoadConfig()).tensors(tmp_path):
        assert bool((tensor == int(name[1:])).all())
        if Path("/proc/self/smaps").exists():
            assert resident(tensor) <= size + (1 << 20)
        seen.append((name, tensor))
    for name, tensor in seen:  # whoever kept one still finds it
        assert bool((tensor == int(name[1:])).all())
    assert len(seen) == 8


def test_reading_ahead(checkpoint: Checkpoint, tmp_path: Path) -> None:
    thread = read_ahead(checkpoint.path, weight_bytes=100, available=1000)
    if thread is not None:  # not every system can
        thread.join(10)
        assert not thread.is_alive()
    assert read_ahead(checkpoint.path, weight_bytes=600, available=1000) is None
    assert read_ahead(tmp_path, weight_bytes=100, available=1000) is None
    (tmp_path / "model.safetensors.index.json").write_text("{")
    assert read_ahead(tmp_path, weight_bytes=100, available=1000) is None
