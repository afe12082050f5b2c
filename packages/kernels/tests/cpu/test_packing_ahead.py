"""Weights that the native library packs in a thread, without torch."""

from __future__ import annotations

import mmap
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor

from headrace_kernels.cpu import library, packing_ahead
from headrace_kernels.cpu.ops.linear import Linear
from headrace_kernels.cpu.packed_file import PackedFile
from headrace_kernels.cpu.packed_writer import PackedWriter
from headrace_kernels.cpu.packing_ahead import PackingAhead, PackJob, Rows, open_packing

pytestmark = pytest.mark.skipif(library.path() is None, reason="no native library")

on_linux = pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's")
DTYPES = [torch.float32, torch.bfloat16, torch.float16]


def mapped(file: Path, *weights: Tensor) -> list[Rows]:
    """Weights in a file, one after the other behind a few bytes, and where their rows are."""
    content = [weight.contiguous().view(torch.uint8).numpy().tobytes() for weight in weights]
    file.write_bytes(bytes(24) + b"".join(content))
    with file.open("rb") as opened:
        mapping = mmap.mmap(opened.fileno(), 0, access=mmap.ACCESS_COPY)
    starts = [24 + sum(map(len, content[:i])) for i in range(len(weights))]
    return [
        Rows(mapping, start, len(weight)) for start, weight in zip(starts, weights, strict=True)
    ]


def job(name: str, rows: list[Rows], like: Tensor) -> PackJob:
    return PackJob(name, tuple(rows), like.shape[1], str(like.dtype).removeprefix("torch."))


def linear(isa: str | None = None) -> Linear:
    return Linear(library.load(isa or library.isa()))


def packed(jobs: list[PackJob]) -> PackingAhead:
    ahead = PackingAhead(jobs)
    ahead.start()
    return ahead


