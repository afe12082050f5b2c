"""The examples of blocks that travel between engines, in processes of their own: what was fetched, and that
answers are those of one engine."""

from __future__ import annotations

import re
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams

pytestmark = pytest.mark.days(3)

EXAMPLES = Path(__file__).parents[1] / "examples"
PATIENCE = 240.0
CACHE = 64 << 20
FOUND = re.compile(r"\((\d+) of (\d+) tokens (?:fetched|loaded)\) -> (.*)")


def ran(script: str, folder: Path, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, str(EXAMPLES / script), *words],
        cwd=folder, capture_output=True, text=True, timeout=PATIENCE, check=False,
    )  # fmt: skip


def found(output: str) -> list[tuple[int, int, str]]:
    """Of each prompt: tokens that came from elsewhere, all, and what is printed of the answer."""
    return [(int(n), int(length), text) for n, length, text in FOUND.findall(output)]


def texts(prompts: list[str], max_tokens: int) -> list[str]:
    """What one engine without a connector says."""
    params = SamplingParams(temperature=0, max_tokens=max_tokens)
    with LLM(kv_cache_memory_bytes=CACHE, enforce_eager=True) as llm:
        return [o.outputs[0].text for o in llm.generate(prompts, params, use_tqdm=False)]


def test_a_process_fetches_what_another_one_computed(tmp_path: Path) -> None:
    words = ("--repeat", "10", "--max-tokens", "6", "--kv-cache-memory-bytes", str(CACHE))
    done = ran("disaggregated_prefill.py", tmp_path, *words)
    assert done.returncode == 0, done.stderr[-3000:]
    prompts = runpy.run_path(str(EXAMPLES / "disaggregated_prefill.py"))["prompts"](10)
    answers = found(done.stdout)
    assert [text for _, _, text in answers] == [repr(text) for text in texts(prompts, 6)]
    for fetched, length, _ in answers:
        assert length / 2 < fetched < length


def test_two_stages_with_a_folder_between_them(tmp_path: Path) -> None:
    script, small = "disaggregated_prefill_files.py", ("--kv-cache-memory-bytes", str(CACHE))
    missing = ran(script, tmp_path, "decode")
    assert missing.returncode == 1
    assert "output.txt: there is no such file: run the stage 'prefill' first" in missing.stderr
    first = ran(script, tmp_path, "prefill", "--repeat", "30", *small)
    assert first.returncode == 0, first.stderr[-3000:]
    second = ran(script, tmp_path, "decode", *small)
    assert second.returncode == 0, second.stderr[-3000:]
    prompts = runpy.run_path(str(EXAMPLES / script))["read"](tmp_path / "output.txt")
    answers = found(second.stdout)
    assert [text for _, _, text in answers] == [f"length: {text!r}" for text in texts(prompts, 10)]
    assert all(loaded > length / 2 for loaded, length, _ in answers)


def test_lost_blocks_change_no_answer(tmp_path: Path) -> None:
    done = ran("kv_load_failure_recovery.py", tmp_path, "--folder", "runs", "--repeat", "30")
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-3000:]
    assert "answers are the same with and without lost blocks" in done.stdout
    answers = found(done.stdout)
    normal, sync, asynchronous = (answers[first : first + 4] for first in (0, 4, 8))
    for run in (sync, asynchronous):
        assert [text for *_, text in run] == [text for *_, text in normal]
        assert sum(n for n, *_ in run) < sum(n for n, *_ in normal), "some were lost"
    other = ran(
        "disaggregated_prefill_files.py", tmp_path, "decode", "--storage", "runs/storage",
        "--prompts", "runs/output.txt", "--connector", "FailingConnector", "--connector-module",
        "failing_connector", "--load-failure-policy", "fail",
    )  # fmt: skip
    assert other.returncode == 0, other.stderr[-3000:]
    ends = [text.partition(":")[0] for *_, text in found(other.stdout)]
    assert "error" in ends
    assert set(ends) <= {"error", "length", "stop"}


def test_a_difference_is_printed_and_is_a_failure(capsys: pytest.CaptureFixture[str]) -> None:
    compare = runpy.run_path(str(EXAMPLES / "kv_load_failure_recovery.py"))["compare"]
    compare("length: 'a'\n", "length: 'a'\n", "sync")
    with pytest.raises(SystemExit) as ended:
        compare("length: 'a'\n", "length: 'b'\n", "sync")
    assert ended.value.code == 1
    assert "+length: 'b'" in capsys.readouterr().out
