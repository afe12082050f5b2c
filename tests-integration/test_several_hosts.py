"""Ranks on two hosts: the tokens of one process, and an end of all when one ends."""

from __future__ import annotations

import os
import signal
import socket
import threading
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from forks import start
from modes import PROMPTS, SETTINGS
from posted import post
from servers import PATIENCE, SLACK, alive, children_of, serving, slow_steps
from test_faults import _Stream as OpenStream
from test_pipeline_parallel import PARTITION
from test_tensor_parallel_served import BODY
from two_hosts import Host, refusal, second_host

from headrace import LLM, SamplingParams
from headrace_core.errors import EngineDead
from headrace_engine.multiproc.nodes import listener
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(3)

NUM_TOKENS = 12
GREEDY = SamplingParams(temperature=0, max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=2)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SECONDS = 5.0 * SLACK
JOIN_SECONDS = 4 * PATIENCE
"""All hosts have come, and those that do not fit have been sent away, within these."""
HOSTS = {"tensor_parallel_size": 2, "nnodes": 2}


@pytest.fixture(autouse=True)
def _patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """A host that does not come ends a test, not the run."""
    monkeypatch.setattr(listener, "JOIN_SECONDS", JOIN_SECONDS)


@pytest.fixture(scope="module")
def host() -> Iterator[Host]:
    why = refusal()
    if why is not None:
        pytest.skip(why)
    with second_host() as made:
        yield made


