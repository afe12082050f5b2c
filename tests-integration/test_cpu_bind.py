"""``cpu_bind``: the threads of a running engine, as the system sees them."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from headrace import LLM, SamplingParams
from headrace_core.errors import ConfigError

pytestmark = pytest.mark.skipif(sys.platform != "linux", reason="only Linux binds threads")

SMALL = {"max_model_len": 256, "max_num_seqs": 4, "kv_cache_memory_bytes": 8 << 20}
GREEDY = SamplingParams(temperature=0.0, max_tokens=8)
PROMPT = "Once upon a time"


def cores_of_kernels() -> list[set[int]]:
    """On which cores each thread of the kernels' pool may run."""
    ours = [t for t in Path("/proc/self/task").iterdir() if name_of(t) == "headrace-kernel"]
    return [os.sched_getaffinity(int(task.name)) for task in ours]


def name_of(task: Path) -> str:
    try:
        return (task / "comm").read_text().strip()
    except OSError:
        return ""  # another's, ended just now


def cores_of_worker() -> list[set[int]]:
    ours = [thread for thread in threading.enumerate() if thread.name == "headrace-worker"]
    return [os.sched_getaffinity(thread.native_id or 0) for thread in ours]


def text_of(llm: LLM) -> str:
    return llm.generate([PROMPT], GREEDY, use_tqdm=False)[0].outputs[0].text


def test_threads_run_where_they_are_told_and_outputs_stay() -> None:
    before = os.sched_getaffinity(0)
    cores = sorted(before)[:2]
    written = ",".join(map(str, reversed(cores)))
    with LLM(cpu_bind="none", num_threads=len(cores), **SMALL) as llm:
        expected = text_of(llm)
    with LLM(cpu_bind=written, **SMALL) as llm:
        assert text_of(llm) == expected
        assert cores_of_worker() == [{cores[-1]}]
        assert cores_of_kernels() == [{core} for core in reversed(cores[:-1])]
    assert os.sched_getaffinity(0) == before


def test_a_core_that_is_not_ours_is_refused_before_weights_are_read() -> None:
    with pytest.raises(ConfigError, match=r"device.cpu_bind = '1000': .*this process may use"):
        LLM(cpu_bind="1000", **SMALL)


def test_one_core_means_one_thread() -> None:
    """No oversubscription under ``taskset``, whatever OMP_NUM_THREADS says."""
    core = min(os.sched_getaffinity(0))
    code = (
        f"import os; os.sched_setaffinity(0, {{{core}}})\n"
        "from headrace import LLM, SamplingParams\n"
        f"with LLM(**{SMALL!r}) as llm:\n"
        f"    llm.generate([{PROMPT!r}], SamplingParams(max_tokens=2), use_tqdm=False)\n"
        "    import torch\n"
        "    comms = [open(f'/proc/self/task/{t}/comm').read().strip()\n"
        "             for t in os.listdir('/proc/self/task')]\n"
        "    assert 'headrace-kernel' not in comms, comms\n"
    )
    subprocess.run(
        [sys.executable, "-c", code], check=True, env={**os.environ, "OMP_NUM_THREADS": "4"}
    )
