"""Blocks of layers on several stages: each saves and loads the layers that it has, and a block is there if
all have theirs."""

from __future__ import annotations

import importlib.util
import json
import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from ports import free_ports
from posted import post
from servers import SLACK, RunningServer, alive, serving
from test_kv_ranks import Said, agree, ask, counts, engine, files, is_idle, peers, prefill, transfer
from test_kv_ranks import checkpoints as checkpoints  # a fixture
from test_kv_ranks import wanted as wanted  # likewise
from test_pipeline_parallel import PARTITION
from test_prefill_decode import LIBRARIES
from test_tensor_parallel_served import ranks_of

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

pytestmark = pytest.mark.days(4)

STAGES = {"pipeline_parallel_size": 2}
EACH = {"kv_by_layer": True}


@pytest.fixture
def llama(checkpoints: dict[str, Path]) -> Path:
    """Four layers."""
    return checkpoints["llama"]


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("llama", {}),
        ("gemma3", {"async_scheduling": False}),
        ("gemma3", {"max_num_batched_tokens": 24, "max_num_seqs": 2}),
        ("deepseek_v3", {"tensor_parallel_size": 2}),
    ],
)
def test_stages_find_what_stages_have_saved(
    checkpoints: dict[str, Path],
    wanted: dict[str, Said],
    tmp_path: Path,
    kind: str,
    changes: dict[str, Any],
) -> None:
    """Full attention, windows beside it, latent attention; steps beside each other and alone."""
    settings = {**STAGES, **changes, **files(tmp_path)}
    with engine(checkpoints[kind], **settings) as first:
        said, computed = ask(first)
        agree(said, wanted[kind])
        assert computed == 150
        assert counts(first)["saved_blocks"] > 0
    with engine(checkpoints[kind], **settings) as second:
        assert ask(second) == (said, 6), "bit for bit; two tokens of each prompt: 48 are 6 blocks"
        found = counts(second)
        assert found["hit_tokens"] == 144
        assert found["failed_blocks"] == 0
        assert is_idle(second)


@pytest.mark.parametrize(
    ("writers", "readers", "how"),
    [
        ({"pipeline_parallel_size": 2}, {}, EACH),
        ({}, {"pipeline_parallel_size": 3}, EACH),
        ({"tensor_parallel_size": 2}, {"pipeline_parallel_size": 2}, {**EACH, "kv_head_parts": 2}),
    ],
)
def test_other_stages_find_them_layer_by_layer(
    llama: Path,
    wanted: dict[str, Said],
    tmp_path: Path,
    writers: dict[str, int],
    readers: dict[str, int],
    how: dict[str, Any],
) -> None:
    with engine(llama, **writers, **files(tmp_path, **how)) as first:
        agree(ask(first)[0], wanted["llama"])
    with engine(llama, **readers, **files(tmp_path, **how)) as second:
        said, computed = ask(second)
        agree(said, wanted["llama"])
        assert computed == 6
        assert is_idle(second)


