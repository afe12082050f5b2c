"""``examples/data_parallel.py``: shares, exit statuses, and two engines of a mixture of experts."""

from __future__ import annotations

import multiprocessing
import re
import runpy
import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
from families import FAMILIES, save_model

import headrace_demo

SCRIPT = Path(__file__).parents[1] / "examples" / "data_parallel.py"
PATIENCE = 240.0
VOCABULARY = 1408
"""Size of the demo model's."""


def ran(*words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(SCRIPT), *words],
        capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


@pytest.fixture(scope="module")
def example() -> dict[str, object]:
    return runpy.run_path(str(SCRIPT))


@pytest.mark.parametrize(("size", "count"), [(2, 400), (3, 400), (7, 5), (1, 0)])
def test_shares_are_neighbours_and_all_there_is(
    example: dict[str, object], size: int, count: int
) -> None:
    shares = [list(example["share"](rank, size, count)) for rank in range(size)]  # type: ignore[operator]
    assert [index for one in shares for index in one] == list(range(count))
    lengths = [len(share) for share in shares]
    assert lengths == sorted(lengths, reverse=True)
    assert max(lengths) - min(lengths) <= 1


@pytest.mark.days(3)
def test_two_engines_answer_all_prompts(tmp_path: Path) -> None:
    config, settings = FAMILIES["mixtral"]
    save_model("mixtral", tmp_path, {"mixtral": (config, {**settings, "vocab_size": VOCABULARY})})
    for file in headrace_demo.model_path().glob("*token*.json"):
        shutil.copy(file, tmp_path)
    words = ("--model", str(tmp_path), "--num-prompts", "400", "--max-model-len", "64")
    done = ran(*words, "--dp-size", "2", "--kv-cache-memory-bytes", str(16 << 20))
    assert done.returncode == 0, done.stderr[-3000:]
    assert "rank 0: prompts 0 to 199, 200" in done.stdout
    assert "rank 1: prompts 200 to 399, 200" in done.stdout
    for rank in "01":
        assert f"rank {rank}: 200 answers" in done.stdout
        assert len(re.findall(rf"^rank {rank}: '.*' -> ", done.stdout, re.MULTILINE)) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--dp-size", "3", "--dp-num-nodes", "2"), "--dp-size 3: must be divisible by --dp-num-nodes 2"),
        (("--dp-num-nodes", "2", "--dp-node-rank", "2"), "--dp-node-rank 2: must be from 0 to 1"),
    ],
)  # fmt: skip
@pytest.mark.days(3)
def test_numbers_that_do_not_fit(words: tuple[str, ...], message: str) -> None:
    done = ran(*words)
    assert done.returncode == 2
    assert message in done.stderr


def _fails() -> None:
    sys.exit(5)


def test_a_process_that_hangs_is_killed(
    example: dict[str, object], capsys: pytest.CaptureFixture[str]
) -> None:
    context = multiprocessing.get_context("fork")
    hangs = context.Process(target=time.sleep, args=(PATIENCE,))
    fails = context.Process(target=_fails)
    for process in (hangs, fails):
        process.start()
    fails.join()
    assert example["ended"]([fails], PATIENCE) == 5  # type: ignore[operator]
    assert example["ended"]([hangs], 0.05) == 1  # type: ignore[operator]
    assert (
        f"process {hangs.pid} has not ended in 0.05 seconds: it is killed"
        in capsys.readouterr().out
    )
    assert hangs.exitcode is not None
    assert hangs.exitcode < 0
