"""``distributed_executor_backend="ray"`` and ``examples/ray_data_batch.py``, in a cluster of two cores."""

from __future__ import annotations

import os
import runpy
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from families import save_model
from modes import PROMPTS, SETTINGS
from servers import PATIENCE, SLACK, alive

from headrace import LLM, SamplingParams
from headrace_testing.waiting import wait_until

EXAMPLE = Path(__file__).parents[1] / "examples" / "ray_data_batch.py"
GREEDY = SamplingParams(temperature=0, max_tokens=12, ignore_eos=True, logprobs=1)
LONG = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True)
SECONDS = 5.0 * SLACK


@pytest.fixture(scope="module")
def ray(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    module = pytest.importorskip("ray", reason="ray is not installed (pip install 'ray[data]')")
    for attempt in range(3):  # Ray gives its own processes 30 s, and the machine may be busy
        try:
            module.init(num_cpus=2, include_dashboard=False, logging_level="ERROR")
            break
        except Exception:
            module.shutdown()
            if attempt == 2:
                raise
    yield module
    module.shutdown()


@pytest.fixture(scope="module", params=["llama", "qwen3_moe"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp(request.param)
    save_model(request.param, folder)
    return folder


def said(llm: LLM) -> list[list[tuple[int, float]]]:
    outputs = llm.generate(PROMPTS, GREEDY, use_tqdm=False)
    return [
        [(token, entry[token].logprob) for token, entry in zip(one.token_ids, one.logprobs, strict=True)]
        for output in outputs for one in output.outputs
    ]  # fmt: skip


def test_an_actor_has_a_rank_until_it_is_killed(ray: Any, folder: Path) -> None:
    with LLM(str(folder), **SETTINGS) as llm:
        wanted = said(llm)
    settings = {**SETTINGS, "tensor_parallel_size": 2, "distributed_executor_backend": "ray"}
    with LLM(str(folder), **settings) as llm:
        found = said(llm)
        pids = [report["pid"] for report in llm.collective_rpc("report")]
    assert [[t for t, _ in one] for one in found] == [[t for t, _ in one] for one in wanted]
    for one, other in zip(found, wanted, strict=True):
        assert [p for _, p in one] == pytest.approx([p for _, p in other], abs=1e-4)
    assert pids[0] == os.getpid() != pids[1]
    wait_until(lambda: not alive(pids[1]), SECONDS, "the actor lives on")
    wait_until(lambda: ray.available_resources().get("CPU") == 2, SECONDS, "Ray keeps its cores")
    if "moe" in folder.name:
        return
    with LLM(str(folder), **settings) as llm:
        _, actor = [report["pid"] for report in llm.collective_rpc("report")]
        errors: list[BaseException] = []

        def run() -> None:
            try:
                while True:
                    llm.generate(PROMPTS, LONG, use_tqdm=False)
            except Exception as error:
                errors.append(error)

        thread = threading.Thread(target=run)
        thread.start()
        os.kill(actor, signal.SIGKILL)
        thread.join(SECONDS)
        assert not thread.is_alive()
        assert "node 1 (" in str(errors[0]) or "rank 1 (" in str(errors[0])


def test_an_actor_has_a_stage_until_it_is_killed(ray: Any, folder: Path) -> None:
    if "moe" in folder.name:
        pytest.skip("one model is enough")
    with LLM(str(folder), **SETTINGS) as llm:
        wanted = said(llm)
    settings = {**SETTINGS, "pipeline_parallel_size": 2, "distributed_executor_backend": "ray"}
    with LLM(str(folder), **settings) as llm:
        assert said(llm) == wanted, "the bits of one process"
        _, actor = [report["pid"] for report in llm.collective_rpc("report")]
        os.kill(actor, signal.SIGKILL)
        wait_until(lambda: llm.engine.client.failure is not None, SECONDS)
        cause = str(llm.engine.client.failure)
        assert "node 1 (" in cause or "rank 1 (" in cause
    wait_until(lambda: ray.available_resources().get("CPU") == 2, SECONDS, "Ray keeps its cores")


def test_no_room_is_told(
    ray: Any, monkeypatch: pytest.MonkeyPatch, request: pytest.FixtureRequest
) -> None:
    from headrace_engine.multiproc.ray import executor

    monkeypatch.setattr(executor, "PLACED_SECONDS", 0.5)
    taken = ray.util.placement_group([{"CPU": 2}])
    assert taken.wait(PATIENCE)
    request.addfinalizer(lambda: ray.util.remove_placement_group(taken))
    with pytest.raises(ValueError, match=r"Ray had no room for 1 actors of 1 CPUs"):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray",
            kv_cache_memory_bytes=64 << 20)  # fmt: skip


def test_rows_get_answers(ray: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    pytest.importorskip("pyarrow", reason="pyarrow is not installed (pip install 'ray[data]')")
    (tmp_path / "prompts.txt").write_text("Hello\nWhat is 3 plus 4?\nGood night\n")
    monkeypatch.setattr(
        sys, "argv",
        ["example", str(tmp_path / "prompts.txt"), "--output", str(tmp_path / "answers"), "--max-tokens",
         "8", "--kv-cache-memory-bytes", str(64 << 20)],
    )  # fmt: skip
    runpy.run_path(str(EXAMPLE), run_name="__main__")
    rows = ray.data.read_parquet(str(tmp_path / "answers")).take_all()
    assert sorted(row["text"] for row in rows) == ["Good night", "Hello", "What is 3 plus 4?"]
    assert all(row["answer"] for row in rows)


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        (
            {"communicator": "shm"},
            "communicator = 'shm': must be 'auto' or 'gloo' with distributed_exec",
        ),
        ({"cpu_bind": "0-1"}, "cpu_bind = '0-1': must be 'none' with .* = 'ray'"),
    ],
)
def test_what_does_not_work_is_refused_by_name(settings: dict[str, Any], told: str) -> None:
    with pytest.raises(ValueError, match=told):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray", **settings)


def test_without_ray_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "ray", None)
    with pytest.raises(ImportError, match=r"pip install 'headrace-engine\[ray\]'"):
        LLM(tensor_parallel_size=2, distributed_executor_backend="ray",
            kv_cache_memory_bytes=64 << 20)  # fmt: skip