def test_other_layers_match_nothing(
    llama: Path, wanted: dict[str, Said], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without ``kv_by_layer`` a part is what a stage has."""
    with engine(llama, **STAGES, **files(tmp_path)) as first:
        ask(first)
    with engine(llama, **files(tmp_path)) as whole:
        assert ask(whole) == (wanted["llama"], 150)
    monkeypatch.setenv(PARTITION, "1,3")
    with engine(llama, **STAGES, **files(tmp_path)) as other:
        assert ask(other) == (wanted["llama"], 150)
        assert counts(other)["failed_blocks"] == 0


def test_a_part_that_one_stage_cannot_load_is_computed_by_all(
    llama: Path, wanted: dict[str, Said], tmp_path: Path
) -> None:
    """Every second file is cut off, whichever stage's it is; then some are gone."""
    with engine(llama, **STAGES, **files(tmp_path)) as first:
        ask(first)
    for path in sorted(tmp_path.rglob("*.kv"))[::2]:
        path.write_bytes(path.read_bytes()[:-9])
    fails = files(tmp_path, kv_load_failure_policy="recompute")
    with engine(llama, **STAGES, **fails) as second:
        said, computed = ask(second)
        assert said == wanted["llama"]
        assert computed > 6
        assert counts(second)["failed_blocks"] > 0
        assert is_idle(second)


def test_memory_and_disk_of_each_stage(
    llama: Path, wanted: dict[str, Said], tmp_path: Path
) -> None:
    """Beside a folder that is shared: with several connectors in one."""
    few = {**STAGES, "num_gpu_blocks_override": 18, "max_num_seqs": 1}
    disk, shared = tmp_path / "disk", tmp_path / "shared"
    sizes = {"cpu_bytes_to_use": 64 << 20, "disk_bytes_to_use": 64 << 20}
    memory = transfer("offload", cpu_bytes_to_use=64 << 20)
    with engine(llama, **few, **memory) as model:
        assert ask(model)[0] == wanted["llama"]
        assert ask(model) == (wanted["llama"], 6), "what the small cache has given up"
    both = transfer(
        "multi",
        connectors=[
            transfer("offload", disk_path=str(disk), **sizes)["kv_transfer_config"],
            files(shared)["kv_transfer_config"],
        ],
    )
    with engine(llama, **few, **both) as model:
        ask(model)
    assert {one.name for one in disk.iterdir()} == {"rank-0-of-2", "rank-1-of-2"}
    with engine(llama, **few, **both) as model:
        assert ask(model) == (wanted["llama"], 6)
    with engine(llama, **few, **files(shared)) as model:
        assert ask(model) == (wanted["llama"], 6)


@pytest.mark.parametrize(
    ("givers", "takers", "how"),
    [
        ({"pipeline_parallel_size": 2}, {"pipeline_parallel_size": 2}, {}),
        ({"pipeline_parallel_size": 2}, {}, EACH),
    ],
)
def test_engines_give_each_other_blocks(
    llama: Path,
    wanted: dict[str, Said],
    givers: dict[str, int],
    takers: dict[str, int],
    how: dict[str, Any],
) -> None:
    with (
        engine(llama, **givers, **peers("kv_producer", **how)) as first,
        engine(llama, **takers, **peers("kv_consumer", **how)) as second,
    ):
        assert ask(second, params=prefill(first)) == (wanted["llama"], 6)
        assert counts(second)["failed_blocks"] == 0
        assert is_idle(second)


@pytest.mark.parametrize("library", LIBRARIES)
def test_stages_read_the_memory_of_stages(
    llama: Path, wanted: dict[str, Said], library: str
) -> None:
    if importlib.util.find_spec(LIBRARIES[library].partition(".")[0]) is None:
        pytest.skip(f"{library} is not installed")
    trust = {"trust_network": True} if library == "mooncake" else {}

    def settings(role: str) -> dict[str, Any]:
        port = free_ports(2) if role == "kv_producer" else 14579
        return transfer(library, role, kv_port=port, kv_buffer_size=1 << 24, **trust)

    with (
        engine(llama, **STAGES, **settings("kv_producer")) as first,
        engine(llama, **STAGES, **settings("kv_consumer")) as second,
    ):
        assert ask(second, params=prefill(first)) == (wanted["llama"], 6)
        assert counts(second)["failed_blocks"] == 0


BODY = {"model": "demo", "prompt": list(range(40, 140)), "max_tokens": 8, "temperature": 0}


WORDS = ("-pp", "2", "--dtype", "float32", "--served-model-name", "demo",
         "--enable-prompt-tokens-details")  # fmt: skip


@pytest.fixture(scope="module")
def shared(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("shared")


@pytest.fixture(scope="module")
def server(shared: Path) -> Iterator[RunningServer]:
    stated = json.dumps(files(shared)["kv_transfer_config"])
    with serving(*WORDS, "--kv-transfer-config", stated) as running:
        yield running


def completion(server: RunningServer) -> tuple[str, int]:
    """Text, and how many tokens of the prompt were not computed."""
    answer = post(f"{server.api}/completions", BODY)
    details = answer["usage"].get("prompt_tokens_details") or {}
    return answer["choices"][0]["text"], details.get("cached_tokens") or 0


def test_a_served_model_saves_for_the_next_and_ends_with_a_stage(
    server: RunningServer, shared: Path
) -> None:
    text, cached = completion(server)
    assert cached == 0
    with LLM(dtype="float32", **STAGES, **files(shared)) as llm:
        params = SamplingParams(temperature=0, max_tokens=8)
        [output] = llm.generate([BODY["prompt"]], params, use_tqdm=False)
        assert output.outputs[0].text == text
        assert output.num_cached_tokens > 0
        assert counts(llm)["loaded_blocks"] > 0
    segments = set(os.listdir("/dev/shm"))
    [stage] = ranks_of(server)
    os.kill(stage, signal.SIGKILL)
    assert server.process.wait(5 * SLACK) != 0
    wait_until(lambda: not alive(stage), 5 * SLACK)
    assert f"rank 1 (process {stage}) ended: killed by signal 9" in "".join(server.log)
    assert set(os.listdir("/dev/shm")) <= segments
