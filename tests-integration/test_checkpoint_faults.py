"""Checkpoints that cannot be served: the commands say what is wrong with them, and what to do."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from forks import run_command
from safetensors.torch import load_file, save_file

import headrace_demo

PATIENCE = 60.0
TENSOR = "model.layers.1.mlp.down_proj.weight"


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """A copy of the demo model."""
    return Path(shutil.copytree(headrace_demo.model_path(), tmp_path / "model"))


def refused(*words: str) -> tuple[int, str]:
    """Exit status and output of a command that is expected to end by itself."""
    done = run_command(*words, stderr=subprocess.STDOUT, timeout=PATIENCE)
    return done.returncode, done.stdout


@pytest.mark.parametrize("words", [(), ("--engine-process",)])
def test_serve_names_the_tensor_with_a_nan(folder: Path, words: tuple[str, ...]) -> None:
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    tensors[TENSOR][0, 0] = torch.nan
    save_file(tensors, file, metadata={"format": "pt"})
    status, output = refused("serve", str(folder), "--port", "0", *words)
    assert status == 3
    assert f"{file.name}: tensor '{TENSOR}'" in output
    assert "1 NaN" in output
    assert "HR-MOD-002" in output


def test_serve_refuses_rope_settings_that_contradict_each_other(folder: Path) -> None:
    said = json.loads((folder / "config.json").read_text())
    said["rope_parameters"] = {"rope_type": "default", "rope_theta": 777.0}
    said["rope_scaling"] = {"rope_type": "linear", "factor": 2.0}
    said.pop("rope_theta", None)
    (folder / "config.json").write_text(json.dumps(said))
    status, output = refused("serve", str(folder), "--port", "0")
    assert status == 3
    assert "rope_theta = 777.0 would be lost" in output


POINTER = (
    "version https://git-lfs.github.com/spec/v1\n"
    "oid sha256:4d7a214614ab2935c943f9e0ff69d22eadbb8f32b1258daaa5e2ca24d17e2393\nsize 135\n"
)


@pytest.mark.parametrize("name", ["model.safetensors", "tokenizer.json", "config.json"])
def test_a_clone_without_its_large_files(folder: Path, name: str) -> None:
    (folder / name).write_text(POINTER)
    status, output = refused("serve", str(folder), "--port", "0")
    assert status == 3
    assert f"{name}: Git-LFS pointers" in output
    assert f"git -C {folder} lfs pull" in output


@pytest.mark.parametrize(
    "name",
    [
        "config.json",
        "tokenizer.json",
        "generation_config.json",
        "model.safetensors",
        "more.safetensors",
    ],
)
def test_a_pipe_under_the_name_of_a_file(folder: Path, name: str) -> None:
    """Nobody writes into it: whoever opened it would wait for ever."""
    (folder / name).unlink(missing_ok=True)
    os.mkfifo(folder / name)
    status, output = refused("serve", str(folder), "--port", "0")
    assert status == 3
    assert f"{folder / name}: cannot be read: it is a named pipe, must be a regular file" in output


def test_a_pipe_in_the_folder_of_a_tokenizer(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")
    status, output = refused("serve", "--tokenizer", str(folder), "--port", "0")
    assert status == 3
    assert "tokenizer.json: cannot be read: it is a named pipe" in output


def test_a_tokenizer_of_another_clone(folder: Path) -> None:
    (folder / "tokenizer.json").write_text(POINTER)
    status, output = refused("serve", "--tokenizer", str(folder), "--port", "0")
    assert status == 3
    assert "tokenizer.json: Git-LFS pointers" in output


HUGE = '{"vocab_size": 2000000000}'
"""A table of 2e9 rows: about a terabyte."""


@pytest.mark.parametrize("words", [("serve", "--port", "0"), ("serve", "--port", "0", "--engine-process"),
                                   ("generate", "--prompt", "x")])  # fmt: skip
def test_a_model_that_cannot_fit_is_refused_before_it_is_read(words: tuple[str, ...]) -> None:
    status, output = refused(*words, "--load-format", "dummy", "--hf-overrides", HUGE)
    assert status == 4, output[-2000:]
    assert "HR-MEM-001" in output
    assert re.search(
        r"does not fit: its weights take [0-9.]+ GiB in bfloat16, and [0-9.]+ GiB", output
    )
    assert "--quantization" in output
    assert "download it again" not in output


def _spoil(folder: Path) -> None:
    """Fill the file with NaN: whoever reads a weight refuses it."""
    [file] = folder.glob("*.safetensors")
    tensors = load_file(file)
    save_file({name: torch.full_like(tensor, torch.nan) for name, tensor in tensors.items()}, file)


def test_stored_weights_beyond_a_budget_are_refused_before_they_are_read(folder: Path) -> None:
    _spoil(folder)
    limit = str(5 << 20)
    status, output = refused("serve", str(folder), "--port", "0", "--max-memory-bytes", limit)
    assert status == 4, output[-2000:]
    assert "5.00 MiB of memory are allowed (max_memory_bytes)" in output


def test_a_context_that_cannot_fit_is_refused_before_weights_are_read(folder: Path) -> None:
    _spoil(folder)
    words = ("--kv-cache-memory-bytes", str(1 << 20))
    status, output = refused("serve", str(folder), "--port", "0", *words)
    assert status == 4, output[-2000:]
    assert "max_model_len of at most" in output
    assert re.search(r"needs [0-9.]+ MiB, [0-9.]+ MiB more than there are", output)


@pytest.mark.parametrize(
    ("command", "words"),
    [(("serve", "--port", "0"), ("--num-gpu-blocks-override", "400000000")),
     (("serve", "--port", "0", "--engine-process"), ("--kv-cache-memory-bytes", "900T")),
     (("generate", "--prompt", "x", "--model"), ("--kv-cache-memory-bytes", "900T"))],
)  # fmt: skip
def test_a_cache_beyond_the_memory_is_refused_before_weights_are_read(
    command: tuple[str, ...], words: tuple[str, str], folder: Path
) -> None:
    """The system would promise it, and end the process once it is filled."""
    _spoil(folder)
    status, output = refused(*command, str(folder), *words)
    assert status == 4, output[-2000:]
    assert "HR-MEM-001" in output
    assert re.search(
        rf"{words[0]} = \d+: the KV cache takes [0-9.]+ GiB, and [0-9.]+ GiB of memory are left for it",
        output,
    )
    assert "Give a smaller" in output


def test_a_context_beyond_the_memory_is_refused_before_weights_are_read(folder: Path) -> None:
    """No size is chosen: one request of the longest context needs more than the model leaves."""
    _spoil(folder)
    config, length = folder / "config.json", 1 << 18
    told = {**json.loads(config.read_text()), "max_position_embeddings": length}
    config.write_text(json.dumps(told))
    words = ("--max-model-len", str(length), "--max-memory-bytes", "128M")
    status, output = refused("serve", str(folder), "--port", "0", *words)
    assert status == 4, output[-2000:]
    assert re.search(rf"max_model_len = {length}: it needs [0-9.]+ MiB, [0-9.]+ MiB more", output)
    assert re.search(r"max_model_len of at most \d+ would fit", output)


_SECOND = """
from headrace import LLM
from headrace_core.platform import CpuPlatform
from headrace_engine.execution.measuring.measure import ProcessMeter
from headrace_engine.execution.populate import unwritten_bytes

