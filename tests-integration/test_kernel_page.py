"""The day of the page on kernels: an environment with core and the suites alone, one op, its suite.

Every file and command is the page's. Two things differ from an author's machine: what is not headrace's is
linked from where the tests run, and ``pip`` takes headrace's packages from the tree (:data:`PIP`).
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from pages import Shell, blocks, commands

ROOT = Path(__file__).parents[1]
PAGE = ROOT / "docs" / "extending" / "kernels.md"
TEXT = PAGE.read_text(encoding="utf-8").partition("## A day of a kernel author")[2]
DAY = TEXT.partition("\n## ")[0]
FILES = dict(re.findall(r'^```\w+ title="([^"]+)"\n(.*?)^```', DAY, re.MULTILINE | re.DOTALL))
COMMANDS = [command for block in blocks(DAY) for command in commands(*block)]
VENV = "python3 -m venv .venv && . .venv/bin/activate"
PIP = """\
#!{python}
import os, pathlib, re, sys, tomllib

verb, *words = sys.argv[1:]
assert verb == "install", sys.argv
found = []


def add(name, extras):
    # A package of the tree, and those of headrace that it declares.
    folder = pathlib.Path({root!r}) / "packages" / name.removeprefix("headrace-")
    if str(folder) in found:
        return
    found.append(str(folder))
    project = tomllib.loads((folder / "pyproject.toml").read_text())["project"]
    needed = project["dependencies"] + [
        line for extra in extras for line in project["optional-dependencies"][extra]
    ]
    for line in needed:
        if match := re.match(r"(headrace[\\w-]*)(?:\\[(.*?)\\])?", line):
            add(match[1], (match[2] or "").split(",") if match[2] else [])


for word in words:
    match = re.fullmatch(r"(headrace[\\w-]*)(?:\\[(.*)\\])?", word)
    if match is None:
        found.append(word)
    else:
        add(match[1], match[2].split(",") if match[2] else [])
offline = ["--no-index", "--no-deps", "--no-build-isolation", "--quiet"]
os.execv({python!r}, [{python!r}, "-m", "pip", "install", *offline, *found])
"""
IMPORTABLE = """
import importlib.metadata, importlib.util, json
names = json.loads(input())
print(json.dumps([
    [name for name in names if importlib.util.find_spec(name)],
    sorted(d.name for d in importlib.metadata.distributions() if d.name.startswith("headrace")),
]))
"""
WRONG = {
    "offset is forgotten": ("weight.float() + offset", "weight.float()"),
    "eps is forgotten": ("mean + eps", "mean"),
    "a row's sum depends on the others": (
        "x = x[..., :half] + x[..., half:]",
        "x = x[..., :half] + x[..., half:].roll(x.shape[0], -1)",
    ),
}
"""A kernel that the suite must refuse -> what of the page's is written otherwise."""


@pytest.fixture(scope="module")
def shell(tmp_path_factory: pytest.TempPathFactory) -> Shell:
    """The author's shell, in the folder with the page's files, once core and the suites are installed."""
    folder = tmp_path_factory.mktemp("day")
    for name, text in FILES.items():
        (folder / name).write_text(text, encoding="utf-8")
    kept = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"}
    kept.update(OMP_NUM_THREADS="1", PYTHONDONTWRITEBYTECODE="1", COLUMNS="200")
    shell = Shell(folder, kept)
    create, install = COMMANDS[:2]
    assert create == VENV
    shell.run(create.replace("python3 -m venv", f"{sys.executable} -m venv --without-pip"))
    (packages,) = (folder / ".venv").glob("lib/python*/site-packages")
    third = folder / ".venv" / "third"
    link_third_parties(third)
    (packages / "third.pth").write_text(f"{third}\n")
    pip = folder / ".venv" / "bin" / "pip"
    pip.write_text(PIP.format(python=str(pip.with_name("python")), root=str(ROOT)))
    pip.chmod(0o755)
    shell.run(install)
    return shell


def link_third_parties(folder: Path) -> None:
    """Link everything that is installed where the tests run, but headrace."""
    folder.mkdir()
    for place in map(Path, sys.path):
        if any(place.glob("*.dist-info")):
            for item in place.iterdir():
                link = folder / item.name
                if "headrace" not in item.name and item.suffix != ".pth" and not link.exists():
                    link.symlink_to(item)


def importable(shell: Shell) -> list[list[str]]:
    names = ["headrace", *(f"headrace_{folder.name}" for folder in (ROOT / "packages").iterdir())]
    return json.loads(shell.run(f"python -c '{IMPORTABLE}'", json.dumps(sorted(names))))


def test_a_day(shell: Shell) -> None:
    """In the order of the page: each command after the one before."""
    assert importable(shell) == [
        ["headrace_core", "headrace_reference", "headrace_testing"],
        ["headrace-core", "headrace-reference", "headrace-testing"],
    ]
    install, suite, command, plugins = COMMANDS[2:]
    shell.run(install)
    tested = shell.run(suite)
    assert re.search(r"^=+ \d+ passed in ", tested, re.MULTILINE), tested
    shell.run(command)
    assert importable(shell)[0] == [
        "headrace", "headrace_core", "headrace_reference", "headrace_testing"
    ]  # fmt: skip
    assert f"$ {plugins}\n{shell.run(plugins)}```" in DAY


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("fault", WRONG)
def test_the_suite_refuses_a_wrong_kernel(shell: Shell, tmp_path: Path, fault: str) -> None:
    right, wrong = WRONG[fault]
    assert FILES["pairwise_norm.py"].count(right) == 1
    shutil.copy(shell.folder / "test_pairwise_norm.py", tmp_path)
    text = FILES["pairwise_norm.py"].replace(right, wrong)
    (tmp_path / "pairwise_norm.py").write_text(text, encoding="utf-8")
    done = subprocess.run(
        [shell.folder / ".venv" / "bin" / "python", "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"],
        cwd=tmp_path, env=shell.environment, capture_output=True, text=True, timeout=120, check=False,
    )  # fmt: skip
    assert done.returncode == 1, done.stdout
    assert "FAILED test_pairwise_norm.py::TestRMSNorm::test_rms_norm" in done.stdout