@pytest.mark.parametrize("dtype", DTYPES)
def test_the_bits_are_those_of_the_loader(
    tmp_path: Path, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(packing_ahead, "_CHUNK", 40_000)
    torch.manual_seed(0)
    weights = [torch.randn(rows, 72).to(dtype) for rows in (96, 33, 5, 200)]
    rows = mapped(tmp_path / "file", *weights)
    ahead = packed([
        job("one", rows[:1], weights[0]),
        job("fused", rows[:3], weights[0]),
        job("turned", [rows[2], rows[0]], weights[0]),
        job("last", rows[3:], weights[0]),
    ])  # fmt: skip
    wanted = {
        "one": weights[0],
        "fused": torch.cat(weights[:3]),
        "turned": torch.cat([weights[2], weights[0]]),
        "last": weights[3],
    }
    op, before = linear(), ahead.wait()
    for name, weight in wanted.items():
        found, own = ahead.take(name, op), op.pack(weight)
        assert found is not None
        assert torch.equal(found.data, own.data)
        assert (found.in_features, found.out_features, found.dtype, found.num_bytes) == (
            own.in_features, own.out_features, own.dtype, own.num_bytes,
        )  # fmt: skip
        before -= own.num_bytes
        assert ahead.wait() == before
        assert ahead.take(name, op) is None  # once
    assert before == 0


@pytest.mark.skipif(len(library.levels()) < 2, reason="one instruction set")
def test_an_op_of_another_instruction_set_gets_nothing(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    ahead = packed([job("w", mapped(tmp_path / "file", weight), weight)])
    other = next(level for level in library.levels() if level != library.isa())
    assert ahead.take("w", linear(other)) is None


def test_what_nobody_takes_is_given_back(tmp_path: Path) -> None:
    weight = torch.randn(64, 64)
    ahead = packed([job("w", mapped(tmp_path / "file", weight), weight)])
    assert ahead.wait() > 0
    ahead.close()
    assert ahead.wait() == 0
    assert ahead.take("w", linear()) is None


@pytest.mark.skipif(sys.platform != "linux", reason="files that are cut are watched on Linux")
def test_a_file_that_is_cut_gives_no_weight(tmp_path: Path) -> None:
    weight = torch.randn(512, 512)
    rows = mapped(tmp_path / "file", weight)
    (tmp_path / "file").write_bytes(b"")
    ahead = packed([job("w", rows, weight)])
    assert ahead.take("w", linear()) is None


def test_small_weights_and_foreign_dtypes_are_left_to_the_loader(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    weight = torch.randn(64, 64)
    rows = mapped(tmp_path / "file", weight)
    assert open_packing([job("w", rows, weight)]) is None
    monkeypatch.setattr(packing_ahead, "SMALLEST", 1)
    assert open_packing([job("w", rows, weight)]) is not None
    assert open_packing([job("w", rows, weight)._replace(dtype="float64")]) is None
    monkeypatch.setenv(library.ISA_VARIABLE, "none such")
    assert open_packing([job("w", rows, weight)]) is None


def test_packing_imports_no_torch() -> None:
    code = "import sys, headrace_kernels.cpu.packing_ahead; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"


@pytest.fixture
def file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> PackedFile:
    monkeypatch.setattr(packing_ahead, "SMALLEST", 1)
    return PackedFile(tmp_path / "packed", {"model": 1}, 1 << 30)


@pytest.fixture
def weights() -> list[torch.Tensor]:
    torch.manual_seed(0)
    return [torch.randn(rows, 72).to(torch.bfloat16) for rows in (96, 33, 5)]


@pytest.fixture
def jobs(tmp_path: Path, weights: list[torch.Tensor]) -> list[PackJob]:
    rows = mapped(tmp_path / "file", *weights)
    return [job("one", rows[:1], weights[0]), job("fused", rows[1:], weights[0])]


def written(file: PackedFile, jobs: Sequence[PackJob], *, is_current: bool = True) -> PackedWriter:
    writer = PackedWriter(file, lambda: jobs, lambda: is_current)
    writer.start()
    writer.wait()
    return writer


def taken(ahead: PackingAhead, weights: list[torch.Tensor]) -> None:
    """Check all weights of a packing against the op's own."""
    op = linear()
    for name, weight in {"one": weights[0], "fused": torch.cat(weights[1:])}.items():
        found, own = ahead.take(name, op), op.pack(weight)
        assert found is not None
        assert torch.equal(found.data, own.data)
        assert (found.in_features, found.out_features, found.num_bytes) == (
            own.in_features, own.out_features, own.num_bytes,
        )  # fmt: skip


@on_linux
def test_the_next_start_maps_the_same_bits(
    file: PackedFile, jobs: list[PackJob], weights: list[torch.Tensor]
) -> None:
    first = PackingAhead(jobs, file)
    assert not first.expects_file
    first.start()
    taken(first, weights)
    assert not first.is_mapped
    written(file, jobs)
    second = PackingAhead(jobs, file)
    assert second.expects_file
    second.start()
    assert second.wait() > 0
    assert second.is_mapped
    taken(second, weights)


@on_linux
def test_small_pages_are_copied_while_weights_are_in_use(
    file: PackedFile, jobs: list[PackJob], weights: list[torch.Tensor]
) -> None:
    written(file, jobs)
    ahead = PackingAhead(jobs, file)
    ahead.start()
    op = linear()
    packed = ahead.take("one", op)
    assert packed is not None
    before = op(torch.eye(72, dtype=torch.bfloat16), packed)
    ahead.settle()
    assert ahead._shared is not None
    shared = ahead._shared()
    assert shared is not None
    assert shared.is_private  # the file is smaller than a large page
    assert torch.equal(op(torch.eye(72, dtype=torch.bfloat16), packed), before)


@on_linux
def test_it_is_written_once(
    file: PackedFile, jobs: list[PackJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(file, jobs)
    monkeypatch.setattr(PackedFile, "write", lambda *_: pytest.fail("it is there"))
    written(file, jobs)


@on_linux
def test_a_checkpoint_that_changed_meanwhile_leaves_nothing(
    file: PackedFile, jobs: list[PackJob]
) -> None:
    written(file, jobs, is_current=False)
    assert not [*file.folder.iterdir()]


@on_linux
def test_a_checkpoint_that_is_cut_meanwhile_leaves_nothing(
    file: PackedFile, jobs: list[PackJob], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    written(file, jobs)
    assert not [*file.folder.iterdir()]


@on_linux
def test_a_writer_that_is_closed_leaves_nothing(
    file: PackedFile, jobs: list[PackJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PackedWriter(file, lambda: jobs, lambda: True)
    pack = packing_ahead.WeightPacker._pack

    def packed(self: packing_ahead.WeightPacker, chunk: Sequence[PackJob]) -> object:
        writer._closing.set()
        return pack(self, chunk)

    monkeypatch.setattr(packing_ahead.WeightPacker, "_pack", packed)
    writer.start()
    writer.close()
    assert not [*file.folder.iterdir()]
