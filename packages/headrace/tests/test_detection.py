"""The platform is found by the files of the installed torch, which is imported only if it is for GPUs."""

from __future__ import annotations

import subprocess
import sys


def test_a_cpu_build_of_torch_is_recognised_without_importing_it(tmp_path, monkeypatch):
    library = tmp_path / "torch" / "lib"
    library.mkdir(parents=True)
    (tmp_path / "torch" / "__init__.py").write_text("raise AssertionError('imported')")
    (library / "libtorch_cpu.so").touch()
    code = (
        "from headrace.assembly.detection import detect\n"
        "try:\n    print(detect().device)\nexcept AssertionError as e:\n    print(e)"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path), prepend=":")

    def detected():
        return subprocess.run(
            [sys.executable, "-c", code], check=True, capture_output=True, text=True
        ).stdout.strip()

    assert detected() == "cpu"
    (library / "libtorch_cuda.so").touch()
    assert detected() == "imported"
