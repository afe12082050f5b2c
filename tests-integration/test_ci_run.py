"""``.ci/run`` on machines that lack something: it stops, or goes on, and says the next step.

The machine is a folder of links to the commands that the script may use, with stand-ins for Python and pip.
"""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
COMMANDS = ("bash", "dirname", "mktemp", "tee", "grep", "rm", "mkdir", "cat", "chmod")
PYTHON = f"""\
#!/bin/bash
case "$1" in
    --version) echo "Python $VERSION" ;;
    -c) [ "$VERSION" != 3.10.13 ] ;;
    -m) [ -z "$NO_VENV" ] || exit 1
        mkdir -p "$3/bin"
        echo 'PATH=$PWD/.nox/ci/bin:$PATH' > "$3/bin/activate"
        printf '#!/bin/bash\\n%s\\n' "$PIP" > "$3/bin/pip"
        chmod +x "$3/bin/pip" ;;
    *) exec {sys.executable} "$@" ;;
esac
"""
NOX = "echo 'echo nox' > .nox/ci/bin/nox && chmod +x .nox/ci/bin/nox"
"""What the stand-in for pip does: it installs a nox that prints its name."""


@pytest.fixture
def machine(tmp_path: Path) -> Path:
    """A clone with the script, and ``bin`` with all that it needs."""
    (tmp_path / ".ci").mkdir()
    (tmp_path / "tools").mkdir()
    shutil.copy(ROOT / ".ci/run", tmp_path / ".ci/run")
    shutil.copy(ROOT / "tools/sum_tests.py", tmp_path / "tools")
    (tmp_path / "bin").mkdir()
    for name in COMMANDS:
        (tmp_path / "bin" / name).symlink_to(shutil.which(name))
    for name in ("g++", "npm"):
        (tmp_path / "bin" / name).symlink_to(shutil.which("true"))
    (tmp_path / "bin" / "python3").write_text(PYTHON)
    (tmp_path / "bin" / "python3").chmod(0o755)
    return tmp_path


def _run(machine: Path, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"PATH": str(machine / "bin"), "VERSION": "3.11.7", "PIP": NOX, **variables}
    return subprocess.run(
        [str(machine / "bin" / "bash"), str(machine / ".ci/run")],
        env=environment, capture_output=True, text=True, timeout=60,
    )  # fmt: skip


def test_a_whole_machine_runs_nox_and_is_told_nothing(machine):
    done = _run(machine)
    assert done.returncode == 0, done.stderr
    assert done.stdout.startswith("nox\n")
    assert done.stdout.endswith("\n0 passed, 0 failed, 0 skipped\n")
    assert ".ci/run:" not in done.stdout + done.stderr


def test_without_python(machine):
    (machine / "bin" / "python3").unlink()
    done = _run(machine)
    assert done.returncode == 1
    assert "install Python 3.11 or later" in done.stderr


def test_with_an_old_python(machine):
    done = _run(machine, VERSION="3.10.13")
    assert done.returncode == 1
    assert "Python 3.10.13, 3.11 or later is needed" in done.stderr


def test_without_the_module_venv(machine):
    done = _run(machine, NO_VENV="1")
    assert done.returncode == 1
    assert "apt install python3-venv" in done.stderr


def test_without_a_package_index(machine):
    done = _run(machine, PIP="exit 1")
    assert done.returncode == 1
    assert "PIP_INDEX_URL, HTTPS_PROXY" in done.stdout.partition("== closing lines")[2]


@pytest.mark.parametrize(
    ("name", "step"), [("g++", "apt install g++"), ("npm", "install Node.js 20 or later")]
)
def test_without_what_it_can_do_without(machine, name, step):
    (machine / "bin" / name).unlink()
    done = _run(machine)
    assert done.returncode == 0
    assert step in done.stderr
    assert step in done.stdout.partition("== closing lines")[2]