first = LLM(kv_cache_memory_bytes=6 << 30, kv_cache_ahead_bytes=0)
promised = unwritten_bytes()
assert promised > 5 << 30, promised
free, seen = CpuPlatform().available_memory(), ProcessMeter().available()
assert abs(free - promised - seen) < 1 << 30, (free, promised, seen)
second = LLM(kv_cache_memory_bytes=64 << 20)
first.close()
assert unwritten_bytes() < 1 << 30
second.close()
"""


def test_a_second_engine_does_not_count_on_what_the_first_will_use() -> None:
    done = subprocess.run(
        [sys.executable, "-c", _SECOND],
        capture_output=True,
        text=True,
        timeout=PATIENCE,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]


_NO_ADDRESSES = """
import resource, sys
from pathlib import Path
from headrace_core.errors import CapacityError
from headrace_models.formats.content import Content

file = Path(sys.argv[1])
with file.open("wb") as out:
    out.truncate(4 << 30)  # sparse: takes no disk
used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
resource.setrlimit(resource.RLIMIT_AS, (used + (256 << 20), resource.RLIM_INFINITY))
for eager in (False, True):
    try:
        Content(file, eager=eager)
    except CapacityError as error:
        print(error)
"""


def test_a_refused_mapping_is_no_damaged_file(tmp_path: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-c", _NO_ADDRESSES, str(tmp_path / "w")],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("the system refused 4.00 GiB of memory for it") == 2