@pytest.fixture(scope="module")
def secret(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("secret") / "secret"
    file.write_text("a secret of twenty-eight bytes\n")
    return file


def free_port(address: str) -> int:
    with socket.create_server((address, 0)) as listener:
        return int(listener.getsockname()[1])


def said(llm: LLM, params: SamplingParams = GREEDY) -> list[list[tuple[int, float]]]:
    outputs = llm.generate(PROMPTS, params, use_tqdm=False)
    return [
        [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for output in outputs for one in output.outputs
    ]  # fmt: skip


def agree(left: list[list[tuple[int, float]]], right: list[list[tuple[int, float]]]) -> None:
    assert [[t for t, _ in one] for one in left] == [[t for t, _ in one] for one in right]
    for one, other in zip(left, right, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)


def flags(folder: Path, port: int, address: str, **changes: Any) -> list[str]:
    """Command of host 1, with the settings of :data:`SETTINGS`."""
    given = {
        **SETTINGS,
        **HOSTS,
        "node_rank": 1,
        "master_addr": address,
        "master_port": port,
        **changes,
    }
    words = ["serve", str(folder), "--headless"]
    for name, value in given.items():
        flag = "--" + name.replace("_", "-")
        if isinstance(value, bool):
            words.append(flag if value else flag.replace("--", "--no-", 1))
        else:
            words += [flag, str(value)]
    return words


def leading(folder: Path, port: int, address: str, **changes: Any) -> LLM:
    return LLM(
        str(folder), **{**SETTINGS, **HOSTS, **changes}, master_addr=address, master_port=port
    )


@pytest.fixture(scope="module")
def folders(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Checkpoints, each in two places: a host has its own."""
    found = {}
    for family in ("llama", "qwen3_moe"):
        found[family] = tmp_path_factory.mktemp(family)
        save_model(family, found[family])
    return found


def whole(folder: Path) -> list[list[tuple[int, float]]]:
    with LLM(str(folder), **SETTINGS) as llm:
        return said(llm)


def begin(llm: LLM) -> threading.Thread:
    """A call that runs; it raises when the engine ends."""
    begun = threading.Event()

    def run() -> None:
        begun.set()
        while True:
            try:
                llm.generate(PROMPTS, LONG, use_tqdm=False)
            except EngineDead:
                return

    thread = threading.Thread(target=run)
    thread.start()
    begun.wait(PATIENCE)
    return thread


def test_hosts_that_do_not_fit_are_refused_and_the_right_one_joins(
    host: Host, folders: dict[str, Path], secret: Path, tmp_path: Path
) -> None:
    """Then a rank of it is killed."""
    folder, port = folders["llama"], free_port(host.address)
    other_secret = tmp_path / "secret"
    other_secret.write_text("another secret of some bytes")
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(leading, folder, port, host.address, node_secret_file=str(secret))
        differs = flags(folder, port, host.address, node_secret_file=secret, max_num_seqs=5, seed=3)
        status, log = ended(differs)
        assert status == 2
        assert "model.seed: 0 on node 0, 3 on node 1; scheduler.max_num_seqs: " in log
        status, log = ended(flags(folder, port, host.address, node_secret_file=other_secret))
        assert status != 0
        assert "HEADRACE_NODE_SECRET, or the content of --node-secret-file, must be the same" in log
        assert not coming.done()
        node = host.start(*flags(folder, port, host.address, node_secret_file=secret))
        llm = coming.result(JOIN_SECONDS)
    with llm:
        agree(said(llm), whole(folder))
        assert [report["rank"] for report in llm.collective_rpc("report")] == [0, 1]
        assert len(node.ranks) == 1
        [rank], call = node.ranks, begin(llm)
        os.kill(rank, signal.SIGKILL)
        wait_until(lambda: llm.engine.client.failure is not None, SECONDS)
        assert "on node 1) ended: killed by signal 9" in str(llm.engine.client.failure)
        call.join(SECONDS)
        assert node.wait(SECONDS) == 1
    assert "killed by signal 9" in node.log


def test_stages_on_two_hosts_until_one_is_killed(
    host: Host, folders: dict[str, Path], secret: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each host has a stage, of two ranks; a host that would cut the model elsewhere is refused."""
    folder, port = folders["llama"], free_port(host.address)
    sizes = {
        "tensor_parallel_size": 2,
        "pipeline_parallel_size": 2,
        "node_secret_file": str(secret),
    }
    words = flags(folder, port, host.address, **sizes)
    with ThreadPoolExecutor() as pool:
        coming = pool.submit(leading, folder, port, host.address, **sizes)
        other = host.start(*words, environment={PARTITION: "1,3"})
        assert other.wait(JOIN_SECONDS) == 2
        assert f"{PARTITION}: unset on node 0, 1,3 on node 1" in other.log
        node = host.start(*words)
        llm = coming.result(JOIN_SECONDS)
    with llm:
        agree(said(llm), whole(folder))
        assert [report["rank"] for report in llm.collective_rpc("report")] == [0, 1, 2, 3]
        process, ranks, call = node.pid, node.ranks, begin(llm)
        assert len(ranks) == 2
        os.kill(process, signal.SIGKILL)
        wait_until(lambda: llm.engine.client.failure is not None, SECONDS)
        assert "node 1 (" in str(llm.engine.client.failure)
        call.join(SECONDS)
        wait_until(lambda: not any(map(alive, [process, *ranks])), SECONDS, "a rank lives on")
    node.close()


def ended(words: list[str]) -> tuple[int, str]:
    process = start(*words)
    output, errors = process.communicate(JOIN_SECONDS)
    return process.wait(0.0), output + errors


def test_experts_on_two_hosts_until_the_network_is_cut(
    host: Host, folders: dict[str, Path], secret: Path
) -> None:
    """Neither host is told: both notice. The last test of this host."""
    folder, port = folders["qwen3_moe"], free_port(host.address)
    node = host.start(*flags(folder, port, host.address), environment=of_file(secret))
    with leading(folder, port, host.address, node_secret_file=str(secret)) as llm:
        agree(said(llm), whole(folder))
        process, ranks = node.pid, node.ranks
        call = begin(llm)
        host.cut()
        wait_until(lambda: llm.engine.client.failure is not None, SECONDS)
        call.join(SECONDS)
        assert node.wait(SECONDS) == 1
    assert "rank 0 at" in node.log
    assert not any(map(alive, [process, *ranks]))


def of_file(secret: Path) -> dict[str, str]:
    return {"HEADRACE_NODE_SECRET": secret.read_text().strip()}


def test_a_server_on_one_host_and_ranks_on_another_end_together(folders: dict[str, Path]) -> None:
    """On the loopback interface, where no secret is needed."""
    folder, port = folders["llama"], free_port("127.0.0.1")
    common = flags(folder, port, "127.0.0.1")
    node = start(*common)
    zero = [word for word in common if word != "--headless"]
    zero[zero.index("--node-rank") + 1] = "0"
    server = start(*zero, "--port", "0", "--disable-access-log-for-endpoints", "/health")
    log = []
    assert server.stderr is not None
    for line in server.stderr:
        log.append(line)
        if "serving at http" in line:
            break
    server.send_signal(signal.SIGTERM)
    output, errors = server.communicate(PATIENCE)
    assert server.wait(0.0) == 0, "".join(log) + output + errors
    _, errors = node.communicate(SECONDS)
    assert node.wait(0.0) == 0, errors
    assert "the engine was shut down" in errors


def test_a_server_ends_with_a_stage_of_another_host(folders: dict[str, Path]) -> None:
    """On the loopback interface; both answer through a socket what one process says."""
    port, segments = free_port("127.0.0.1"), set(os.listdir("/dev/shm"))
    words = ["-pp", "2", "--nnodes", "2", "--master-port", str(port), "--dtype", "float32",
             "--num-threads", "1", "--served-model-name", "demo"]  # fmt: skip
    with LLM(dtype="float32", num_threads=1) as llm:
        params = SamplingParams(temperature=0, max_tokens=24)
        [expected] = llm.chat(BODY["messages"], params, use_tqdm=False)
    node = start("serve", *words, "--node-rank", "1", "--headless")
    try:
        with serving(*words, environment=slow_steps(0.02)) as server:
            [choice] = post(f"{server.api}/chat/completions", BODY)["choices"]
            assert choice["message"]["content"] == expected.outputs[0].text
            [rank] = children_of(node.pid)
            opened = OpenStream(server, 1500)
            os.kill(rank, signal.SIGKILL)
            opened.join(SECONDS)
            assert any('"error"' in line for line in opened.lines), opened.lines[-3:]
            assert server.process.wait(3 * SECONDS) != 0
            log = "".join(server.log)
        cause = f"rank 1 (process {rank} on node 1) ended: killed by signal 9"
        assert cause in log
        _, errors = node.communicate(SECONDS)
        assert node.wait(0.0) == 1
        assert cause in errors
    finally:
        node.kill()
    assert set(os.listdir("/dev/shm")) <= segments


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"master_addr": "10.255.255.1"}, r"HEADRACE_NODE_SECRET: holds 0 bytes: must be the same secret"),
        ({"communicator": "shm"}, r"communicator = 'shm': must be 'auto' or 'gloo' with nnodes = 2"),
        ({"node_rank": 1}, r"node_rank = 1: must be 0 where requests are taken.*--headless --node-rank 1"),
        ({"node_rank": 2}, r"node_rank = 2: must be in 0..1"),
        ({"nnodes": 3}, r"nnodes = 3: must be a divisor of the number of ranks, 2"),
        ({"tensor_parallel_size": 1}, r"nnodes = 2: must be a divisor of the number of ranks, 1"),
        ({"data_parallel_size": 2}, r"data_parallel_size = 2: must be 1 with nnodes = 2.*headrace route"),
        ({"master_port": 0}, r"master_port = 0: must be in 1..65535"),
        ({"master_addr": "127.0.0.1:29501"}, r"master_addr = '127.0.0.1:29501': .*the port is master_port"),
    ],
)  # fmt: skip
def test_what_does_not_work_is_refused_by_name(
    folders: dict[str, Path], settings: dict[str, Any], told: str
) -> None:
    with pytest.raises(ValueError, match=told):
        LLM(str(folders["llama"]), **{**SETTINGS, **HOSTS, **settings})


def test_host_0_is_not_headless() -> None:
    status, log = ended(["serve", "--headless"])
    assert status != 0
    assert "headless: must be given together with --nnodes above 1 and a --node-rank above 0" in log
