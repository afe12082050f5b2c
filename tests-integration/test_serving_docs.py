"""The examples of ``docs/serving`` run, in the order of the page, against the demo model; those of
pooling models against tiny ones under the names that the page uses.

A ``headrace serve`` in a console block starts the server of the blocks after it.
"""

from __future__ import annotations

import contextlib
import functools
import re
import subprocess
import sys
from pathlib import Path

import pytest
from pooling_checkpoints import bert
from servers import serving

PAGES = Path(__file__).parent.parent / "docs" / "serving"
NAMES = [
    "chat.md", "completions.md", "tools.md", "reasoning.md", "responses.md", "anthropic.md",
    "tool-server.md", "tokens.md", "batch.md", "embeddings.md", "rerank.md",
]  # fmt: skip
ENCODERS = {"sentence-transformers/all-MiniLM-L6-v2": 0, "cross-encoder/ms-marco-MiniLM-L6-v2": 1}
"""Name -> labels of the encoder that stands in for it."""
ADDRESS = "http://localhost:8000"


def test_several_models(tmp_path, encoders, monkeypatch):
    """The page brings a file, which names models; and its key comes by the environment."""
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HEADRACE_API_KEY", "my-key")
    page = (PAGES / "several-models.md").read_text()
    (file,) = re.findall(r"```yaml title=\"models.yaml\"\n(.*?)```", page, re.DOTALL)
    for name in ENCODERS:
        file = file.replace(name, encoders(name))
    Path("models.yaml").write_text(file)
    _run_page(page.replace("HEADRACE_API_KEY=my-key ", ""), "several-models.md", tmp_path, encoders)


@pytest.mark.keep(6, every_value=False)
@pytest.mark.parametrize("name", NAMES)
def test_examples(name, tmp_path, encoders):
    _run_page((PAGES / name).read_text(), name, tmp_path, encoders)
    if name == "batch.md":
        assert (tmp_path / "answers.jsonl").read_text().count("\n") == 2


def _run_page(page, name, folder, encoders):
    blocks = re.findall(r"```(console|python)\n(.*?)```", page, re.DOTALL)
    assert blocks
    names: dict = {}
    with contextlib.ExitStack() as stack:
        url = ADDRESS
        for kind, text in blocks:
            if kind == "python":
                exec(compile(text.replace(ADDRESS, url), name, "exec", dont_inherit=True), names)
                continue
            for command in re.findall(r"^\$ (.*)$", text, re.MULTILINE):
                words = command.split()
                if words[:2] == ["headrace", "serve"]:
                    stack.close()
                    url = stack.enter_context(serving(*_with_folders(words[2:], encoders))).url
                else:
                    _run(command.replace(ADDRESS, url), folder)


@pytest.fixture(scope="module")
def encoders(tmp_path_factory):
    """Name -> folder of a checkpoint, made when it is asked for."""

    @functools.cache
    def folder(name):
        made = tmp_path_factory.mktemp("encoder")
        bert(made, ENCODERS[name])
        return str(made)

    return folder


def _with_folders(words, encoders):
    """The words of a command; a pooling model's name is that of a folder, and stays its name."""
    names = [word for word in words if word in ENCODERS]
    served = ["--served-model-name", *names] if names else []
    return [encoders(word) if word in ENCODERS else word for word in words] + served


def _run(command: str, folder: Path) -> None:
    shell = f'headrace() {{ "{sys.executable}" -m headrace "$@"; }}; {command}'
    done = subprocess.run(
        ["bash", "-c", shell], cwd=folder, capture_output=True, text=True, timeout=120
    )
    assert done.returncode == 0, f"{command}\n{done.stdout}\n{done.stderr}"
    assert '"error":{' not in done.stdout, done.stdout
