"""Files of a model that are cut while they are read, and while they are served: mapped pages that are gone
would end the process with SIGBUS, which says nothing."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
from lora_adapters import demo_adapter
from openai import OpenAI
from servers import serving

import headrace_demo
from headrace_kernels.mapped.cut_files import LIBRARY

PATIENCE = 60.0
LAST = "model.layers.4.mlp.down_proj.weight"
PROMPT = "The lighthouse"

CUTTING = """
import os, sys
from headrace_models.formats.content import Content

view = Content.view

def cut_behind(self, name, *place):
    found = view(self, name, *place)
    if name == sys.argv[1]:
        os.truncate(self.path, 8192)
    return found

Content.view = cut_behind
from headrace.cli.main import main
main(sys.argv[2:])
"""
"""Runs a command whose reader has one tensor's place in the file when the file is cut."""


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(headrace_demo.model_path(), tmp_path / "model"))


@pytest.mark.skipif(
    not LIBRARY.exists(), reason="built on Linux, and only where there is a compiler"
)
@pytest.mark.parametrize("name", ["model.embed_tokens.weight", LAST])
def test_a_file_that_is_cut_while_it_is_read_is_named(folder: Path, name: str) -> None:
    [file] = folder.glob("*.safetensors")
    words = ("generate", "--model", str(folder), "--prompt", "x")
    done = subprocess.run(
        [sys.executable, "-c", CUTTING, name, *words],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 3, (done.returncode, done.stderr[-2000:])
    assert f"{file}: was cut while it was read" in done.stderr
    assert "HR-MOD-002" in done.stderr


def _answer(client: OpenAI, model: str) -> tuple[str, ...]:
    """What it says, and how probable each token was."""
    made = client.completions.create(
        model=model, prompt=PROMPT, max_tokens=8, temperature=0, logprobs=1
    )
    [choice] = made.choices
    assert choice.logprobs is not None
    return choice.text, *map(repr, choice.logprobs.token_logprobs or ())


def test_files_that_are_cut_while_they_are_served_change_nothing(
    folder: Path, tmp_path: Path
) -> None:
    """One slot for two adapters: each answer puts another one's factors into the model."""
    adapters = {name: demo_adapter(tmp_path / name, seed) for seed, name in enumerate("ab", 1)}
    words = ["--enable-lora", "--max-loras", "1", "--max-cpu-loras", "4", "--lora-modules"]
    words += [f"{name}={path}" for name, path in adapters.items()]
    with serving(str(folder), "--served-model-name", "base", *words) as server:
        client = OpenAI(base_url=server.api, api_key="none", max_retries=0, timeout=PATIENCE)
        names = ("base", *adapters)
        before = [_answer(client, name) for name in names]
        maps = Path(f"/proc/{server.process.pid}/maps")
        if maps.exists():
            held = [line for line in maps.read_text().splitlines() if str(tmp_path) in line]
            assert not held
        for file in tmp_path.rglob("*.safetensors"):
            os.truncate(file, 100)
        assert [_answer(client, name) for name in names] == before
        assert len(set(before)) == 3
