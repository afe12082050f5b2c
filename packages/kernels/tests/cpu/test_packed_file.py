"""Packed weights in a file: whole, unchanged and ours, or not used."""

from __future__ import annotations

import errno
import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from headrace_kernels.cpu import library, packed_file
from headrace_kernels.cpu.packed_file import PackedFile, places, total_bytes
from headrace_kernels.mapped.shared_file import SharedFile
from headrace_testing.waiting import wait_until

pytestmark = [
    pytest.mark.skipif(library.path() is None, reason="no native library"),
    pytest.mark.skipif(sys.platform != "linux", reason="leases are Linux's"),
]

CONTENT = {"a": os.urandom(5000), "b": os.urandom(3 << 20), "c": os.urandom(4096), "d": b"\0" * 70}
SIZES = {name: len(content) for name, content in CONTENT.items()}
ROOM = 1 << 30


def kept(folder: Path, subject: str = "model", most_bytes: int = ROOM) -> PackedFile:
    return PackedFile(folder, {"subject": subject}, most_bytes)


def write(file: PackedFile, is_ended: Callable[[], bool] = bool) -> bool:
    return file.write(SIZES, (memoryview(content) for content in CONTENT.values()), is_ended)


def content_of(shared: SharedFile) -> dict[str, bytes]:
    with memoryview(shared) as view:
        return {n: bytes(view[o : o + size]) for n, (o, size) in places(SIZES).items()}


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    found = tmp_path / "packed"
    assert write(kept(found))
    return found


def only(folder: Path, ending: str) -> Path:
    [found] = folder.glob("*" + ending)
    return found


def test_what_was_written_is_found_mapped(folder: Path) -> None:
    assert not kept(folder).is_missing(SIZES)
    shared = kept(folder).find(SIZES)
    assert shared is not None
    assert content_of(shared) == CONTENT
    assert shared.is_leased
    assert not shared.is_private
    assert len(shared) == total_bytes(SIZES)
    assert all(place.offset % packed_file.ALIGNMENT == 0 for place in places(SIZES).values())


