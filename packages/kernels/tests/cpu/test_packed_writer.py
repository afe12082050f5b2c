"""Packed weights that are written once a start is over, and mapped by the next."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
from test_packing_ahead import job, linear, mapped

from headrace_kernels.cpu import library, packed_writer, packing_ahead
from headrace_kernels.cpu.packed_file import PackedFile
from headrace_kernels.cpu.packed_writer import PackedWriter
from headrace_kernels.cpu.packing_ahead import PackingAhead, PackJob

pytestmark = [
    pytest.mark.skipif(library.path() is None, reason="no native library"),
    pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's"),
]


@pytest.fixture(autouse=True)
def _all_are_large(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packing_ahead, "SMALLEST", 1)


@pytest.fixture
def file(tmp_path: Path) -> PackedFile:
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


def test_it_is_written_once(
    file: PackedFile, jobs: list[PackJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    written(file, jobs)
    monkeypatch.setattr(PackedFile, "write", lambda *_: pytest.fail("it is there"))
    written(file, jobs)


def test_a_checkpoint_that_changed_meanwhile_leaves_nothing(
    file: PackedFile, jobs: list[PackJob]
) -> None:
    written(file, jobs, is_current=False)
    assert not [*file.folder.iterdir()]


def test_a_checkpoint_that_is_cut_meanwhile_leaves_nothing(
    file: PackedFile, jobs: list[PackJob], tmp_path: Path
) -> None:
    (tmp_path / "file").write_bytes(b"")
    written(file, jobs)
    assert not [*file.folder.iterdir()]


def test_a_writer_that_is_closed_leaves_nothing(
    file: PackedFile, jobs: list[PackJob], monkeypatch: pytest.MonkeyPatch
) -> None:
    writer = PackedWriter(file, lambda: jobs, lambda: True)
    pack = packed_writer.WeightPacker._pack

    def packed(self: packing_ahead.WeightPacker, chunk: Sequence[PackJob]) -> object:
        writer._closing.set()
        return pack(self, chunk)

    monkeypatch.setattr(packed_writer.WeightPacker, "_pack", packed)
    writer.start()
    writer.close()
    assert not [*file.folder.iterdir()]


def test_nothing_of_it_imports_torch() -> None:

    code = "import sys, headrace_kernels.cpu.packed_writer; print('torch' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout.strip() == "False"
