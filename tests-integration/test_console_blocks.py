"""Every console block of the README, the index and the install page runs as it stands, in its order.

Three things differ from a reader's machine. The scratch folder is not a clone: ``packages`` in it links to
ours. ``pip`` is :data:`PIP`, which links what the tree's packages install instead of building it (the session
``wheels`` builds them). A ``headrace serve`` listens on a free port, and the page's address becomes its own.
"""

from __future__ import annotations

import contextlib
import json
import os
import shlex
import shutil
import site
import sys
from pathlib import Path

import pytest
from pages import Shell, blocks, commands, path_first
from servers import serving

from headrace import demo

ROOT = Path(__file__).parents[1]
PAGES = ("README.md", "docs/index.md", "docs/install.md")
ADDRESS = "http://127.0.0.1:8000"
CHECKPOINT = "/path/to/checkpoint"
VENV = "python3 -m venv .venv && . .venv/bin/activate"
PAGES_WITHOUT_VENV = ("README.md",)
"""Pages that ask for an environment and do not say how to make one."""
VENV_WITHOUT_PIP = VENV.replace("venv .venv", "venv --without-pip .venv")
NOT_RUN = {
    "pip install -q nox && nox": "this test runs in it",
    "docker build -t headrace .": "no Docker in CI; test_install_page.py reads the Dockerfile",
    "docker build -t headrace --build-arg TORCH_INDEX=https://mirror/whl/cpu"
    " --build-arg PIP_INDEX_URL=https://mirror/simple .": "as above",
    "docker run --rm -p 127.0.0.1:8000:8000 headrace": "as above",
    "docker run --rm -p 127.0.0.1:8000:8000 -v /path/to/checkpoint:/model:ro headrace serve /model"
    " --host 0.0.0.0": "as above",
}
"""Command -> why it is not run here."""
REPLACED = {
    # The session "serve" makes an environment of 2 GB, then runs this.
    "pip install -q nox && nox -s serve": "headrace serve",
}
"""Command -> what is run in its place."""
TYPED = {f"headrace chat {CHECKPOINT}": "Hello\n/quit\n"}
"""Command -> what its user types."""
PIP = """\
#!{python}
import importlib.util, pathlib, sys, tomllib

verb, *names = sys.argv[1:]
assert verb == "install", sys.argv
while names:
    name = names.pop(0)
    if name == "--index-url":
        assert names.pop(0).startswith("https://download.pytorch.org/")
    elif name == "torch":
        assert importlib.util.find_spec("torch"), "torch is not installed where the tests run"
    else:
        assert name.startswith("./packages/"), name
        project = tomllib.loads((pathlib.Path(name) / "pyproject.toml").read_text())["project"]
        for command, target in project.get("scripts", {{}}).items():
            module, _, function = target.partition(":")
            script = pathlib.Path({bin!r}) / command
            script.write_text("#!{venv_python}\\nfrom " + module + " import " + function
                              + "\\n" + function + "()\\n")
            script.chmod(0o755)
        pathlib.Path({pth!r}).write_text("import site; " + "; ".join(
            f"site.addsitedir({{folder!r}})" for folder in {sites!r}) + "\\n")
"""


def _commands(name: str) -> list[str]:
    page = (ROOT / name).read_text(encoding="utf-8")
    return [command for block in blocks(page) for command in commands(*block)]


def test_what_is_not_run_is_on_the_pages():
    found = {command for name in PAGES for command in _commands(name)}
    assert NOT_RUN.keys() | REPLACED.keys() | TYPED.keys() <= found


def test_a_session_serves_the_demo_model():
    body = (ROOT / "noxfile.py").read_text().partition("def serve(")[2].partition("@nox.session")[0]
    assert 'environment.run("headrace", "serve", *session.posargs)' in body


@pytest.mark.keep(2, every_value=False)
@pytest.mark.parametrize("name", PAGES)
def test_the_blocks_of_a_page_run(name, tmp_path, checkpoint):
    (tmp_path / "packages").symlink_to(ROOT / "packages")
    (tmp_path / "prompts.txt").write_text("Hello\nOne and one is\n")
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "HF_HUB_OFFLINE": "1"}
    shell = Shell(tmp_path, path_first(Path(sys.executable).parent, environment))
    if name in PAGES_WITHOUT_VENV:
        _make_venv(shell, VENV_WITHOUT_PIP)
    with contextlib.ExitStack() as servers:
        url = ADDRESS
        for language, text in blocks((ROOT / name).read_text(encoding="utf-8")):
            if language == "python":
                code = text.replace(ADDRESS, url).replace(CHECKPOINT, checkpoint)
                exec(compile(code, name, "exec", dont_inherit=True), {"__name__": "example"})
            for command in commands(language, text):
                if command in NOT_RUN:
                    continue
                run = REPLACED.get(command, command)
                run = run.replace(ADDRESS, url).replace(CHECKPOINT, checkpoint)
                words = shlex.split(run)
                if words[:2] == ["headrace", "serve"] and "--help=all" not in words:
                    servers.close()
                    url = servers.enter_context(serving(*words[2:])).url
                elif command == VENV:
                    _make_venv(shell, command)
                else:
                    assert '"error":{' not in shell.run(run, TYPED.get(command, ""))
    if name == "README.md":
        assert len((tmp_path / "answers.jsonl").read_text().splitlines()) == 2


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory) -> str:
    """The demo model as one that takes 8,192 tokens."""
    folder = shutil.copytree(demo.path(), tmp_path_factory.mktemp("checkpoint") / "model")
    config = json.loads((folder / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**config, "max_position_embeddings": 8192}))
    return str(folder)


def _make_venv(shell: Shell, command: str) -> None:
    """Run the command, and put the stand-in for pip where it leaves pip."""
    shell.run(command)
    home = shell.folder / ".venv"
    assert shell.environment["VIRTUAL_ENV"] == str(home)
    (packages,) = home.glob("lib/python*/site-packages")
    pip = home / "bin" / "pip"
    pip.write_text(
        PIP.format(
            python=sys.executable, venv_python=home / "bin" / "python", bin=str(home / "bin"),
            pth=str(packages / "headrace.pth"), sites=site.getsitepackages(),
        )
    )  # fmt: skip
    pip.chmod(0o755)
