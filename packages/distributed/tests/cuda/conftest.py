"""Stand-ins for libraries of NVIDIA's, compiled from the sources beside this file."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

COMPILER = shutil.which("g++") or shutil.which("c++") or shutil.which("clang++")


def compiled(source: str, folder: Path) -> str:
    """Path of a library, made of a source of this folder; skips where there is no compiler."""
    if COMPILER is None:
        pytest.skip("no C++ compiler for the stand-in")
    made = folder / f"lib{Path(source).stem}.so"
    path = Path(__file__).with_name(source)
    command = [
        COMPILER,
        "-std=c++17",
        "-shared",
        "-fPIC",
        "-O1",
        "-pthread",
        str(path),
        "-o",
        str(made),
    ]
    subprocess.run(command, check=True)
    return str(made)


@pytest.fixture(scope="session")
def fake_nccl(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a libnccl.so.2 whose devices are processes' own memory."""
    return compiled("fake_nccl.cpp", tmp_path_factory.mktemp("nccl"))


@pytest.fixture(scope="session")
def fake_cudart(tmp_path_factory: pytest.TempPathFactory) -> str:
    """Path of a libcudart.so whose devices are shared memory of the host."""
    return compiled("fake_cudart.cpp", tmp_path_factory.mktemp("cudart"))
