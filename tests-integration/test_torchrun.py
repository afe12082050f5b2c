"""``distributed_executor_backend="external_launcher"``: one script in the processes of torchrun."""

from __future__ import annotations

import json
import math
import os
import re
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from families import VOCAB_SIZE, save_model
from modes import PROMPTS, SETTINGS
from servers import PATIENCE, SLACK

from headrace import LLM, SamplingParams
from headrace.assembly.hosts.launched import LaunchedRank

pytestmark = pytest.mark.days(3)

EXAMPLES = Path(__file__).parents[1] / "examples"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
SCRIPT = """
import json, os, sys
from headrace import LLM, SamplingParams
folder, settings, prompts, then = json.loads(sys.argv[1])
rank = int(os.environ["RANK"])
def tell(kind, what):
    os.write(1, (json.dumps([rank, kind, what]) + "\\n").encode())  # whole lines of several processes
def said(outputs):
    return [[[t, e[t].logprob] for t, e in zip(one.token_ids, one.logprobs)]
            for output in outputs for one in output.outputs]
greedy = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
llm = LLM(folder, **settings, distributed_executor_backend="external_launcher")
tell("pid", os.getpid())
tell("greedy", said(llm.generate(prompts, greedy, use_tqdm=False)))
random = SamplingParams(temperature=1.0, n=2, max_tokens=6, ignore_eos=True, logprobs=1)
tell("random", said(llm.generate(prompts[:3], random, use_tqdm=False)))
tell("ranks", [report["rank"] for report in llm.collective_rpc("report")])
tell("reset", llm.reset_prefix_cache())
if then == "again":
    import glob
    from safetensors.torch import load_file
    [file] = glob.glob(folder + "/*.safetensors")
    llm.update_weights({"model.norm.weight": 0 * load_file(file)["model.norm.weight"]})
    tell("updated", said(llm.generate(prompts[:1], greedy, use_tqdm=False)))
if then == "differ":
    try:
        llm.generate(prompts[:2] if rank == 0 else prompts[1:3], greedy, use_tqdm=False)
    except Exception as error:
        tell("error", str(error))
elif then == "wait":
    try:
        while True:
            llm.generate(prompts, greedy, use_tqdm=False)
    except Exception as error:
        tell("error", str(error))
        os._exit(3)
llm.close()
if then == "again":
    with LLM(folder, **settings, distributed_executor_backend="external_launcher") as llm:
        tell("again", said(llm.generate(prompts, greedy, use_tqdm=False)))
"""


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("llama")
    save_model("llama", folder)
    return folder


def whole(folder: Path) -> list[list[tuple[int, float]]]:
    with LLM(str(folder), **SETTINGS) as llm:
        outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [
        [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for output in outputs for one in output.outputs
    ]  # fmt: skip


def arguments(folder: Path, size: int, then: str = "", stages: int = 1) -> str:
    settings = {**SETTINGS, "tensor_parallel_size": size, "pipeline_parallel_size": stages}
    return json.dumps([str(folder), settings, PROMPTS, then])


def torchrun(count: int, *words: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", str(count),
         *words],
        capture_output=True, text=True, timeout=3 * PATIENCE, check=False,
        env={**os.environ, "OMP_NUM_THREADS": "1"},
    )  # fmt: skip


def told(output: str) -> dict[str, dict[int, Any]]:
    """What the script's processes have told, by kind and rank."""
    found: dict[str, dict[int, Any]] = {}
    for line in output.splitlines():
        if line.startswith("["):
            rank, kind, what = json.loads(line)
            found.setdefault(kind, {})[rank] = what
    return found


