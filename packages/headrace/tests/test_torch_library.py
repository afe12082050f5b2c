"""Torch's library, which a thread links while a start does something else."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from headrace.assembly import front_end, starting
from headrace.assembly.ahead import torch_library
from headrace.assembly.ahead.torch_library import THREAD, libraries, link, linking_torch
from headrace.assembly.detection import CudaPlatform, is_for_cpus, torch_folder
from headrace.engine_args import EngineArgs
from headrace_core.platform import CpuPlatform
from headrace_engine.sim.platform import SimPlatform

for_linux = pytest.mark.skipif(sys.platform != "linux", reason="links on Linux only")
FOLDER = torch_folder()
for_cpus = pytest.mark.skipif(
    sys.platform != "linux" or FOLDER is None or not is_for_cpus(FOLDER),
    reason="links torch for CPUs, on Linux",
)


def run(code: str, **environ: str) -> list[str]:
    done = subprocess.run(
        [sys.executable, "-c", code],
        capture_output=True, text=True, timeout=120, check=False, env={**os.environ, **environ},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


@pytest.fixture
def linked(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """What threads were asked to link, on a machine with two cores where torch was not imported."""
    asked: list[Any] = []
    monkeypatch.setattr(torch_library, "libraries", lambda platform: [(Path("a.so"), 1)])
    monkeypatch.setattr(torch_library, "most_threads", lambda: 2)
    monkeypatch.setattr(torch_library, "link", asked.append)
    yield asked
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)


@for_cpus
def test_what_is_linked_is_what_torch_takes() -> None:
    said = run(
        "import sys\n"
        "from headrace.assembly.ahead.torch_library import libraries, link\n"
        "from headrace_core.platform import CpuPlatform\n"
        "files = libraries(CpuPlatform())\n"
        "print(*(file.name for file, _ in files))\n"
        "link(files)\n"
        "print('torch' in sys.modules)\n"
        "mapped = lambda: {line.split()[-1] for line in open('/proc/self/maps') if 'libtorch_cpu' in line}\n"
        "before = mapped()\n"
        "import torch\n"
        "print(len(before), mapped() == before, torch.ones(3).sum().item())\n"
        "print(libraries(CpuPlatform()))\n"
    )
    assert said == ["libtorch_global_deps.so libtorch_cpu.so", "False", "1 True 3.0", "()"]


def test_libraries_of_gpus_are_left_to_torch_and_a_simulation_needs_none() -> None:
    assert libraries(CudaPlatform()) == ()
    assert libraries(SimPlatform()) == ()


@for_linux
def test_a_library_that_cannot_be_linked_is_left_to_torch(tmp_path: Path) -> None:
    link([(tmp_path / "missing.so", os.RTLD_LAZY)])


def test_a_start_links_in_a_thread_of_its_own(linked: list[Any]) -> None:
    with linking_torch(CpuPlatform()):
        pass
    for thread in threading.enumerate():
        if thread.name == THREAD:
            thread.join(60)
    assert linked == [[(Path("a.so"), 1)]]


def test_one_core_has_no_further_thread(linked: list[Any], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_library, "most_threads", lambda: 1)
    with linking_torch(CpuPlatform()):
        pass
    assert not linked


def test_the_thread_has_ended_when_a_start_fails(
    linked: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    failed, ended = threading.Event(), threading.Event()

    def work(files: Any) -> None:
        assert failed.wait(60)
        ended.set()

    monkeypatch.setattr(torch_library, "link", work)

    def start() -> None:
        with linking_torch(CpuPlatform()):
            failed.set()
            raise ValueError("the cause")

    with pytest.raises(ValueError, match="the cause"):
        start()
    assert ended.is_set()
    assert THREAD not in {thread.name for thread in threading.enumerate()}


@pytest.mark.parametrize(
    ("settings", "links"),
    [({}, True), ({"engine_process": True}, False)],
    ids=["in this process", "in another process"],
)
def test_who_will_import_torch_links_it(
    linked: list[Any], settings: dict[str, Any], links: bool
) -> None:
    config = EngineArgs(device="cpu", max_model_len=128, **settings).create_engine_config()
    with starting() as timeline:
        front_end(config, None, timeline)
    assert bool(linked) == links


@for_cpus
def test_a_start_that_links_answers_and_ends() -> None:
    said = run(
        "import sys\n"
        "from headrace.assembly.ahead import torch_library\n"
        "link = torch_library.link\n"
        "def noted(files):\n"
        "    print('torch' in sys.modules)\n"
        "    link(files)\n"
        "torch_library.link, torch_library.most_threads = noted, lambda: 2\n"
        "from headrace import LLM, SamplingParams\n"
        "with LLM(max_model_len=128, device='cpu', use_tqdm_on_load=False) as llm:\n"
        "    print(len(llm.generate('Hello', SamplingParams(max_tokens=2, ignore_eos=True),"
        " use_tqdm=False)[0].outputs[0].token_ids))\n"
    )
    assert said == ["False", "2"]


@for_cpus
def test_a_start_that_fails_while_it_links_says_why(tmp_path: Path) -> None:
    """The tokenizer is read beside the linker."""
    said = run(
        "import json, pathlib, shutil, sys, threading\n"
        "from headrace import LLM, demo\n"
        "from headrace.assembly.ahead import torch_library\n"
        "torch_library.most_threads = lambda: 2\n"
        f"folder = pathlib.Path({str(tmp_path)!r}) / 'model'\n"
        "shutil.copytree(demo.path(), folder)\n"
        "(folder / 'tokenizer.json').write_text('{}')\n"
        "try:\n"
        "    LLM(str(folder), max_model_len=128, device='cpu')\n"
        "except Exception as error:\n"
        "    print(type(error).__name__, 'tokenizer.json' in str(error), 'torch' in sys.modules)\n"
        "print([t.name for t in threading.enumerate() if t.name == torch_library.THREAD])\n"
    )
    assert said == ["ModelError True False", "[]"]


BLOCKING = """
#include <fcntl.h>
#include <stdlib.h>
#include <unistd.h>
__attribute__((constructor)) static void wait_until_told(void) {
  char told;
  int pipe = open(getenv("TOLD"), O_RDONLY);
  if (pipe < 0 || read(pipe, &told, 1) != 1) abort();
}
"""
"""A library that is linked once somebody has written to a pipe."""


@for_linux
@pytest.mark.skipif(shutil.which("cc") is None, reason="no C compiler")
def test_a_tokenizer_is_read_while_the_linker_is_busy(tmp_path: Path) -> None:
    source, library, pipe = (tmp_path / name for name in ("slow.c", "slow.so", "told"))
    source.write_text(BLOCKING)
    command = ["cc", "-shared", "-fPIC", "-o", str(library), str(source)]
    subprocess.run(command, check=True, timeout=120)
    os.mkfifo(pipe)
    said = run(
        "import os, threading\n"
        "from headrace import demo\n"
        "from headrace.assembly.ahead.torch_library import link\n"
        "from headrace_engine.input_processing.tokenizer import load_tokenizer, prepare_thread\n"
        "prepare_thread()\n"
        f"thread = threading.Thread(target=link, args=([({str(library)!r}, os.RTLD_NOW)],))\n"
        "thread.start()\n"
        # Opened once the library is being linked.
        "pipe = os.open(os.environ['TOLD'], os.O_WRONLY)\n"
        "print(load_tokenizer(demo.path()).vocab_size > 0, thread.is_alive())\n"
        "os.write(pipe, b'.')\n"
        "thread.join()\n",
        TOLD=str(pipe),
    )
    assert said == ["True True"]
