"""``headrace generate`` with the demo model: bad lines, a kill in the middle, links and pipes."""

from __future__ import annotations

import json
import signal

import forks
import pytest
from servers import PATIENCE, slow_steps

from headrace_testing.waiting import wait_until

SHORT = ("--max-tokens", "3", "--temperature", "0", "--max-model-len", "128")


def start(*words: str, environment: dict[str, str] | None = None) -> forks.Process:
    return forks.start("generate", *words, environment=environment)


def finish(process: forks.Process, status: int = 0) -> tuple[str, str]:
    out, log = process.communicate(timeout=3 * PATIENCE)
    assert process.returncode == status, log
    return out, log


def prompts(count: int) -> str:
    return "".join(
        json.dumps({"prompt": f"What is {n} + 1?", "custom_id": n}) + "\n" for n in range(count)
    )


@pytest.mark.keep(1, every_value=False)
@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGINT])
def test_a_killed_run_goes_on_where_it_stopped(tmp_path, number):
    count = 20
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    partial = tmp_path / "out.jsonl.partial"
    source.write_text(prompts(count))
    words = ("--input", str(source), "--output", str(output), "--max-tokens", "24", "--temperature",
             "0", "--max-num-seqs", "1")  # fmt: skip
    process = start(*words, environment=slow_steps(0.04))
    try:
        wait_until(
            lambda: partial.exists() and partial.read_bytes().count(b"\n") > 3,
            2 * PATIENCE,
            "no answers came",
        )
        assert not output.exists(), "answers are in the journal until all are there"
        process.send_signal(number)
        _, log = process.communicate(timeout=PATIENCE)
    finally:
        process.kill()
        process.wait()
    if number == signal.SIGINT:
        assert process.returncode == 130
        assert log.rstrip().endswith("prompts are answered; run the same command to go on")
    assert not output.exists()
    before = partial.read_bytes().split(b"\n")[1:-1]
    assert 3 <= len(before) < count, "the run was over too soon for this test"
    _, log = finish(start(*words[:-2], "--sampling", '{"top_k": 3}'), status=2)
    assert "other options" in log
    # The kept answers are marked, to be told from new ones.
    partial.write_bytes(partial.read_bytes().replace(b"What is", b"It was:"))
    _, log = finish(start(*words))
    assert f"{len(before)} of {count} prompts are answered already" in log
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer["custom_id"] for answer in found] == list(range(count))
    kept = [answer["prompt"].startswith("It was:") for answer in found]
    assert kept == [n < len(before) for n in range(count)], "run twice, or lost"
    assert all(len(answer["outputs"]) == 1 for answer in found)
    assert not partial.exists()


def test_bad_lines_fail_alone(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    too_long = json.dumps({"prompt": "word " * 500})
    again = prompts(1)
    more = again.replace("0}", "1}")
    lines = f'{prompts(1)}{{"promt": "x"}}\n{{"prompt": "y"\n{too_long}\n{more}{again}'
    source.write_bytes(b"\xef\xbb\xbf" + lines.encode())
    _, log = finish(start("--input", str(source), "--output", str(output), *SHORT), status=1)
    assert "line 2: 'promt': unknown field; did you mean 'prompt'?" in log
    assert "line 3: is not valid JSON" in log
    assert "line 6: custom_id = 0: must differ from that of line 1" in log
    assert log.strip().splitlines()[-1].endswith("4 of 6 prompts failed")
    found = [json.loads(line) for line in output.read_text().splitlines()]
    assert [answer.get("error", {}).get("line") for answer in found] == [None, 2, 3, 4, None, 6]
    assert found[3]["error"]["code"] == "HR-REQ-003"
    assert found[0]["outputs"] == found[4]["outputs"]


def test_a_constraint_that_cannot_go_on_is_named(tmp_path):
    source, output = tmp_path / "in.jsonl", tmp_path / "out.jsonl"
    source.write_text(prompts(1))
    impossible = '{"structured_outputs": {"regex": "a{3}"}, "min_tokens": 9, "max_tokens": 12}'
    words = ("--input", str(source), "--output", str(output), "--sampling", impossible)
    finish(start(*words), status=2)
    [found] = [json.loads(line) for line in output.read_text().splitlines()]
    assert found["error"]["code"] == "HR-REQ-001"
    assert "no token is possible" in found["error"]["message"]


def test_bad_lines_are_named_before_a_model_is_loaded(tmp_path):
    (tmp_path / "in.jsonl").write_text(prompts(1) + "{nonsense\n")
    (tmp_path / "in.txt").write_text("Hello\n" + prompts(1))
    words = ("no/such-model", "--offline", "--input")
    _, log = finish(start(*words, str(tmp_path / "in.jsonl")), status=6)
    lines = log.strip().splitlines()
    assert lines[0].startswith("headrace generate: line 2: is not valid JSON: ")
    assert "no/such-model" in lines[-1]
    _, log = finish(start(*words, str(tmp_path / "in.txt")), status=2)
    assert "line 2 begins with '{'" in log
    (tmp_path / "in.jsonl").write_text("{nonsense\n")
    _, log = finish(start(*words, str(tmp_path / "in.jsonl")), status=2)
    assert "no line can be used; line 1" in log


@pytest.mark.parametrize("place", ["absent/out", "", "/proc/out"])
def test_outputs_that_cannot_be_written_are_refused_first(tmp_path, place):
    words = ("no/such-model", "--offline", "--prompt", "x", "--output", str(tmp_path / place))
    _, log = finish(start(*words), status=2)
    assert "HR-CFG-001" in log
    assert "output" in log or "written" in log


def test_links_stay_and_pipes_are_written_to(tmp_path):
    target, link = tmp_path / "target", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    finish(start("--prompt", "Hello", "--output", str(link), *SHORT))
    assert link.is_symlink()
    answer = json.loads(target.read_text())
    out, _ = finish(start("--prompt", "Hello", "--output", "/dev/stdout", *SHORT))
    assert json.loads(out) == answer
    out, _ = finish(start("--prompt", "Hello", "--json", *SHORT))
    assert json.loads(out) == answer
    assert sorted(p.name for p in tmp_path.iterdir()) == ["link", "target"]
