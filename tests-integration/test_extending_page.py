"""The package of the page on adding a model is what the page says: it passes its tests and answers."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import textwrap
import tomllib
import urllib.request
from pathlib import Path

import pytest
from servers import serving

pytestmark = pytest.mark.days(2)

PAGE = Path(__file__).parents[1] / "docs" / "extending" / "add-a-model.md"
BLOCK = re.compile(r'^```\w+ title="([^"]+)"\n(.*?)^```', re.MULTILINE | re.DOTALL)


@pytest.fixture(scope="module")
def package(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The page's files, as ``pip install -e .`` leaves them to be found."""
    folder = tmp_path_factory.mktemp("page")
    files: dict[str, str] = {}
    for name, text in BLOCK.findall(PAGE.read_text(encoding="utf-8")):
        files[name] = files.get(name, "") + text
    for name, text in files.items():
        (folder / name).parent.mkdir(parents=True, exist_ok=True)
        (folder / name).write_text(text, encoding="utf-8")
    project = tomllib.loads(files["pyproject.toml"])["project"]
    info = folder / "src" / f"{project['name'].replace('-', '_')}-{project['version']}.dist-info"
    info.mkdir()
    (info / "METADATA").write_text(
        f"Metadata-Version: 2.1\nName: {project['name']}\nVersion: {project['version']}\n"
    )
    lines = []
    for group, entries in project["entry-points"].items():
        lines += [f"[{group}]", *(f"{name} = {target}" for name, target in entries.items())]
    (info / "entry_points.txt").write_text("\n".join(lines) + "\n")
    return folder


@pytest.fixture(scope="module")
def environment(package: Path) -> dict[str, str]:
    path = os.pathsep.join([str(package / "src"), os.environ.get("PYTHONPATH", "")])
    return {**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}


def test_parity(package: Path, environment: dict[str, str]) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-c", os.devnull,
         "--rootdir", str(package), str(package / "tests")],
        env=environment, capture_output=True, text=True, timeout=300, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stdout[-3000:]
    passed = re.search(r"(\d+) passed", done.stdout)
    assert passed is not None
    assert int(passed[1]) >= 15
    assert "skipped" not in done.stdout


def test_a_served_answer(package: Path, environment: dict[str, str]) -> None:
    folder = package / "checkpoint"
    subprocess.run(
        [sys.executable, str(package / "make_checkpoint.py"), str(folder)],
        env=environment, check=True, timeout=120, capture_output=True,
    )  # fmt: skip
    curl = re.search(r"^ +-d '(.*)'$", PAGE.read_text(encoding="utf-8"), re.MULTILINE)
    assert curl is not None
    with serving(str(folder), "--enforce-eager", environment=environment) as server:
        request = urllib.request.Request(
            f"{server.api}/completions", curl[1].encode(), {"Content-Type": "application/json"}
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            answer = json.load(response)
    assert answer["usage"]["completion_tokens"] == 8
    assert "class bitnet_plugin.model:BitNetForCausalLM" in "\n".join(server.log)


def test_the_row_is_one() -> None:
    text = PAGE.read_text(encoding="utf-8")
    (block,) = re.findall(r"^  ```python\n(.*?)^  ```", text, re.MULTILINE | re.DOTALL)
    names: dict[str, object] = {}
    exec(compile(textwrap.dedent(block), "add-a-model.md", "exec"), names)
    assert getattr(names["row"], "name", None) == "BitNetForCausalLM"
