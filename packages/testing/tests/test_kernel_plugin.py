"""An outside kernel author's day: core and testing on the path, one package, its tests."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path

EXAMPLE = Path(__file__).parents[3] / "examples" / "kernel_plugin"

WITHOUT = (
    "headrace",
    "headrace_engine",
    "headrace_models",
    "headrace_server",
    "headrace_attention",
)
"""Packages that a kernel author does not need."""

GUARD = f"""
import sys
class Absent:
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] in {WITHOUT!r}:
            raise ModuleNotFoundError(f"{{name}} is not installed", name=name)
sys.meta_path.insert(0, Absent())
import pytest
sys.exit(pytest.main(sys.argv[1:]))
"""


def installed(folder: Path) -> Path:
    """The example's metadata as pip would write it."""
    project = tomllib.loads((EXAMPLE / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    info = folder / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    facts = f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    (info / "METADATA").write_text(facts, encoding="utf-8")
    lines = []
    for group, points in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in points.items())]
    (info / "entry_points.txt").write_text("\n".join(lines), encoding="utf-8")
    return folder


def test_a_package_of_kernels_passes_its_suites(tmp_path: Path) -> None:
    places = [str(installed(tmp_path)), str(EXAMPLE / "src"), os.environ.get("PYTHONPATH", "")]
    alone = {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1", "PYTHONPATH": os.pathsep.join(places)}
    done = subprocess.run(
        [sys.executable, "-c", GUARD, "-q", "-p", "no:cacheprovider", "-W", "error", "tests"],
        cwd=EXAMPLE,
        env={**os.environ, **alone},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "16 passed" in done.stdout
    assert "skipped" not in done.stdout
