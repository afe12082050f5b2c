"""Files that are cut while they are mapped, in processes of their own: what goes wrong ends a process."""

from __future__ import annotations

import signal
import subprocess
import sys
import textwrap
from pathlib import Path

import pytest

from headrace_kernels.mapped.cut_files import LIBRARY

pytestmark = pytest.mark.skipif(
    not LIBRARY.exists(), reason="built on Linux, and only where there is a compiler"
)

BEGIN = """
import mmap, os, sys, threading
from headrace_core.errors import WeightsError
from headrace_kernels.mapped.cut_files import cut_files_raise

PAGES = 64
path = sys.argv[1]
open(path, "wb").write(b"x" * PAGES * mmap.PAGESIZE)

def mapped(access=mmap.ACCESS_COPY):
    with open(path, "r+b") as file:
        return mmap.mmap(file.fileno(), 0, access=access)

def cut(pages=1):
    os.truncate(path, pages * mmap.PAGESIZE + 100)
"""


def ran(file: Path, body: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", BEGIN + textwrap.dedent(body), str(file)],
        capture_output=True, text=True, timeout=60, check=False,
    )  # fmt: skip


def test_what_is_gone_reads_as_zeros_and_ends_in_an_error_that_names_the_file(
    tmp_path: Path,
) -> None:
    file = tmp_path / "a model.safetensors"
    done = ran(file, """
        content = mapped()
        try:
            with cut_files_raise():
                cut()
                print(content[0], content[mmap.PAGESIZE + 99], content[mmap.PAGESIZE + 100])
                print(content[2 * mmap.PAGESIZE], content[-1])
                content.close()
        except WeightsError as error:
            print(error)
    """)  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.splitlines()[:2] == ["120 120 0", "0 0"]
    assert f"{file}: was cut while it was read" in done.stdout


def test_the_cut_comes_before_what_its_zeros_led_to(tmp_path: Path) -> None:
    done = ran(tmp_path / "m", """
        content = mapped(mmap.ACCESS_READ)
        try:
            with cut_files_raise():
                cut(0)
                raise ValueError(f"a scale of {content[-1]}")
        except WeightsError as error:
            print(repr(error.__cause__))
        with cut_files_raise():  # what has been told is not told again
            pass
    """)  # fmt: skip
    assert done.stdout.strip() == "ValueError('a scale of 0')", done.stderr


def test_all_threads_are_watched(tmp_path: Path) -> None:
    done = ran(tmp_path / "m", """
        contents = [mapped() for _ in range(4)]
        try:
            with cut_files_raise():
                cut()
                threads = [
                    threading.Thread(target=lambda one=one: sum(one[:: mmap.PAGESIZE]))
                    for one in contents for _ in range(4)
                ]
                for thread in threads:
                    thread.start()
                for thread in threads:
                    thread.join()
        except WeightsError:
            print("told")
    """)  # fmt: skip
    assert done.stdout.strip() == "told", done.stderr


@pytest.mark.parametrize(
    "body",
    [
        "content = mapped(); cut(); content[-1]",
        """
        content = mapped()
        with cut_files_raise():
            pass
        cut()
        content[-1]
        """,
        """
        content = mapped(mmap.ACCESS_WRITE)
        with cut_files_raise():
            cut()
            content[-1]
        """,
    ],
    ids=["before", "after", "shared memory"],
)
def test_else_the_signal_means_what_it_meant(tmp_path: Path, body: str) -> None:
    assert ran(tmp_path / "m", body).returncode == -signal.SIGBUS


def test_without_a_cut_nothing_happens(tmp_path: Path) -> None:
    done = ran(tmp_path / "m", """
        content = mapped()
        with cut_files_raise(), cut_files_raise():
            print(content[-1])
    """)  # fmt: skip
    assert done.stdout.strip() == "120", done.stderr
