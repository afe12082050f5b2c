"""Loading: levels, forcing one, what happens without the library, and no torch on the way."""

from __future__ import annotations

import _ctypes
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from headrace_core.errors import ConfigError, MissingDependency
from headrace_core.ops import OP_NAMES, OPTIONAL_OP_NAMES, KernelNeed
from headrace_kernels.cpu import library
from headrace_kernels.cpu.provider import PROVIDER

NEED = KernelNeed("cpu", "float32", num_threads=1)


@pytest.fixture
def built():
    if library.path() is None:
        pytest.skip("the native library is not built")


@pytest.fixture
def not_built(monkeypatch, tmp_path):
    """This module as it is in an installation that found no compiler."""
    monkeypatch.setattr(library, "__file__", str(tmp_path / "library.py"))
    library._handle.cache_clear()
    yield tmp_path
    library._handle.cache_clear()


def run_python(code: str, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-c", code],
        env={**os.environ, "OMP_NUM_THREADS": "1", **environment},
        capture_output=True,
        text=True,
        timeout=100,
        check=False,
    )


def test_provider_has_every_op(built):
    assert PROVIDER.refuse(NEED) == []
    assert set(PROVIDER.operations(NEED)) == {*OP_NAMES, *OPTIONAL_OP_NAMES}
    assert PROVIDER.priority(NEED) == 100
    assert PROVIDER.row_invariant(NEED)


def test_levels_end_with_portable(built):
    assert library.levels()[-1] == "portable"
    assert set(library.levels()) <= set(library.ISA_LEVELS)


def test_library_loads_without_torch(built):
    done = run_python(
        "import sys; from headrace_kernels.cpu import library, provider;"
        "print(library.version(), library.isa(), library.load('portable').isa, 'torch' in sys.modules)"
    )
    assert done.returncode == 0, done.stderr
    version, isa, portable, torch_imported = done.stdout.split()
    assert version
    assert isa in library.ISA_LEVELS
    assert (portable, torch_imported) == ("portable", "False")


@pytest.mark.parametrize("level", library.ISA_LEVELS)
def test_a_level_can_be_forced(built, monkeypatch, level):
    monkeypatch.setenv(library.ISA_VARIABLE, level)
    if level in library.levels():
        assert library.isa() == level
        assert PROVIDER.refuse(NEED) == []
    else:
        with pytest.raises(ConfigError, match=level):
            PROVIDER.refuse(NEED)


def test_a_level_that_is_not_there_is_refused_with_the_choice(built, monkeypatch):
    monkeypatch.setenv(library.ISA_VARIABLE, "avx9000")
    with pytest.raises(ConfigError, match=r"'avx9000' cannot be used: this machine has \["):
        library.isa()
    with pytest.raises(ConfigError, match="'avx9000'"):
        PROVIDER.refuse(NEED)
    assert PROVIDER.refuse(KernelNeed("cuda", "float32"))  # which does not ask for a level


@pytest.mark.parametrize(
    ("need", "reason"),
    [
        (KernelNeed("cuda", "float32"), "device 'cuda' is not 'cpu'"),
        (KernelNeed("cpu", "float64"), "dtype 'float64'"),
    ],
)
def test_refusals(built, need, reason):
    assert any(text.startswith(reason) for text in PROVIDER.refuse(need))


def test_without_the_library_the_provider_refuses_and_says_what_to_do(not_built, caplog):
    (reason,) = PROVIDER.refuse(NEED)
    assert caplog.text == ""
    assert reason.startswith("native library not built: ")
    assert "install a C++ compiler and reinstall headrace-kernels" in reason
    assert "the torch reference is used meanwhile" in reason
    with pytest.raises(MissingDependency, match="pip install"):
        library.version()


def test_a_library_that_does_not_load_is_a_reason_not_a_crash(not_built: Path):
    (not_built / "headrace_cpu.so").write_bytes(b"this is no library")
    (reason,) = PROVIDER.refuse(NEED)
    assert reason.startswith("native library cannot be loaded: ")


@pytest.fixture
def loaded_anew(built):
    library._handle.cache_clear()
    yield
    library._handle.cache_clear()


@pytest.mark.parametrize(("name", "arguments"), [("scale", [library._P]), ("of_tomorrow", [])])
def test_a_library_of_other_sources_is_to_be_rebuilt(
    loaded_anew, monkeypatch, caplog, name, arguments
):
    """A kernel that takes other arguments, or is not there yet."""
    monkeypatch.setattr(library, "_SIGNATURES", {name: (None, arguments)})
    (reason,) = PROVIDER.refuse(NEED)
    assert reason.startswith("native library is stale: ")
    assert f"kernel '{name}' is not that of these sources). Run: cmake -S " in reason
    assert reason in caplog.text
    with pytest.raises(MissingDependency, match=r"too old .* Run: "):
        library.load("portable")


def test_a_library_that_is_none_of_ours_is_to_be_rebuilt(not_built: Path):
    shutil.copy(_ctypes.__file__, not_built / "headrace_cpu.so")
    (reason,) = PROVIDER.refuse(NEED)
    assert reason.startswith("native library is stale: ")
    assert "hr_version" in reason
    assert "Run: pip install" in reason