def agree(found: list[list[list[Any]]], wanted: list[list[tuple[int, float]]]) -> None:
    assert [[t for t, _ in one] for one in found] == [[t for t, _ in one] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


@pytest.fixture
def script(tmp_path: Path) -> str:
    file = tmp_path / "script.py"
    file.write_text(SCRIPT)
    return str(file)


def test_every_rank_gets_the_outputs_of_one_process(script: str, tmp_path: Path) -> None:
    """Of experts, and of two engines one after the other."""
    save_model("qwen3_moe", tmp_path / "moe")
    run = torchrun(2, script, arguments(tmp_path / "moe", 2, "again"))
    assert run.returncode == 0, run.stderr[-3000:]
    found = told(run.stdout)
    for kind in ("greedy", "random", "again"):
        assert found[kind][0] == found[kind][1], "the same bits on all ranks"
    agree(found["greedy"][1], whole(tmp_path / "moe"))
    assert found["again"][0] == found["greedy"][0]
    assert found["ranks"] == {0: [0, 1], 1: [0, 1]}
    assert found["reset"] == {0: True, 1: True}
    for rank in range(2):
        [answer] = found["updated"][rank]
        assert [p for _, p in answer] == pytest.approx([-math.log(VOCAB_SIZE)] * len(answer))


def test_two_engines_of_two_ranks(script: str, folder: Path) -> None:
    run = torchrun(4, script, arguments(folder, 2))
    assert run.returncode == 0, run.stderr[-3000:]
    found = told(run.stdout)
    assert len(found["pid"]) == 4
    wanted = whole(folder)
    for rank in range(4):
        agree(found["greedy"][rank], wanted)
    assert found["random"][0] == found["random"][1]
    assert found["random"][2] == found["random"][3]


def test_two_stages_of_two_ranks(script: str, folder: Path) -> None:
    run = torchrun(4, script, arguments(folder, 2, stages=2))
    assert run.returncode == 0, run.stderr[-3000:]
    found = told(run.stdout)
    for kind in ("greedy", "random"):
        assert all(found[kind][rank] == found[kind][0] for rank in range(4)), (
            "the same bits on all ranks"
        )
    agree(found["greedy"][0], whole(folder))
    assert list(found["ranks"].values()) == [[0, 1, 2, 3]] * 4


class Launched:
    """The processes of one engine, started by hand: the process of rank 0 serves the store."""

    def __init__(self, script: str, argument: str) -> None:
        with socket.create_server(("127.0.0.1", 0)) as listener:
            port = listener.getsockname()[1]
        place = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
        self.processes = [
            subprocess.Popen(
                [sys.executable, script, argument], stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                text=True, env={**os.environ, **place, "OMP_NUM_THREADS": "1", "RANK": str(rank)},
            )
            for rank in range(2)
        ]  # fmt: skip

    def wait_for(self, rank: int, kind: str) -> Any:
        """What a rank tells of that kind."""
        stdout = self.processes[rank].stdout
        assert stdout is not None
        for line in stdout:
            _, told_kind, what = json.loads(line)
            if told_kind == kind:
                return what
        raise AssertionError(self.processes[rank].communicate()[1][-3000:])

    def ends(self, rank: int, seconds: float = 5 * SLACK) -> tuple[int, str, str]:
        output, errors = self.processes[rank].communicate(timeout=seconds)
        return self.processes[rank].returncode, output, errors

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.communicate()


@pytest.mark.parametrize(
    ("sizes", "killed", "cause"),
    [
        ((2, 1), 1, r"node 1 \(127.0.0.1:\d+\) ended|rank 1 .*ended"),
        ((2, 1), 0, "rank 0 of this engine is gone"),
        ((1, 2), 1, r"node 1 \(127.0.0.1:\d+\) ended|rank 1 .*ended"),
        ((1, 2), 0, "rank 0 of this engine is gone"),
    ],
)
def test_a_killed_process_ends_the_calls_of_the_other(
    script: str, folder: Path, sizes: tuple[int, int], killed: int, cause: str
) -> None:
    """Ranks of one stage, and stages, whose outputs until then are those of one process."""
    size, stages = sizes
    launched = Launched(script, arguments(folder, size, "wait", stages))
    try:
        for rank in range(2):
            found = launched.wait_for(rank, "greedy")
            if stages > 1:
                assert found == [[[t, p] for t, p in one] for one in whole(folder)]
            launched.wait_for(rank, "reset")
        launched.processes[killed].send_signal(signal.SIGKILL)
        status, output, errors = launched.ends(1 - killed)
        assert status == 3, errors[-3000:]
        [error] = told(output)["error"].values()
        assert re.search(cause, error), error
    finally:
        launched.close()


def test_other_prompts_are_refused_on_both_ranks(script: str, folder: Path) -> None:
    launched = Launched(script, arguments(folder, 2, "differ"))
    try:
        for rank in range(2):
            status, output, errors = launched.ends(rank, 2 * PATIENCE)
            assert status == 0, errors[-3000:]
            [error] = told(output)["error"].values()
            assert "rank 1 of this engine asked for a request that is not rank 0's" in error
    finally:
        launched.close()


def test_the_examples() -> None:
    run = torchrun(2, str(EXAMPLES / "torchrun.py"), "--max-model-len", "256")
    assert run.returncode == 0, run.stderr[-3000:]
    assert len(run.stdout.splitlines()) == 3, "rank 0 prints"
    run = torchrun(2, str(EXAMPLES / "torchrun_data_parallel.py"), "--max-model-len", "256")
    assert run.returncode == 0, run.stderr[-3000:]
    numbers = re.findall(r"^engine (\d): '(\d):", run.stdout, re.MULTILINE)
    assert sorted(numbers) == [(str(n % 2), str(n)) for n in (0, 2, 4, 6, 1, 3, 5, 7)]


ENVIRONMENT = {"RANK": "1", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "29500"}


@pytest.mark.parametrize(
    ("environment", "settings", "wrong"),
    [
        ({"RANK": ""}, {}, "RANK: is not set.*torchrun"),
        ({"MASTER_ADDR": ""}, {}, "MASTER_ADDR: is not set"),
        ({"WORLD_SIZE": "two"}, {}, "WORLD_SIZE = 'two': must be a number"),
        ({"RANK": "2"}, {}, r"RANK = 2: must be in 0..1"),
        ({"WORLD_SIZE": "3"}, {}, r"WORLD_SIZE = 3: must be 2 .*or a multiple of 2"),
        ({}, {"data_parallel_size": 2}, r"WORLD_SIZE = 2: must be 4 for 2 engines of 2 ranks"),
        ({}, {"engine_process": True}, "engine_process: must be left out"),
        ({}, {"cpu_bind": "0-1"}, "device.cpu_bind: must be left out"),
        (
            {"LOCAL_WORLD_SIZE": "1"},
            {"communicator": "shm"},
            "parallel.communicator: must be left out",
        ),
    ],
)
def test_what_does_not_fit_is_refused_by_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, environment: dict[str, str],
    settings: dict[str, Any], wrong: str,
) -> None:  # fmt: skip
    for name, value in {**ENVIRONMENT, **environment}.items():
        monkeypatch.setenv(name, value)
    with pytest.raises(ValueError, match=wrong):
        LLM(str(folder), **{**SETTINGS, "tensor_parallel_size": 2, **settings},
            distributed_executor_backend="external_launcher")  # fmt: skip


def test_engines_may_span_hosts() -> None:
    def spans(rank: int, size: int) -> bool:
        return LaunchedRank(rank, 8, 4, "a", 1).spans_hosts(size)

    assert [spans(rank, 4) for rank in range(8)] == [False] * 8
    assert [spans(rank, 8) for rank in range(8)] == [True] * 8
    assert not spans(3, 2)