def test_other_weights_are_not_found(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert kept(folder, "another").find(SIZES) is None
    assert kept(folder).find({**SIZES, "a": 4999}) is None
    assert kept(folder).find({"b": SIZES["b"], **SIZES}) is None  # another order
    assert kept(folder).find({n: s for n, s in SIZES.items() if n != "d"}) is None
    monkeypatch.setattr(packed_file, "VERSION", 2)
    assert kept(folder).find(SIZES) is None


def test_another_native_library_packs_in_another_way(
    folder: Path, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    other = tmp_path / "headrace_cpu.so"
    other.write_bytes(b"other")
    monkeypatch.setattr(library, "path", lambda: other)
    assert kept(folder).find(SIZES) is None


def overwrite(file: Path) -> None:
    file.chmod(0o600)
    with file.open("r+b") as opened:
        opened.write(b"x")


def cut(file: Path) -> None:
    file.chmod(0o600)
    os.truncate(file, 4096)


def replace(file: Path) -> None:
    other = file.with_suffix(".other")
    other.write_bytes(file.read_bytes())
    other.rename(file)


def empty(file: Path) -> None:
    file.chmod(0o600)
    os.truncate(file, 0)


@pytest.mark.parametrize("change", [overwrite, cut, replace, empty, Path.unlink])
def test_a_file_that_has_changed_is_not_used_and_is_written_again(
    folder: Path, change: Callable[[Path], Any]
) -> None:
    change(only(folder, packed_file.WEIGHTS))
    assert kept(folder).is_missing(SIZES)
    assert kept(folder).find(SIZES) is None
    assert write(kept(folder))
    shared = kept(folder).find(SIZES)
    assert shared is not None
    assert content_of(shared) == CONTENT


@pytest.mark.parametrize(
    "seal", ["", "[]", "{}", '{"version": 1}', "[" * 100_000, "null", '{"version": 1, "file": []}']
)
def test_a_seal_that_is_damaged_is_none(folder: Path, seal: str) -> None:
    only(folder, packed_file.SEAL).write_text(seal)
    assert kept(folder).find(SIZES) is None


def test_a_seal_of_another_version_is_none(folder: Path) -> None:
    seal = only(folder, packed_file.SEAL)
    seal.write_text(json.dumps({**json.loads(seal.read_text()), "version": 0}))
    assert kept(folder).find(SIZES) is None


def test_a_link_is_not_followed(folder: Path, tmp_path: Path) -> None:
    weights = only(folder, packed_file.WEIGHTS)
    elsewhere = tmp_path / "elsewhere"
    weights.rename(elsewhere)
    weights.symlink_to(elsewhere)
    assert kept(folder).find(SIZES) is None


def test_a_file_that_somebody_writes_to_is_not_used(folder: Path) -> None:
    file = only(folder, packed_file.WEIGHTS)
    file.chmod(0o600)
    descriptor = os.open(file, os.O_RDONLY)
    with file.open("r+b"):
        assert not SharedFile.of(descriptor).is_leased
    assert SharedFile.of(descriptor).is_leased
    os.close(descriptor)


@pytest.mark.parametrize(
    "change",
    [
        "os.truncate(path, 0)",
        "open(path, 'wb').write(b'x' * 5000)",
        "open(path, 'r+b').write(b'x')",
    ],
)
def test_who_changes_a_file_in_use_waits_until_it_is_copied(folder: Path, change: str) -> None:
    shared = kept(folder).find(SIZES)
    assert shared is not None
    path = only(folder, packed_file.WEIGHTS)
    path.chmod(0o600)
    code = f"import os; path = {str(path)!r}; {change}"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
    assert shared.is_private
    assert content_of(shared) == CONTENT


def test_a_file_that_is_removed_stays_in_use(folder: Path) -> None:
    shared = kept(folder).find(SIZES)
    assert shared is not None
    only(folder, packed_file.WEIGHTS).unlink()
    assert content_of(shared) == CONTENT


def test_the_lease_goes_with_the_last_user(folder: Path) -> None:
    shared = kept(folder).find(SIZES)
    view = memoryview(shared)  # type: ignore[arg-type]
    del shared
    assert leases() == 1
    del view
    wait_until(lambda: leases() == 0, what="the lease is given back")


def leases() -> int:
    return sum(thread.name == "headrace-lease" for thread in threading.enumerate())


def test_a_private_copy_is_the_same_at_the_same_place(folder: Path) -> None:
    shared = kept(folder).find(SIZES)
    assert shared is not None
    address = shared.address
    shared.make_private()
    shared.make_private()
    assert shared.is_private
    assert shared.address == address
    assert content_of(shared) == CONTENT


def test_two_who_write_at_once_leave_one_whole_file_or_none(tmp_path: Path) -> None:
    both = threading.Barrier(2)

    def run() -> None:
        both.wait(60)
        assert write(kept(tmp_path))

    threads = [threading.Thread(target=run) for _ in range(2)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(60)
    shared = kept(tmp_path).find(SIZES)
    assert shared is None or content_of(shared) == CONTENT
    assert not [*tmp_path.glob("*" + packed_file.PART)]
    assert write(kept(tmp_path))
    assert kept(tmp_path).find(SIZES) is not None


@pytest.mark.parametrize("call", ["posix_fallocate", "writev", "fsync"])
def test_a_full_disk_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, call: str
) -> None:
    def full(*_: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, call, full)
    assert not write(kept(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_disk_that_gives_back_other_bytes_leaves_nothing(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_pieces = os.writev

    def damaged(handle: int, pieces: Any) -> int:
        return write_pieces(handle, [b"x" * len(piece) for piece in pieces])

    monkeypatch.setattr(os, "writev", damaged)
    assert not write(kept(tmp_path))
    assert not [*tmp_path.iterdir()]


def test_a_short_write_is_gone_on_with(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def short(handle: int, pieces: Any) -> int:
        return os.write(handle, b"".join(pieces)[:1000])

    monkeypatch.setattr(os, "writev", short)
    assert write(kept(tmp_path))
    shared = kept(tmp_path).find(SIZES)
    assert shared is not None
    assert content_of(shared) == CONTENT


def test_a_folder_that_cannot_be_written_is_no_error(tmp_path: Path) -> None:
    (tmp_path / "file").write_bytes(b"")
    assert not write(kept(tmp_path / "file" / "folder"))
    assert kept(tmp_path / "file" / "folder").find(SIZES) is None


def test_an_end_leaves_nothing(tmp_path: Path) -> None:
    answers = iter([False, False, True, True])
    assert not write(kept(tmp_path), lambda: next(answers))
    assert not [*tmp_path.iterdir()]


def test_what_was_used_longest_ago_makes_room(folder: Path) -> None:
    most = 2 * total_bytes(SIZES)
    assert write(kept(folder, "second", most))
    stems = {
        name: kept(folder, name)._stem.with_suffix(packed_file.SEAL) for name in ("model", "second")
    }
    os.utime(stems["model"], (2, 2))
    os.utime(stems["second"], (1, 1))
    assert kept(folder, "second", most).find(SIZES) is not None  # which uses it
    assert write(kept(folder, "third", most))
    assert kept(folder, "model").is_missing(SIZES)
    assert not kept(folder, "second").is_missing(SIZES)
    assert not kept(folder, "third").is_missing(SIZES)
    assert sum(file.stat().st_size for file in folder.glob("*" + packed_file.WEIGHTS)) <= most


def test_what_is_larger_than_all_is_not_written(folder: Path) -> None:
    assert not write(kept(folder, "second", total_bytes(SIZES) - 1))
    assert not kept(folder).is_missing(SIZES)


def test_a_disk_is_not_filled(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(packed_file, "_SPARE", 1 << 62)
    assert not write(kept(tmp_path))


def test_parts_of_a_writer_that_was_ended_go(tmp_path: Path) -> None:
    old, new = (tmp_path / f"{name}{packed_file.PART}" for name in ("old", "new"))
    for part in (old, new):
        part.write_bytes(b"x")
    os.utime(old, (1, 1))
    assert write(kept(tmp_path))
    assert not old.exists()
    assert new.exists()
